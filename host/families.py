"""What the pack knows of a model family: its patch, the Linears that take a LoRA, its empty text.

A family that is not listed works if its model is flow matching, tells its patch, and its blocks
hold Linears; otherwise it is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import comfy.model_base
import comfy.model_sampling
import comfy.ops
import torch

from ..demotion import draws, grid

FLOW = (comfy.model_sampling.CONST, comfy.model_sampling.COSMOS_RFLOW)

Shape = tuple[int, ...]
# Shapes of a conditioning of one token: of the token, and of the entries beside it.
Text = tuple[Shape, dict[str, Shape]]


@dataclass(frozen=True)
class Family:
    """A family of flow transformers.

    patch           latent cells on a token's edge
    targets         pattern of the Linears (names inside the diffusion model) that take a LoRA: at
                    least the image stream's attention and MLP
    text            shapes of its shortest conditioning, from the diffusion model; None if unknown
    overwritten     pattern of modules whose input the model writes over after they saved it for the
                    backward; None if it has none
    longest         most tokens on an edge that its position table holds; None without a limit
    kept            what its blocks keep for the backward, over what the Linears that take a LoRA
                    tell
    alone           whether its forward takes one sample at a time, from the diffusion model and the
                    names of what it is given of a conditioning
    """

    name: str
    patch: int
    targets: str
    text: Callable[[torch.nn.Module], Text] | None = None
    overwritten: str | None = None
    longest: Callable[[torch.nn.Module], int | None] = lambda network: None
    kept: float = 1.0
    alone: Callable[[torch.nn.Module, Collection[str]], bool] = lambda network, given: False


def _flux_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.txt_in.in_features), _pooled(network.params.vec_in_dim)


def _hunyuan_text(network: torch.nn.Module) -> Text:
    width = network.txt_in.input_embedder.in_features
    return (1, 1, width), _pooled(network.params.vec_in_dim)


def _pooled(width: int | None) -> dict[str, Shape]:
    return {"pooled_output": (1, width)} if width else {}


def _sd3_text(network: torch.nn.Module) -> Text:
    pooled = network.y_embedder.mlp[0].in_features
    return (1, 1, network.context_embedder.in_features), _pooled(pooled)


def _aura_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.cond_seq_linear.in_features), {}


def _txt_in_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.txt_in.in_features), {}


def _lumina_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.cap_embedder[1].in_features), {}


def _hidream_text(network: torch.nn.Module) -> Text:
    layers = max(network.llama_layers) + 1
    llama, t5 = (network.caption_projection[i].linear.in_features for i in (0, -1))
    pooled = network.p_embedder.pooled_embedder.linear_1.in_features
    return (1, 1, t5), {"pooled_output": (1, pooled), "conditioning_llama3": (1, layers, 1, llama)}


def _wan_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.text_embedding[0].in_features), {}


def _cosmos_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.blocks[0].cross_attn.k_proj.in_features), {}


def _krea2_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.txtlayers * network.txtdim), {}


def _omnigen2_text(network: torch.nn.Module) -> Text:
    # Its forward takes the number of tokens from their mask.
    width = network.time_caption_embed.caption_embedder[1].in_features
    return (1, 1, width), {"attention_mask": (1, 1)}


def _kandinsky5_text(network: torch.nn.Module) -> Text:
    pooled = network.pooled_text_embeddings.in_layer.in_features
    return (1, 1, network.text_embeddings.in_layer.in_features), _pooled(pooled)


def _ernie_text(network: torch.nn.Module) -> Text:
    # Text as wide as the model is not projected.
    projection = network.text_proj
    return (1, 1, projection.in_features if projection else network.hidden_size), {}


def _ideogram_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.llm_cond_proj.in_features), {}


def _pixeldit_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.txt_embed_dim), {}


def _hunyuan_alone(network: torch.nn.Module, given: Collection[str]) -> bool:
    # Its forward has one mask, and a mean flow one second time, for all samples.
    return network.time_r_in is not None or "attention_mask" in given


_FLUX = r"^double_blocks\.\d+\.img_(attn|mlp)\.|^single_blocks\.\d+\.linear[12]$"
_KANDINSKY5 = r"^visual_transformer_blocks\.\d+\.(self_attention|cross_attention|feed_forward)\."

# By the class of ComfyUI's model (comfy/model_base.py).
FAMILIES = {
    "Flux": Family("Flux", 2, _FLUX, _flux_text),
    "Flux2": Family("Flux 2", 1, _FLUX, _flux_text),
    "LongCatImage": Family("LongCat-Image", 2, _FLUX, _flux_text),
    "Chroma": Family("Chroma", 2, _FLUX, _flux_text),
    "HunyuanVideo": Family("HunyuanVideo", 2, _FLUX, _hunyuan_text, alone=_hunyuan_alone),
    "HunyuanImage21": Family("HunyuanImage 2.1", 1, _FLUX, _hunyuan_text, alone=_hunyuan_alone),
    "SD3": Family(
        "SD 3",
        2,
        r"^joint_blocks\.\d+\.x_block\.(attn2?|mlp)\.",
        _sd3_text,
        longest=lambda network: network.pos_embed_max_size,
    ),
    "AuraFlow": Family(
        "AuraFlow",
        2,
        r"^double_layers\.\d+\.(attn\.w2|mlpX\.)|^single_layers\.\d+\.(attn|mlp)\.",
        _aura_text,
    ),
    "QwenImage": Family(
        "Qwen-Image",
        2,
        r"^transformer_blocks\.\d+\.(attn\.to_(q|k|v|out\.0)$|img_mlp\.)",
        _txt_in_text,
    ),
    "Lumina2": Family(
        "Lumina 2, Z-Image",
        2,
        r"^(noise_refiner|layers)\.\d+\.(attention|feed_forward)\.",
        _lumina_text,
    ),
    "HiDream": Family(
        "HiDream",
        2,
        r"^(double|single)_stream_blocks\.\d+\.block\.(attn1\.to_(q|k|v|out)$|ff_i\.)",
        _hidream_text,
    ),
    "Anima": Family("Anima", 2, r"^blocks\.\d+\.(self_attn|cross_attn|mlp)\.", _cosmos_text),
    # The experts of Wan 2.2 14B are of this class too.
    "WAN21": Family("Wan 2.1", 2, r"^blocks\.\d+\.(self_attn|cross_attn|ffn)\.", _wan_text),
    "CosmosPredict2": Family(
        "Cosmos-Predict2", 2, r"^blocks\.\d+\.(self_attn|cross_attn|mlp)\.", _cosmos_text
    ),
    "WAN22": Family("Wan 2.2", 2, r"^blocks\.\d+\.(self_attn|cross_attn|ffn)\.", _wan_text),
    "Krea2": Family("Krea 2", 2, r"^blocks\.\d+\.(attn|mlp)\.", _krea2_text),
    "Omnigen2": Family(
        "OmniGen2", 2, r"^(noise_refiner|layers)\.\d+\.(attn|feed_forward)\.", _omnigen2_text
    ),
    "Kandinsky5": Family("Kandinsky 5", 2, _KANDINSKY5, _kandinsky5_text),
    "Kandinsky5Image": Family("Kandinsky 5 Image", 2, _KANDINSKY5, _kandinsky5_text),
    "ErnieImage": Family("ERNIE-Image", 1, r"^layers\.\d+\.(self_attention|mlp)\.", _ernie_text),
    # Their patch_size is that of latents packed already.
    "Lens": Family(
        "Lens",
        1,
        r"^transformer_blocks\.\d+\.(attn\.(img_qkv|to_out\.0)$|img_mlp\.)",
        _txt_in_text,
    ),
    "Ideogram4": Family(
        "Ideogram 4", 1, r"^layers\.\d+\.(attention|feed_forward)\.", _ideogram_text
    ),
    "PixelDiTT2I": Family(
        "PixelDiT",
        16,
        r"^patch_blocks\.\d+\.(attn\.(qkv|proj)_x|mlp_x\.)"
        r"|^pixel_blocks\.\d+\.(compress_to_attn|expand_from_attn|attn\.|mlp\.)",
        _pixeldit_text,
        overwritten=r"pixel_blocks\.\d+\.norm2",
        kept=8.5,
    ),
}

# Flow matching, but of two latents at once.
WITH_SOUND = ("LTXAV", "MiniMaxH3")


def family_of(model: comfy.model_base.BaseModel) -> Family:
    """Family of a loaded model.

    Raises ValueError, naming its kind, for a model that is not flow matching of one latent with
    noise of deviation 1, and for one of an unlisted family whose patch or blocks cannot be told.
    """
    kind = type(model).__name__
    why = _not_plain(model)
    if why:
        raise ValueError(
            f"MODEL is a {kind} {why}: use one of {', '.join(f.name for f in FAMILIES.values())}"
        )
    return FAMILIES.get(kind) or _unlisted(kind, model.diffusion_model)


def _not_plain(model: comfy.model_base.BaseModel) -> str | None:
    sampling = model.model_sampling
    image_to_image = isinstance(sampling, comfy.model_sampling.IMG_TO_IMG_FLOW)
    if image_to_image or not isinstance(sampling, FLOW):
        return f"of type {model.model_type.name}, which is not plain flow matching"
    scale = getattr(sampling, "noise_scale", 1.0)
    if scale != 1.0:
        return f"whose noise has a deviation of {scale:g} instead of 1"
    if type(model).__name__ in WITH_SOUND:
        return "that makes pictures and sound together, which are two latents"
    return None


def check_grid(model: comfy.model_base.BaseModel, cells: grid.Grid, name: str) -> None:
    """Raise ValueError when a picture's grid of latent cells is beyond a model's position table."""
    family = family_of(model)
    longest = family.longest(model.diffusion_model)
    edge = max(cells) // family.patch
    if longest is not None and edge > longest:
        raise ValueError(
            f"{name} has a grid of {edge} tokens on its longer edge, and the position table of "
            f"this {family.name} holds {longest}: choose a smaller native_tier or crop the picture"
        )


def _unlisted(kind: str, network: torch.nn.Module) -> Family:
    patch = getattr(network, "patch_size", None)
    edges = set(patch[-2:]) if isinstance(patch, (tuple, list)) else {patch}
    lists = sorted({name.rpartition(".")[0] for name in blocks(network)})
    if not lists or len(edges) > 1 or not isinstance(next(iter(edges)), int):
        raise ValueError(
            f"MODEL is a {kind}, a family this version does not know, and its patch or its blocks "
            f"cannot be told: use one of {', '.join(f.name for f in FAMILIES.values())}"
        )
    targets = rf"^({'|'.join(map(re.escape, lists))})\.\d+\."
    # Whether its forward keeps the samples of a batch apart has not been looked at.
    return Family(kind, edges.pop(), targets, alone=lambda network, given: True)


def blocks(network: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules of a diffusion model's lists that hold Linears, by name."""
    found = {}
    for name, module in network.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, torch.nn.ModuleList) and not inside:
            found |= {
                f"{name}.{index}": block for index, block in enumerate(module) if linears(block)
            }
    return found


def targets_of(family: Family, pattern: str) -> str:
    """The pattern a user gave, or the family's own."""
    return pattern.strip() or family.targets


def linears(diffusion_model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All Linears of a diffusion model by name, those of quantised models included.

    Raises ValueError for weights whose inputs are smoothed: ComfyUI would apply a LoRA to the
    smoothed inputs.
    """
    found = {name: module for name, module in diffusion_model.named_modules() if _is_linear(module)}
    smoothed = [name for name in found if hasattr(found[name], "pre_quant_scale")]
    if smoothed:
        raise ValueError(
            f"MODEL smooths the inputs of {len(smoothed)} Linears, such as {smoothed[0]} "
            "(pre_quant_scale), and a LoRA would mean something else there: use another precision "
            "of this model"
        )
    return found


def _is_linear(module: torch.nn.Module) -> bool:
    # The Linear of ComfyUI's mixed precision is a class of its own for each model, and not torch's.
    mixed = isinstance(module, comfy.ops.CastWeightBiasOp) and type(module).__name__ == "Linear"
    return mixed or isinstance(module, torch.nn.Linear)


def sigma_range(model: comfy.model_base.BaseModel) -> tuple[float, float]:
    """Range of sigma in [0, 1] that a model is made for."""
    sampling = model.model_sampling
    # Tables are float32: rounded, so that 1 is 1.
    low, high = round(float(sampling.sigma_min), 5), round(float(sampling.sigma_max), 5)
    if isinstance(sampling, comfy.model_sampling.COSMOS_RFLOW):
        return low / (1 + low), high / (1 + high)
    return 0.0, high


def own_density(model: comfy.model_base.BaseModel) -> draws.SigmaDensity:
    """The sigma density of a model's own schedule: uniform steps through its shift."""
    sampling = model.model_sampling
    shift = getattr(sampling, "shift", 1.0)
    # Flux-like schedules give the logarithm of the shift.
    if isinstance(sampling, comfy.model_sampling.ModelSamplingFlux):
        shift = math.exp(shift)
    return draws.SigmaDensity("shifted", shift=float(shift))
