"""What the pack knows of a model family: its patch, the Linears that take a LoRA, its empty text.

A family that is not listed works if its model is flow matching, tells its patch, and its blocks
hold Linears; otherwise it is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import comfy.model_base
import comfy.model_sampling
import torch

from ..demotion import draws

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
    token_multiple  the model pads the image's tokens to a multiple of this
    """

    name: str
    patch: int
    targets: str
    text: Callable[[torch.nn.Module], Text] | None = None
    token_multiple: int = 1


def _flux_text(network: torch.nn.Module) -> Text:
    pooled = network.params.vec_in_dim
    beside = {"pooled_output": (1, pooled)} if pooled else {}
    return (1, 1, network.txt_in.in_features), beside


def _wan_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.text_embedding[0].in_features), {}


def _cosmos_text(network: torch.nn.Module) -> Text:
    return (1, 1, network.blocks[0].cross_attn.k_proj.in_features), {}


# By the class of ComfyUI's model (comfy/model_base.py).
FAMILIES = {
    "Flux": Family(
        "Flux",
        2,
        r"^double_blocks\.\d+\.img_(attn|mlp)\.|^single_blocks\.\d+\.linear[12]$",
        _flux_text,
    ),
    "Anima": Family("Anima", 2, r"^blocks\.\d+\.(self_attn|cross_attn|mlp)\.", _cosmos_text),
    "WAN21": Family("Wan 2.1", 2, r"^blocks\.\d+\.(self_attn|cross_attn|ffn)\.", _wan_text),
}


def family_of(model: comfy.model_base.BaseModel) -> Family:
    """Family of a loaded model.

    Raises ValueError, naming its kind, for a model that is not flow matching, and for one of an
    unlisted family whose patch or blocks cannot be told.
    """
    kind = type(model).__name__
    sampling = model.model_sampling
    image_to_image = isinstance(sampling, comfy.model_sampling.IMG_TO_IMG_FLOW)
    if (
        not isinstance(sampling, FLOW)
        or image_to_image
        or getattr(sampling, "noise_scale", 1.0) != 1.0
    ):
        raise ValueError(
            f"MODEL is a {kind} of type {model.model_type.name}, which is not plain flow matching: "
            f"use a flow-matching model ({', '.join(f.name for f in FAMILIES.values())})"
        )
    return FAMILIES.get(kind) or _unlisted(kind, model.diffusion_model)


def _unlisted(kind: str, network: torch.nn.Module) -> Family:
    patch = getattr(network, "patch_size", None)
    edges = set(patch[-2:]) if isinstance(patch, (tuple, list)) else {patch}
    lists = sorted({name.rpartition(".")[0] for name in blocks(network)})
    if not lists or len(edges) > 1 or not isinstance(next(iter(edges)), int):
        raise ValueError(
            f"MODEL is a {kind}, a family this version does not know, and its patch or its blocks "
            f"cannot be told: use one of {', '.join(f.name for f in FAMILIES.values())}"
        )
    return Family(kind, edges.pop(), rf"^({'|'.join(map(re.escape, lists))})\.\d+\.")


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


def linears(diffusion_model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """All Linears of a diffusion model by name."""
    return {
        name: module
        for name, module in diffusion_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


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
