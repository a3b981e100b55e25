"""Toys of the families that are neither Flux-like nor of the first three."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import toys as checkpoints
from family_toys import Toy, from_checkpoint, from_config
from safetensors.torch import load_file, save_file


def cosmos_predict2(folder: Path) -> Path:
    """Anima's toy without the key that tells it from Cosmos-Predict2."""
    state = load_file(checkpoints.anima(folder))
    plain = {key: value for key, value in state.items() if "llm_adapter" not in key}
    path = folder / "toy_cosmos_predict2.safetensors"
    save_file(plain, path)
    return path


def wan22(folder: Path) -> Path:
    """Wan 2.2 5B class: 48 channels in and out, dim 128, 2 layers."""
    return checkpoints.wan(folder, "toy_wan22", in_dim=48, out_dim=48)


def krea2(folder: Path) -> Path:
    """Krea 2: 128 features, 2 blocks, text of 2 layers of width 40."""
    import comfy.ldm.krea2.model as krea2_model

    path = checkpoints.saved(
        folder / "toy_krea2.safetensors",
        krea2_model.SingleStreamDiT,
        features=128,
        txtdim=40,
        heads=1,
        kvheads=1,
        layers=2,
        txtlayers=2,
    )
    # It adds 1 to the scales of its norms.
    state = load_file(path)
    shifted = {key: value - 1 if key.endswith("scale") else value for key, value in state.items()}
    save_file(shifted, path)
    return path


def kandinsky5(folder: Path) -> Path:
    """Kandinsky 5 video class: dim 128, 2 text and 2 visual blocks, one frame in the tests."""
    import comfy.ldm.kandinsky5.model as kandinsky5_model

    return checkpoints.saved(
        folder / "toy_kandinsky5.safetensors",
        kandinsky5_model.Kandinsky5,
        time_dim=64,
        model_dim=128,
        ff_dim=256,
        num_text_blocks=2,
        num_visual_blocks=2,
    )


KANDINSKY5_IMAGE = {
    "in_text_dim": 32,
    "in_text_dim2": 16,
    "time_dim": 64,
    "model_dim": 128,
    "ff_dim": 256,
    "visual_embed_dim": 64,
    "num_text_blocks": 2,
    "num_visual_blocks": 2,
    "axes_dims": (8, 12, 12),
    "rope_scale_factor": (1.0, 1.0, 1.0),
}
OMNIGEN2 = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "axes_dim_rope": (8, 12, 12),
    "text_feat_dim": 32,
    "timestep_scale": 1000.0,
}
ERNIE_IMAGE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 256,
    "text_in_dim": 32,
    "rope_axes_dim": (8, 12, 12),
}
PIXELDIT = {
    "num_groups": 4,
    "hidden_size": 64,
    "pixel_attn_hidden_size": 64,
    "pixel_num_groups": 4,
    "patch_depth": 2,
    "pixel_depth": 2,
    "txt_embed_dim": 32,
}
LENS = {
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "enc_hidden_dim": 16,
    "axes_dims_rope": (8, 12, 12),
    "selected_layer_index": (0, 1),
}
IDEOGRAM4 = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "intermediate_size": 256,
    "adaln_dim": 64,
    "llm_features_dim": 32,
    "mrope_section": (6, 5, 5),
}

# Not listed by the pack.
MAGE_FLOW = {
    "in_channels": 128,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 12, 12),
}
JOY_IMAGE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "text_dim": 32,
    "num_layers": 2,
    "rope_dim_list": [8, 12, 12],
}
CHROMA_RADIANCE = {
    "in_channels": 3,
    "out_channels": 3,
    "context_in_dim": 32,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 4,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "patch_size": 4,
    "qkv_bias": True,
    "in_dim": 64,
    "out_dim": 128,
    "hidden_dim": 64,
    "n_layers": 1,
    "txt_ids_dims": [],
    "vec_in_dim": None,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 4,
    "nerf_depth": 2,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 512,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
    "use_x0": False,
    "use_sequential_txt_ids": False,
}


@dataclass(frozen=True)
class OwnText(Toy):
    """A toy whose conditioning the pack does not know, or that has a mask.

    width   of a token
    masked  whether a mask of its tokens stands beside it
    """

    width: int
    masked: bool = False

    def conditioning(self, model: Any, seed: int = 0, tokens: int = 7) -> list:
        generator = torch.Generator().manual_seed(seed)
        beside = {"attention_mask": torch.ones(1, tokens, dtype=int)} if self.masked else {}
        return [[torch.randn(1, tokens, self.width, generator=generator), beside]]


TOYS = {
    "CosmosPredict2": Toy(from_checkpoint(cosmos_predict2), (16, 1, 8, 12)),
    "WAN22": Toy(from_checkpoint(wan22), (48, 1, 16, 12)),
    "Krea2": Toy(from_checkpoint(krea2), (16, 1, 32, 20)),
    "Omnigen2": OwnText(from_config("Omnigen2", OMNIGEN2), (16, 16, 12), 32, masked=True),
    "Kandinsky5": Toy(from_checkpoint(kandinsky5), (16, 1, 16, 12)),
    "Kandinsky5Image": Toy(from_config("Kandinsky5Image", KANDINSKY5_IMAGE), (16, 16, 12)),
    "ErnieImage": Toy(from_config("ErnieImage", ERNIE_IMAGE), (128, 16, 12)),
    "PixelDiTT2I": Toy(from_config("PixelDiTT2I", PIXELDIT), (3, 96, 64)),
    "Lens": Toy(from_config("Lens", LENS), (128, 16, 12)),
    "Ideogram4": Toy(from_config("Ideogram4", IDEOGRAM4), (128, 24, 20)),
    "MageFlow": OwnText(from_config("MageFlow", MAGE_FLOW), (128, 16, 12), 32),
    "JoyImage": OwnText(from_config("JoyImage", JOY_IMAGE), (16, 1, 16, 12), 32),
    "ChromaRadiance": OwnText(from_config("ChromaRadiance", CHROMA_RADIANCE), (3, 24, 16), 32),
}
