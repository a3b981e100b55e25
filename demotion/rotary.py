"""Rotary alignment of a demoted grid: position frequencies that carry it onto its native grid.

A rotary table turns band k of a token at position p by p f_k. On a demoted grid the same picture
spans fewer positions. Aligned, band k turns by p f_k ((1 - g) s + g), where s is the native over
the demoted edge and g in [0, 1] the share that the band keeps of its own frequency:

pi          g = 0: positions are interpolated in all bands
yarn        g = 0 up to ALPHA turns over the demoted edge, 1 from BETA turns on, linear between:
            what turns often tells neighbours apart and keeps its frequency
gated_yarn  as yarn, with both thresholds times mu(sigma): the cleaner, the more bands keep theirs

The bands are those of YaRN (arXiv 2309.00071) without its attention temperature. The time axis is
untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import scipy.special
import torch

from .grid import Grid

MODES = ("pi", "yarn", "gated_yarn")
ALPHA, BETA = 1.0, 4.0
SIGMA_C, GAMMA = 0.35, 2.0


@dataclass(frozen=True)
class Alignment:
    """A mode, and the native grid (latent cells) that a forward is aligned to.

    Raises ValueError for a mode that does not exist.
    """

    mode: str
    native: Grid

    def __post_init__(self) -> None:
        check_mode(self.mode)


def check_mode(mode: str) -> None:
    """Raise ValueError unless a rotary alignment has this name."""
    if mode not in MODES:
        raise ValueError(f"rotary alignment '{mode}' is unknown: use {', '.join(MODES)} or none")


def mu(sigma: float) -> float:
    """Factor on the thresholds at a noise level: sigmoid(GAMMA (logit sigma - logit SIGMA_C))."""
    logit = scipy.special.logit
    return float(scipy.special.expit(GAMMA * (logit(sigma) - logit(SIGMA_C))))


def kept_share(frequencies: torch.Tensor, edge: float, mode: str, sigma: float) -> torch.Tensor:
    """Share g [bands] that each band keeps of its own frequency, float64 in [0, 1].

    frequencies  [bands] radians per position, above 0
    edge         the demoted edge in positions
    """
    if mode == "pi":
        return torch.zeros_like(frequencies, dtype=torch.float64)
    turns = frequencies.double() * edge / (2 * torch.pi)
    threshold = mu(sigma) if mode == "gated_yarn" else 1.0
    # At mu = 0 the quotient is infinite, and every band keeps its frequency.
    return ((turns / threshold - ALPHA) / (BETA - ALPHA)).clamp(0, 1)


def frequency_factors(kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Factor (1 - g) s + g [bands] on each band's frequency, from its share g; exactly 1 where g is
    1, and s where g is 0. scale is s, the native over the demoted edge."""
    return (1 - kept) * scale + kept
