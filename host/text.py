"""Captions to ComfyUI's conditioning, and conditioning fit for a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import comfy.model_base
import torch

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
    """Conditioning for a run without a text encoder: one zero token, and a zero pooled vector where
    one is used.

    Raises ValueError when the family's text width is not known.
    """
    network = model.diffusion_model
    pooled = {}
    if isinstance(model, comfy.model_base.Flux):
        width = network.txt_in.in_features
        if network.params.vec_in_dim:
            pooled = {"pooled_output": torch.zeros(1, network.params.vec_in_dim)}
    elif isinstance(model, comfy.model_base.WAN21):
        width = network.text_embedding[0].in_features
    elif isinstance(model, comfy.model_base.Anima):
        width = network.blocks[0].cross_attn.k_proj.in_features
    else:
        raise ValueError(
            f"no zero token is known for a {type(model).__name__}: connect CLIP or CONDITIONING"
        )
    return [[torch.zeros(1, 1, width), pooled]]


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


def own_copy(value: Any) -> Any:
    """The same nested data with its tensors cloned: what other nodes hand over cannot be saved for
    backward."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: own_copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(own_copy(entry) for entry in value)
    return value


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
