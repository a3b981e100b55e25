"""A ten-line flow model and pictures for it, to run the loops without a host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Linear

from demotion import probe, train


class TinyFlow(torch.nn.Module):
    """Velocity of latents [B, 4, H, W] at their sigmas: two pointwise layers that see sigma."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Linear(5, 8)
        self.second = Linear(8, 4)

    def forward(
        self, z: torch.Tensor, sigmas: Sequence[float], contexts: Sequence[object] = ()
    ) -> torch.Tensor:
        rows = z.movedim(1, -1)
        level = torch.tensor(sigmas).view(-1, 1, 1, 1).expand_as(rows[..., :1])
        hidden = torch.tanh(self.first(torch.cat([rows, level], -1)))
        return self.second(hidden).movedim(-1, 1)

    def signature(self, context: object, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Samples of one shape share a forward."""
        return tuple(shape)


def latent(seed: int, grid: tuple[int, int]) -> torch.Tensor:
    return torch.randn(1, 4, *grid, generator=torch.Generator().manual_seed(seed))


def subject(seed: int) -> probe.Subject:
    """A picture with a null arm, a demoted arm and a repromoted arm that equals src."""
    native = latent(seed, (8, 8))
    latents = {
        "src": native,
        "null": native,
        "demote:6": latent(seed + 100, (6, 6)),
        "repromote:6": native.clone(),
    }
    return probe.Subject(f"image{seed}", latents, dict.fromkeys(latents))


def pupils(count: int = 3) -> list[train.Pupil]:
    return [
        train.Pupil(
            latent(n, (8, 8)),
            {192: latent(n + 50, (6, 6))},
            {None: None, 192: None},
            repeats=1 + n % 2,
        )
        for n in range(count)
    ]
