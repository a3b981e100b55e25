"""Optimisers by the names that users know them by, each from the library that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from prodigyopt import Prodigy


@dataclass(frozen=True)
class Kind:
    """make takes parameters, learning rate and weight decay; copies is how many float32 numbers it
    keeps for each parameter."""

    make: Callable[[Sequence[torch.nn.Parameter], float, float], torch.optim.Optimizer]
    copies: int


def _adamw(parameters: Sequence[torch.nn.Parameter], rate: float, decay: float):
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)


def _adafactor(parameters: Sequence[torch.nn.Parameter], rate: float, decay: float):
    # Steps scaled by a parameter's own size would leave the half of an adapter that starts at 0
    # there; with this bound on the scale none is.
    return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay, eps=(None, 1.0))


def _prodigy(parameters: Sequence[torch.nn.Parameter], rate: float, decay: float):
    return Prodigy(
        parameters,
        lr=rate,
        weight_decay=decay,
        use_bias_correction=True,
        safeguard_warmup=True,
    )


OPTIMIZERS = {
    "AdamW": Kind(_adamw, copies=2),
    "Adafactor": Kind(_adafactor, copies=0),
    "Prodigy": Kind(_prodigy, copies=4),
}
