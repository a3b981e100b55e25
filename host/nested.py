"""What ComfyUI passes around: tensors in dictionaries, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested data in containers of its own, every tensor replaced by change(tensor)."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(entry, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(entry, change) for entry in value)
    return value
