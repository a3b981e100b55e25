"""Synthetic gradients whose true distances are known, reduced to a Measurement as the probe would.

Image i has a mean direction of unit length; its arms' means stand at chosen cosines to it. A draw
adds
    a slope that depends on where sigma falls in its bin (mean 0 over draws), shared by all arms,
    noise shared by all arms of the draw, and noise of each arm's own,
each inside the same few directions (the noise's effective rank). So the mean gradients are exactly
the means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from demotion.arms import Arm
from demotion.measure import Cell, Measurement

BINS = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))


@dataclass(frozen=True)
class World:
    """What the gradients are made of.

    distances  arm -> true distance from src, one number or one per bin; "src" is added in front
    spread     standard deviation over images of an arm's distance (its mean stays)
    noise      root of trace(Sigma) of a draw, where the mean gradient has length 1
    shared     fraction of that variance that the arms of a draw share
    rank       directions that the noise lives in
    slope      length of the sigma-dependent part at the edges of a bin
    gains      arm -> length of its mean gradient
    """

    distances: Mapping[str, float | Sequence[float]]
    bins: tuple[tuple[float, float], ...] = BINS
    images: int = 12
    draws: int = 8
    size: int = 96
    spread: float = 0.02
    noise: float = 1.0
    shared: float = 0.5
    rank: int = 64
    slope: float = 0.3
    gains: Mapping[str, float] | None = None

    @property
    def arms(self) -> list[str]:
        return ["src", *self.distances]


def means(world: World, rng: np.random.Generator) -> np.ndarray:
    """True mean gradients [bins, images, arms, size]."""
    shape = (len(world.bins), world.images)
    src = _unit(rng.standard_normal((*shape, world.size)))
    rows = [src]
    for arm, distance in world.distances.items():
        level = np.broadcast_to(np.asarray(distance, dtype=float), len(world.bins))[:, None]
        # Uniform and no wider than the level, so that no image's distance is negative.
        own = level + np.minimum(world.spread * np.sqrt(3), level) * rng.uniform(-1, 1, shape)
        cosine = (1 - own)[..., None]
        side = rng.standard_normal((*shape, world.size))
        side = _unit(side - (side * src).sum(-1, keepdims=True) * src)
        gain = (world.gains or {}).get(arm, 1.0)
        rows.append(gain * (cosine * src + np.sqrt(1 - cosine ** 2) * side))
    return np.stack(rows, axis=2)


def draws(world: World, mean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Gradients of all draws of one cell [draws, arms, size] around the means [arms, size]."""
    arms = len(mean)
    basis = _unit(rng.standard_normal((world.rank, world.size)))
    common = rng.standard_normal((world.draws, 1, world.rank)) * np.sqrt(world.shared)
    own = rng.standard_normal((world.draws, arms, world.rank)) * np.sqrt(1 - world.shared)
    place = rng.uniform(-1, 1, (world.draws, 1, 1))
    slope = world.slope * place * _unit(rng.standard_normal(world.size))
    return mean + slope + world.noise / np.sqrt(world.rank) * ((common + own) @ basis)


def cell(image: str, edges: tuple[float, float], arms: Sequence[str], gradients: np.ndarray,
         parts: int = 1) -> Cell:
    """The primitives of a cell from its gradients [draws, arms, size]."""
    halves = gradients[0::2], gradients[1::2]
    pieces = [np.array_split(half, parts, axis=2) for half in halves]
    sums = [np.stack([half[part].sum(axis=0) for half in pieces]) for part in range(parts)]
    gram = [np.einsum("hap,kbp->hakb", both, both) for both in sums]
    products = [[np.einsum("dap,dbp->ab", half[part], half[part]) for half in pieces]
                for part in range(parts)]
    return Cell(image=image, bin=edges, arms=tuple(arms), gram=np.array(gram),
                products=np.array(products), counts=(len(halves[0]), len(halves[1])),
                losses=(1.0,) * len(arms),
                grids=tuple(grid_of(arm) for arm in arms))


def measure(world: World, seed: int = 0, parts: int = 2) -> Measurement:
    """A measurement of the world; everything random follows from the seed."""
    rng = np.random.default_rng(seed)
    mean = means(world, rng)
    cells = [cell(f"{image:016x}", edges, world.arms, draws(world, mean[index, image], rng), parts)
             for image in range(world.images) for index, edges in enumerate(world.bins)]
    settings = {"arms": world.arms, "bins": [list(edges) for edges in world.bins],
                "draws": world.draws, "seed": seed, "native_tier": 256, "patch": 2,
                "parts": ["A", "B"][:parts], "model": {"fingerprint": "synthetic"},
                "adapter": {"kind": "none"}, "environment": {"dtype": "float64"}}
    return Measurement(settings, cells)


def grid_of(arm: str) -> tuple[int, int]:
    """Latent cells of an arm's square grid, tier 256 at a VAE factor of 8."""
    parsed = Arm.parse(arm)
    edge = parsed.tier // 8 if parsed.kind == "demote" else 32
    return edge, edge


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
