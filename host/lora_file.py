"""LoRA files in any names that ComfyUI loads, as plain weights."""

from __future__ import annotations

from pathlib import Path

import comfy.lora
import comfy.model_base
import comfy.utils

from ..demotion import adapter
from . import families

NAMES = ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight"))


def read(path: Path, model: comfy.model_base.BaseModel) -> adapter.Weights:
    """Weights of a LoRA file on a model's Linears. A missing alpha means scale 1, as it does in
    ComfyUI.

    Raises ValueError when no key fits the model.
    """
    tensors = comfy.utils.load_torch_file(str(path), safe_load=True)
    linears = families.linears(model.diffusion_model)
    modules = {}
    for prefix, key in comfy.lora.model_lora_keys_unet(model, {}).items():
        name = (
            key.removeprefix(adapter.PREFIX).removesuffix(".weight")
            if isinstance(key, str)
            else None
        )
        for down, up in NAMES:
            if name in linears and prefix + down in tensors and prefix + up in tensors:
                weight = tensors[prefix + down]
                alpha = tensors.get(prefix + ".alpha")
                modules[name] = (
                    weight,
                    tensors[prefix + up],
                    float(weight.shape[0] if alpha is None else alpha),
                )
    if not modules:
        raise ValueError(
            f"LoRA {path.name} has no key that fits this model (it has {len(tensors)} keys, such "
            f"as {next(iter(tensors), 'none')}): choose a LoRA made for this model"
        )
    return adapter.Weights(modules)
