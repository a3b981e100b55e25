"""LoRA files in any names that ComfyUI loads, as plain weights.

Names, aliases and defaults are ComfyUI's own: its loader reads the file, and what it would apply to
the model is converted, or refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_base
import comfy.utils
import comfy.weight_adapter
import torch

from ..demotion import adapter
from . import families

REFUSED = {
    "oft": "OFT, which PEFT applies to the inputs of a weight and ComfyUI to its outputs",
    "boft": "BOFT, which ComfyUI and PEFT apply to different sides of a weight",
    "glora": "GLoRA, which PEFT does not have",
    "diff": "a full difference (.diff, .diff_b or a norm), which is no low-rank adapter",
    "set": "a replaced weight (.set_weight), which is no low-rank adapter",
}


def read(path: Path, model: comfy.model_base.BaseModel) -> tuple[adapter.Weights, list[str]]:
    """Weights of a file of LoRA, DoRA, LoHa or LoKr on a model's Linears, and the keys that ComfyUI
    does not load into the model (such as a text encoder's).

    A missing alpha means scale 1, as it does in ComfyUI. Raises ValueError when no key fits the
    model, and for whatever ComfyUI would apply and this pack cannot: nothing is read in part.
    """
    held = comfy.utils.load_torch_file(str(path), safe_load=True)
    tensors = comfy.lora_convert.convert_lora(held)
    patches = comfy.lora.load_lora(tensors, comfy.lora.model_lora_keys_unet(model, {}))
    if not patches:
        raise ValueError(
            f"LoRA {path.name} has no key that fits this model (it has {len(tensors)} keys, such "
            f"as {next(iter(tensors), 'none')}): choose a LoRA made for this model"
        )
    linears = families.linears(model.diffusion_model)
    slices: dict[str, list[tuple[int, int, adapter.Factors]]] = {}
    loaded: set[str] = set()
    for target, patch in patches.items():
        key, *place = (target,) if isinstance(target, str) else target
        name = key.removeprefix(adapter.PREFIX).removesuffix(".weight")
        try:
            factors = factors_of(patch)
            if name not in linears or not key.endswith(".weight"):
                raise ValueError("it is not the weight of a Linear")
            rows = linears[name].out_features
            start, length = _rows(place, rows)
        except ValueError as error:
            raise ValueError(
                f"LoRA {path.name} changes {key} in a way this pack cannot follow: {error}. "
                "Choose a LoRA, DoRA, LoHa or LoKr of Linears only"
            ) from None
        slices.setdefault(name, []).append((start, length, factors))
        loaded |= patch.loaded_keys
    modules = {
        name: _fused(path, name, found, linears[name].out_features)
        for name, found in slices.items()
    }
    return adapter.Weights(modules), sorted(tensors.keys() - loaded)


def _rows(place: list[Any], rows: int) -> tuple[int, int]:
    """(start, length) of the rows of a weight that an alias stands for."""
    if not place:
        return 0, rows
    (axis, start, length), *function = place
    if axis != 0 or function:
        raise ValueError("its name stands for a weight that ComfyUI rearranges")
    return start, length


def factors_of(patch: Any) -> adapter.Factors:
    """What ComfyUI's loader made of one module's keys, in the pack's names."""
    kind = patch.name if isinstance(patch, comfy.weight_adapter.WeightAdapterBase) else patch[0]
    if kind in REFUSED:
        raise ValueError(f"it is {REFUSED[kind]}")
    if kind == "lora":
        up, down, alpha, middle, dora_scale, reshape = patch.weights
        tensors = {"lora_A.weight": down.flatten(1), "lora_B.weight": up.flatten(1)}
        extra = middle, reshape
    elif kind == "loha":
        w1_a, w1_b, alpha, w2_a, w2_b, *extra, dora_scale = patch.weights
        tensors = {
            "hada_w1_a": w1_a,
            "hada_w1_b": w1_b,
            "hada_w2_a": w2_a,
            "hada_w2_b": w2_b,
        }
    else:
        w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, *extra, dora_scale = patch.weights
        tensors = {}
        for factor, whole, left, right in (("w1", w1, w1_a, w1_b), ("w2", w2, w2_a, w2_b)):
            if whole is None and (left is None or right is None):
                raise ValueError(f"its lokr_{factor} is missing")
            if whole is None:
                tensors |= {f"lokr_{factor}_a": left, f"lokr_{factor}_b": right}
            else:
                tensors[f"lokr_{factor}"] = whole
    if any(tensor is not None for tensor in extra):
        raise ValueError("it is a Tucker product of a convolution, or reshapes the weight")
    if dora_scale is not None:
        if kind != "lora":
            raise ValueError(f"it is a DoRA of a {kind}, and PEFT has DoRA of LoRA only")
        if tuple(dora_scale.shape) != (up.shape[0], 1):
            raise ValueError("it is a DoRA of the weight's columns, and PEFT has that of rows only")
        tensors["dora_scale"] = dora_scale
    made = adapter.Factors(tensors, 1.0)
    return adapter.Factors(tensors, (made.rank or 1.0) if alpha is None else alpha)


def _fused(
    path: Path, name: str, found: list[tuple[int, int, adapter.Factors]], rows: int
) -> adapter.Factors:
    """One adapter of a Linear from those of slices of its rows: A stacked, B in blocks, of which
    only the blocks are trained."""
    if len(found) == 1 and found[0][1] == rows:
        return found[0][2]
    if any(factors.kind != "LoRA" for _, _, factors in found):
        raise ValueError(
            f"LoRA {path.name} changes parts of {name} by {found[0][2].kind}: parts of a weight "
            "can only be followed for LoRA"
        )
    downs = [factors.tensors["lora_A.weight"].float() for _, _, factors in found]
    rank = sum(down.shape[0] for down in downs)
    # One scale for the whole; exactly 1 where the slices' scales are equal, as they usually are.
    scale = found[0][2].scale
    up, mask = torch.zeros(rows, rank), torch.zeros(rows, rank)
    column = 0
    for start, length, factors in found:
        block = (slice(start, start + length), slice(column, column + factors.rank))
        up[block] = factors.tensors["lora_B.weight"].float() * (factors.scale / scale)
        mask[block] = 1
        column += factors.rank
    fused = adapter.lora(torch.cat(downs), up, scale * rank)
    return adapter.Factors(fused.tensors, fused.alpha, mask)
