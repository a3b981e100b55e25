"""Captions to ComfyUI's conditioning, and conditioning fit for a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import comfy.model_base
import torch

from . import families, nested

REFUSED = (
    "area",
    "mask",
    "hooks",
    "control",
    "gligen",
    "start_percent",
    "end_percent",
    "timestep_start",
    "timestep_end",
)


def encode_captions(clip, captions: Sequence[str]) -> list[list]:
    """One CONDITIONING per caption, encoded as ComfyUI's own text nodes do."""
    return [clip.encode_from_tokens_scheduled(clip.tokenize(caption)) for caption in captions]


def zero_conditioning(model: comfy.model_base.BaseModel) -> list:
    """Conditioning for a run without a text encoder: one zero token, and zeros for what the family
    takes beside it.

    Raises ValueError when the family's text width is not known.
    """
    family = families.family_of(model)
    if family.text is None:
        raise ValueError(
            f"no empty text is known for a {family.name}: connect CLIP or CONDITIONING"
        )
    token, beside = family.text(model.diffusion_model)
    # A mask counts the tokens, and counts are whole.
    made = {
        name: torch.ones(shape, dtype=int) if name == "attention_mask" else torch.zeros(shape)
        for name, shape in beside.items()
    }
    return [[torch.zeros(token), made]]


def check_plain(conditioning: list, name: str) -> None:
    """Raise ValueError for conditioning whose effect is not the same at every sigma and place."""
    if len(conditioning) != 1:
        raise ValueError(
            f"CONDITIONING of {name} has {len(conditioning)} entries: a gradient needs exactly "
            "one; remove the nodes that combine conditioning"
        )
    refused = [key for key in REFUSED if conditioning[0][1].get(key) is not None]
    if refused:
        raise ValueError(
            f"CONDITIONING of {name} carries {', '.join(refused)}: remove the nodes that set "
            "areas, masks, hooks, controls or schedules"
        )


def guidance(conditioning: list) -> float | None:
    """Guidance that a conditioning carries; None leaves it to the model."""
    value = conditioning[0][1].get("guidance")
    return None if value is None else float(value)


def own_copy(value: Any) -> Any:
    """The same nested data with its tensors cloned: what other nodes hand over cannot be saved for
    backward."""
    return nested.mapped(value, torch.clone)


def conditioning_hash(value: Any) -> str:
    """16 hex digits of nested conditioning data."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(str(tuple(value.shape)).encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _feed(digest, entry)
    else:
        digest.update(repr(value).encode())
