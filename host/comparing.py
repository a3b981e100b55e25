"""LoRA files beside one another: what their names stand for, and the weights that they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import comfy.lora
import comfy.lora_convert
import comfy.model_base
import comfy.utils
import torch

from ..demotion import adapter, compare
from . import families, lora_file

CONNECT = "connect MODEL, which tells what names of any convention stand for"


def run(
    files: Mapping[str, tuple[str, Path]],
    model: comfy.model_base.BaseModel | None,
    progress: Callable[[int], Callable[..., object]],
) -> compare.Comparison:
    """Compare LoRA files, role -> (what to call it, path); the roles are those of
    compare.Comparison.

    With a model, files may have names of any convention, and only what they change in the model
    counts. Without one nothing is guessed: all must name the same modules.
    progress(n) is told that n pairs of modules are to be compared, and what it returns is called
    after each.

    Raises ValueError as compare.compare and lora_file.read do; without a model also for files whose
    names differ or cannot be read alone, and for DoRA.
    """
    names = {role: name for role, (name, _) in files.items()}
    if model is None:
        weights = {role: read_alone(path) for role, (_, path) in files.items()}
        _check_names(names, weights)
        base = _no_base
    else:
        weights = {role: lora_file.read(path, model)[0] for role, (_, path) in files.items()}
        base = _bases(model)
    total = (len(weights) - 1) * len(compare.modules_of(weights.values()))
    return compare.compare(names, weights, base, progress(total))


def read_alone(path: Path) -> adapter.Weights:
    """Weights of a LoRA file without the model it is for: modules are called as in the file.

    Raises ValueError for keys that say nothing without a model, and for kinds that lora_file.read
    refuses.
    """
    held = comfy.utils.load_torch_file(str(path), safe_load=True)
    tensors = comfy.lora_convert.convert_lora(held)
    # A key is a module and a suffix, divided at one of its dots: ComfyUI's loader knows which.
    dots = [(key, place) for key in tensors for place, sign in enumerate(key) if sign == "."]
    stems = dict.fromkeys(key[:place] for key, place in dots)
    modules, loaded = {}, set()
    for stem, patch in comfy.lora.load_lora(tensors, {s: s for s in stems}, False).items():
        try:
            modules[stem.removeprefix(adapter.PREFIX)] = lora_file.factors_of(patch)
        except ValueError as error:
            raise ValueError(
                f"LoRA {path.name} changes {stem} in a way this pack cannot follow: {error}. "
                "Choose a LoRA, LoHa or LoKr of Linears only"
            ) from None
        loaded |= patch.loaded_keys
    unread = sorted(tensors.keys() - loaded)
    if unread or not modules:
        raise ValueError(
            f"LoRA {path.name} has {len(unread)} keys that say nothing by themselves, such as "
            f"{next(iter(unread), 'none')}: {CONNECT}"
        )
    return adapter.Weights(modules)


def _check_names(names: Mapping[str, str], weights: Mapping[str, adapter.Weights]) -> None:
    first = weights[compare.FIRST].modules.keys()
    for role, held in weights.items():
        odd = sorted(first ^ held.modules.keys())
        if odd:
            raise ValueError(
                f"{names[compare.FIRST]} and {names[role]} do not name the same modules (only one "
                f"has {odd[0]}): {CONNECT}"
            )


def _no_base(name: str) -> torch.Tensor:
    raise ValueError(f"the change of {name} by DoRA depends on the weight it scales: connect MODEL")


def _bases(model: comfy.model_base.BaseModel) -> Callable[[str], torch.Tensor]:
    linears = families.linears(model.diffusion_model)

    def base(name: str) -> torch.Tensor:
        weight = linears[name].weight
        if weight.dtype.itemsize == 1:
            raise ValueError(
                f"the change of {name} by DoRA cannot be told from a weight stored in "
                f"{weight.dtype}: load MODEL in another precision"
            )
        return weight.detach().float().cpu()

    return base
