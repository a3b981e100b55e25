"""Recognising models cheaply: names, shapes and sampled values of the weights, and what is patched
onto them.

Sampling takes far less time than the loading that comes before it, so nothing is cached and no
file is taken for what its path, size and time say.
"""

from __future__ import annotations

import hashlib
from typing import Any

import comfy.weight_adapter
import torch

# Values of a tensor that are looked at: runs at even distances, since a page read costs as much as
# a value.
RUNS, RUN = 8, 8


def fingerprint(module: torch.nn.Module, patches: Any = None) -> str:
    """16 hex digits of a module's weights and of what is patched onto them.

    The weights must be as loaded: merged patches would depend on the device that merged them, and
    streamed weights are not merged at all.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, module)
    _feed(digest, patches)
    return digest.hexdigest()


def patches_of(model) -> dict[str, Any]:
    """All that nodes have put on a MODEL and that may change what it computes."""
    return {
        "weights": model.patches,
        "wrapped weights": model.weight_wrapper_patches,
        "objects": model.object_patches,
        "injections": model.injections,
        "wrappers": model.wrappers,
        "options": model.model_options,
    }


def _feed(digest, value: Any) -> None:
    """Functions and objects of other kinds are told apart by their names only."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)}".encode())
        digest.update(_sample(value).float().cpu().numpy().tobytes())
    elif isinstance(value, torch.nn.Module):
        _feed(digest, value.state_dict())
    elif isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        _feed(digest, [value.name, value.weights])
    elif isinstance(value, dict):
        _feed(digest, sorted((str(key), entry) for key, entry in value.items()))
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for entry in value:
            _feed(digest, entry)
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        digest.update(f"{value!r},".encode())
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        digest.update(f"{named.__module__}.{named.__qualname__},".encode())


def _sample(values: torch.Tensor) -> torch.Tensor:
    values = values.detach().reshape(-1)
    if values.numel() <= RUNS * RUN:
        return values
    starts = torch.linspace(0, values.numel() - RUN, RUNS).long()
    return torch.cat([values[start : start + RUN] for start in starts.tolist()])
