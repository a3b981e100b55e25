"""Toys of the families whose blocks attend over text and image at once."""

from __future__ import annotations

from pathlib import Path

import toys as checkpoints
from family_toys import Toy, from_checkpoint, from_config


def flux_guidance(folder: Path) -> Path:
    """Flux with guidance (dev): hidden 128, 2 double and 2 single blocks."""
    return checkpoints.flux(folder, "toy_flux_guidance", guidance_embed=True)


def longcat(folder: Path) -> Path:
    """LongCat-Image: Flux without pooled text, text of the width 3584 that detection asks for."""
    return checkpoints.flux(
        folder,
        "toy_longcat",
        vec_in_dim=None,
        context_in_dim=3584,
        txt_ids_dims=[1, 2],
    )


def flux2(folder: Path) -> Path:
    """Flux 2: hidden 128, 2 double and 2 single blocks, one modulation for all of a kind."""
    return checkpoints.flux(
        folder,
        "toy_flux2",
        in_channels=128,
        out_channels=128,
        patch_size=1,
        vec_in_dim=None,
        mlp_ratio=3.0,
        axes_dim=[32, 32, 32, 32],
        theta=2000,
        qkv_bias=False,
        guidance_embed=True,
        txt_ids_dims=[3],
        global_modulation=True,
        mlp_silu_act=True,
        ops_bias=False,
    )


def sd3(folder: Path) -> Path:
    """SD 3.5 medium's kind: 2 blocks of width 128, the first with the image's own attention too."""
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit

    return checkpoints.saved(
        folder / "toy_sd3.safetensors",
        mmdit.MMDiT,
        input_size=None,
        in_channels=16,
        depth=2,
        adm_in_channels=16,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 32, "out_features": 128},
        },
        pos_embed_max_size=32,
        num_patches=1024,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
    )


def hunyuan_video(folder: Path) -> Path:
    """HunyuanVideo, one frame in the tests: hidden 128, 2 double and 2 single blocks."""
    return _hunyuan(
        folder / "toy_hunyuan_video.safetensors",
        in_channels=16,
        out_channels=16,
        patch_size=[1, 2, 2],
        axes_dim=[16, 56, 56],
        vec_in_dim=768,
        guidance_embed=True,
        meanflow=False,
    )


def hunyuan_image(folder: Path, meanflow: bool = False) -> Path:
    """HunyuanImage 2.1: hidden 128, 2 double and 2 single blocks; distilled, it has a second time,
    the end of the mean flow."""
    return _hunyuan(
        folder / "toy_hunyuan_image.safetensors",
        in_channels=64,
        out_channels=64,
        patch_size=[1, 1],
        axes_dim=[64, 64],
        vec_in_dim=None,
        guidance_embed=False,
        meanflow=meanflow,
    )


def _hunyuan(path: Path, **config) -> Path:
    import comfy.ldm.hunyuan_video.model as hunyuan_model

    return checkpoints.saved(
        path,
        hunyuan_model.HunyuanVideo,
        context_in_dim=32,
        hidden_size=128,
        mlp_ratio=4.0,
        num_heads=1,
        depth=2,
        depth_single_blocks=2,
        theta=256,
        qkv_bias=True,
        byt5=False,
        use_cond_type_embedding=False,
        vision_in_dim=None,
        meanflow_sum=False,
        **config,
    )


CHROMA = {
    "in_channels": 64,
    "out_channels": 64,
    "context_in_dim": 32,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 1,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "in_dim": 64,
    "out_dim": 128,
    "hidden_dim": 64,
    "n_layers": 2,
    "txt_ids_dims": [],
    "vec_in_dim": None,
}
QWEN_IMAGE = {
    "num_layers": 2,
    "num_attention_heads": 1,
    "joint_attention_dim": 32,
}
LUMINA2 = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 192,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "qk_norm": True,
    "cap_feat_dim": 32,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
}
Z_IMAGE = {
    **LUMINA2,
    "dim": 256,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
AURA_FLOW = {
    "dim": 128,
    "n_layers": 4,
    "n_double_layers": 2,
    "n_heads": 2,
    # Its last layer has no norm: the narrower, the smaller its modulation.
    "global_conddim": 16,
    "cond_seq_dim": 32,
    "max_seq": 32 * 32,
}
HIDREAM = {
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 1,
    # So narrow that no expert is left without tokens.
    "attention_head_dim": 32,
    "caption_channels": [32, 24],
    "text_emb_dim": 16,
    "axes_dims_rope": [16, 8, 8],
    "llama_layers": [0, 1, 1, 1],
}

TOYS = {
    "Flux (guidance)": Toy(from_checkpoint(flux_guidance), (16, 16, 12)),
    "Flux2": Toy(from_checkpoint(flux2), (128, 12, 8)),
    "Chroma": Toy(from_config("Chroma", CHROMA), (16, 16, 12)),
    "SD3": Toy(from_checkpoint(sd3), (16, 16, 12)),
    "QwenImage": Toy(from_config("QwenImage", QWEN_IMAGE), (16, 1, 16, 12)),
    "Lumina2": Toy(from_config("Lumina2", LUMINA2), (16, 16, 12)),
    "Lumina2 (Z-Image)": Toy(from_config("ZImage", Z_IMAGE), (16, 16, 12)),
    "AuraFlow": Toy(from_config("AuraFlow", AURA_FLOW), (4, 16, 12)),
    "LongCatImage": Toy(from_checkpoint(longcat), (16, 16, 12)),
    "HunyuanImage21": Toy(from_checkpoint(hunyuan_image), (64, 12, 8)),
    "HunyuanVideo": Toy(from_checkpoint(hunyuan_video), (16, 1, 16, 12)),
    "HiDream": Toy(from_config("HiDream", HIDREAM), (16, 16, 12)),
}
