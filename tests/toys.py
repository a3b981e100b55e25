"""Toy checkpoints of ComfyUI's own model classes, in files that its loaders detect.

Weights are large (std .2 on Linears): with small weights a wrong gradient still points the right
way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STD = 0.2


def flux(folder: Path, name: str = "toy_flux", **changes: Any) -> Path:
    """Flux without guidance: hidden 128, 2 double and 2 single blocks, text width 32, pooled 16."""
    import comfy.ldm.flux.model as flux_model

    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "vec_in_dim": 16,
        "context_in_dim": 32,
        "hidden_size": 128,
        "mlp_ratio": 4.0,
        "num_heads": 1,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": False,
        "txt_ids_dims": [],
    }
    return saved(folder / f"{name}.safetensors", flux_model.Flux, **config | changes)


def wan(folder: Path, name: str = "toy_wan", **changes: Any) -> Path:
    """Wan 2.1 text-to-video class: dim 128, 2 layers, one frame in the tests."""
    import comfy.ldm.wan.model as wan_model

    config = {
        "model_type": "t2v",
        "patch_size": (1, 2, 2),
        "text_len": 512,
        "in_dim": 16,
        "dim": 128,
        "ffn_dim": 256,
        "freq_dim": 256,
        "text_dim": 4096,
        "out_dim": 16,
        "num_heads": 1,
        "num_layers": 2,
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }
    return saved(folder / f"{name}.safetensors", wan_model.WanModel, **config | changes)


ANIMA = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 192,
    "num_blocks": 10,
    "num_heads": 16,
    "crossattn_emb_channels": 1024,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop",
    "min_fps": 1,
    "max_fps": 30,
    "use_adaln_lora": True,
    "adaln_lora_dim": 256,
    "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0,
    "rope_t_extrapolation_ratio": 1.0,
    "extra_per_block_abs_pos_emb": False,
    "rope_enable_fps_modulation": False,
}


def anima(folder: Path) -> Path:
    """Anima class without its text adapter: 192 channels, the 10 blocks that detection asks for."""
    import comfy.ldm.cosmos.predict2 as predict2

    # Detection tells Anima from Cosmos-Predict2 by a key of the text adapter.
    key = "net.llm_adapter.blocks.0.cross_attn.q_proj.weight"
    return saved(
        folder / "toy_anima.safetensors",
        predict2.MiniTrainDIT,
        "net.",
        {key: torch.zeros(1024, 1024)},
        **ANIMA,
    )


def taesd(folder: Path) -> Path:
    """Single-file TAESD of 16 channels, scaled as Flux's latents are."""
    import comfy.taesd.taesd

    network = comfy.taesd.taesd.TAESD(latent_channels=16)
    state = filled(network.state_dict(), 0.05)
    state |= {"vae_scale": torch.tensor(0.3611), "vae_shift": torch.tensor(0.1159)}
    path = folder / "toy_taesd.safetensors"
    save_file(state, path)
    return path


def wan_vae(folder: Path) -> Path:
    """Wan 2.1's VAE at dim 4: 16 channels, 3-D latents."""
    import comfy.ldm.wan.vae

    network = comfy.ldm.wan.vae.WanVAE(
        dim=4,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        image_channels=3,
        conv_out_channels=3,
        dropout=0.0,
    )
    path = folder / "toy_wan_vae.safetensors"
    save_file(filled(network.state_dict(), 0.05), path)
    return path


def saved(
    path: Path,
    network: type[torch.nn.Module],
    prefix: str = "",
    extra: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint of a network of ComfyUI's with this configuration, and extra tensors in it."""
    import comfy.ops

    built = network(**config, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    state = {f"{prefix}{key}": value for key, value in filled(built.state_dict(), STD).items()}
    save_file(state | (extra or {}), path)
    return path


def filled(state: dict[str, torch.Tensor], std: float) -> dict[str, torch.Tensor]:
    """Normal values for matrices, values near 1 for the scales of norms, small ones for biases."""
    generator = torch.Generator().manual_seed(1)
    filled = {}
    for key, value in state.items():
        noise = torch.randn(value.shape, generator=generator)
        norm_scale = value.ndim == 1 and (key.endswith("scale") or "norm" in key or ".ln_" in key)
        filled[key] = 1 + 0.1 * noise if norm_scale else noise * (std if value.ndim > 1 else 0.1)
    return filled
