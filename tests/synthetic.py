"""Synthetic gradients whose true distances are known, reduced to a Measurement as the probe would.

Image i has a mean direction of unit length; its arms' means stand at chosen cosines to it. A draw
adds
    a slope that depends on where sigma falls in its bin (mean 0 over draws), shared by all arms,
    noise shared by all arms of the draw, and noise of each arm's own,
each inside the same few directions (the noise's effective rank). So the mean gradients are exactly
the means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from demotion import cosine, sketch, verdict
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
         parts: int = 1, buckets: int = 0, blocks: int | None = None) -> Cell:
    """The primitives of a cell from its gradients [draws, arms, size]; with buckets also sketches,
    of as many blocks of draws as the probe would make."""
    halves = gradients[0::2], gradients[1::2]
    pieces = [np.array_split(half, parts, axis=2) for half in halves]
    sums = [np.stack([half[part].sum(axis=0) for half in pieces]) for part in range(parts)]
    gram = [np.einsum("hap,kbp->hakb", both, both) for both in sums]
    products = [[np.einsum("dap,dbp->ab", half[part], half[part]) for half in pieces]
                for part in range(parts)]
    return Cell(image=image, bin=edges, arms=tuple(arms), gram=np.array(gram),
                products=np.array(products), counts=(len(halves[0]), len(halves[1])),
                losses=(1.0,) * len(arms), grids=tuple(grid_of(arm) for arm in arms),
                **(_sketches(gradients, buckets, blocks) if buckets else {}))


def _sketches(gradients: np.ndarray, buckets: int, blocks: int | None) -> dict[str, object]:
    count, arms, size = gradients.shape
    blocks = blocks or sketch.blocks_of(count)
    sketcher = sketch.CountSketch(0, size, buckets, torch.device("cpu"))
    total = sketcher.empty(blocks, arms)
    for draw, rows in enumerate(torch.from_numpy(gradients).float()):
        for place, vector in zip(total[draw % blocks], rows, strict=True):
            sketcher.add(place, vector)
    products = [np.einsum("dap,dbp->ab", gradients[k::blocks], gradients[k::blocks])
                for k in range(blocks)]
    return {"sketches": sketcher.fold(total), "block_products": np.array(products),
            "block_counts": tuple(len(gradients[k::blocks]) for k in range(blocks))}


def measure(world: World, seed: int = 0, parts: int = 2, buckets: int = 0) -> Measurement:
    """A measurement of the world; everything random follows from the seed."""
    rng = np.random.default_rng(seed)
    mean = means(world, rng)
    cells = [cell(f"{image:016x}", edges, world.arms, draws(world, mean[index, image], rng), parts,
                  buckets)
             for image in range(world.images) for index, edges in enumerate(world.bins)]
    settings = {"arms": world.arms, "bins": [list(edges) for edges in world.bins],
                "draws": world.draws, "seed": seed, "native_tier": 256, "patch": 2,
                "parts": ["A", "B"][:parts], "noise": "shared",
                "model": {"fingerprint": "synthetic"}, "adapter": {"kind": "none"},
                "environment": {"dtype": "float64"}}
    return Measurement(settings, cells)


def grid_of(arm: str) -> tuple[int, int]:
    """Latent cells of an arm's square grid, tier 256 at a VAE factor of 8."""
    parsed = Arm.parse(arm)
    edge = parsed.tier // 8 if parsed.kind in ("demote", "shifted") else 32
    return edge, edge


@dataclass(frozen=True)
class Cloud:
    """Many cells at once, as inner products alone: what each gradient is made of, for any rank.

    self_cosine  of two means over `draws` draws; fixes the trace of a draw's noise
    rank         directions that the isotropic part of the noise lives in
    shared       fraction of the noise's variance that the arms of a draw share
    along        fraction of the trace along src's mean direction
    slope        fraction of the trace that is no noise but a mean that depends on sigma
    norms        standard deviation over images of the logarithm of a gradient's length
    gains        standard deviation over images of an arm's length relative to src's
    noisiness    standard deviation over images of the logarithm of the trace
    """

    self_cosine: float = 0.8
    rank: int = 1000
    draws: int = 8
    shared: float = 0.5
    along: float = 0.1
    slope: float = 0.2
    norms: float = 0.3
    gains: float = 0.0
    noisiness: float = 0.0


def products_of(cloud: Cloud, distances: np.ndarray, rng: np.random.Generator
                ) -> tuple[np.ndarray, np.ndarray]:
    """gram [..., H, A, H, A] and products [..., H, A, A] of cells, as in a Cell, from the true
    distances [..., A - 1] of the arms.

    The isotropic noise of all draws is an orthonormal frame times a triangular matrix (Bartlett),
    so its inner products are exact in as many coordinates as there are vectors.
    """
    shape, routes = distances.shape[:-1], distances.shape[-1]
    arms, draws = routes + 1, cloud.draws
    trace = draws * (1 / cloud.self_cosine - 1) * np.exp(
        cloud.noisiness * rng.standard_normal((*shape, 1, 1)) - cloud.noisiness ** 2 / 2)
    mixing = (np.sqrt(cloud.shared), np.sqrt(1 - cloud.shared))
    white = _white(rng, shape, (arms + 1) * draws, cloud.rank)
    white = white.reshape(*shape, draws, arms + 1, -1)
    share = (1 - cloud.along - cloud.slope) / cloud.rank
    noise = np.sqrt(share * trace)[..., None] * (
        mixing[0] * white[..., :1, :] + mixing[1] * white[..., 1:, :])
    # Coordinates: src's direction, one direction of its own for each arm, the slope's own, noise.
    cosines = 1 - distances
    mean = np.zeros((*shape, draws, arms, arms + 1))
    mean[..., 0, 0] = 1
    mean[..., 1:, 0] = cosines[..., None, :]
    for index in range(routes):
        mean[..., 1 + index, 1 + index] = np.sqrt(1 - cosines[..., index, None] ** 2)
    place = np.sqrt(3 * cloud.slope * trace) * rng.uniform(-1, 1, (*shape, draws, 1))
    mean[..., 0] += place * np.sqrt(0.5)
    mean[..., -1] += place * np.sqrt(0.5)
    mean[..., 0] += np.sqrt(cloud.along * trace) * (
        mixing[0] * rng.standard_normal((*shape, draws, 1))
        + mixing[1] * rng.standard_normal((*shape, draws, arms)))
    length = np.exp(cloud.norms * rng.standard_normal((*shape, 1, 1)))
    gain = 1 + cloud.gains * rng.standard_normal((*shape, 1, arms)) * (np.arange(arms) > 0)
    vectors = np.concatenate([mean, noise], axis=-1) * (length * gain)[..., None]
    halves = vectors[..., 0::2, :, :], vectors[..., 1::2, :, :]
    sums = np.stack([half.sum(axis=-3) for half in halves], axis=-3)
    flat = sums.reshape(*shape, 2 * arms, -1)
    gram = (flat @ flat.swapaxes(-1, -2)).reshape(*shape, 2, arms, 2, arms)
    products = np.stack([np.einsum("...dax,...dbx->...ab", half, half) for half in halves],
                        axis=-3)
    return gram, products


def cells_of(cloud: Cloud, distances: np.ndarray, rng: np.random.Generator,
             arms: Sequence[str] = ("src", "demote:192")) -> list[Cell]:
    """One cell for each of the N rows of true distances [N, A - 1]."""
    gram, products = products_of(cloud, distances, rng)
    counts = ((cloud.draws + 1) // 2, cloud.draws // 2)
    return [Cell(image=f"{index:016x}", bin=(0.0, 1.0), arms=tuple(arms), gram=gram[None, index],
                 products=products[None, index], counts=counts, losses=(1.0,) * len(arms),
                 grids=tuple(grid_of(arm) for arm in arms)) for index in range(len(distances))]


def terms_of(cloud: Cloud, distances: np.ndarray, rng: np.random.Generator,
             null: bool = False) -> np.ndarray:
    """[3, ..., A - 1] terms x, s, a of "ratio" (one-set) of cells with these true distances; null
    says that the one arm beside src is null, which has one q with it."""
    gram, products = products_of(cloud, distances, rng)
    products = products.sum(axis=-3)
    matrix = cosine.debias(gram.sum(axis=(-4, -2)), products, cloud.draws)
    square = np.diagonal(products, axis1=-2, axis2=-1) / cloud.draws
    if null:
        square = np.broadcast_to(square.mean(axis=-1, keepdims=True), square.shape)
    scaled = cosine.scale(matrix, square)
    own = np.diagonal(scaled, axis1=-2, axis2=-1)
    return np.stack([scaled[..., 0, 1:], np.broadcast_to(own[..., :1], own[..., 1:].shape),
                     own[..., 1:]])


def contrasts_of(terms: np.ndarray) -> list[verdict.Contrast]:
    """The family of a map from terms [3, N, bins, routes]."""
    flat = terms.reshape(3, terms.shape[1], -1)
    present = np.ones(terms.shape[1], dtype=bool)
    return [verdict.Contrast(cosine.Terms(*flat[:, :, index], present))
            for index in range(flat.shape[2])]


DISTANCES = {
    "all equal": lambda rng, shape, mean: np.full(shape, mean),
    "gamma(2)": lambda rng, shape, mean: np.minimum(rng.gamma(2, mean / 2, shape), 1.9),
    "exponential": lambda rng, shape, mean: np.minimum(rng.exponential(mean, shape), 1.9),
}
MAP = (8, 3)  # bins and routes: 24 cells


def maps_at_margin(cloud: Cloud, kind: str, images: int, count: int, seed: int,
                   margin: float = 0.05) -> Iterator[tuple[list[verdict.Contrast], np.ndarray]]:
    """Maps whose cells all have their true distance exactly at the margin: families and truths."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        own = DISTANCES[kind](rng, (images, *MAP), margin)
        yield contrasts_of(terms_of(cloud, own, rng)), np.full(MAP[0] * MAP[1], margin)


def population_maps(images: int, count: int, seed: int, margin: float = 0.05, size: int = 400,
                    buckets: int = 1 << 12
                    ) -> Iterator[tuple[list[verdict.Contrast], np.ndarray]]:
    """Maps of the estimand "population" whose cells all have their true distance at the margin:
    families, from the sketches of one draw an image, and truths.

    The expected gradient has length 1; an image's own is sqrt 3 away from it and its noise sqrt 3
    from that. Arms share nine tenths of either variance, and lengths have a log-sd of .3.
    """
    rng = np.random.default_rng(seed)
    arms = ["src", *(f"demote:{tier}" for tier in (224, 192, 128)[:MAP[1]])]
    mean = np.zeros((len(arms), size))
    mean[:, 0] = 1
    mean[1:, 0] = 1 - margin
    mean[np.arange(1, len(arms)), np.arange(1, len(arms))] = np.sqrt(1 - (1 - margin) ** 2)
    for number in range(count):
        sketcher = sketch.CountSketch(number, size, buckets, torch.device("cpu"))
        family = []
        for _ in range(MAP[0]):
            common = rng.standard_normal((images, 1, size)) * np.sqrt(0.9 * 6 / size)
            own = rng.standard_normal((images, len(arms), size)) * np.sqrt(0.1 * 6 / size)
            length = np.exp(0.3 * rng.standard_normal((images, 1, 1)))
            cells = _one_draw_cells(length * (mean + common + own), arms, sketcher)
            family += [verdict.contrast(cosine.population_terms(cells, arm)) for arm in arms[1:]]
        yield family, np.full(MAP[0] * MAP[1], margin)


def _one_draw_cells(gradients: np.ndarray, arms: Sequence[str], sketcher: sketch.CountSketch
                    ) -> list[Cell]:
    """Cells of one draw with sketches, from gradients [images, arms, size]."""
    flat = torch.from_numpy(gradients).float().flatten(0, 1)
    total = sketcher.empty(len(flat))
    # Coordinates first: all gradients at once.
    sketcher.add(total.T, flat.T)
    sketches = sketcher.fold(total).reshape(*gradients.shape[:2], -1)
    empty = np.zeros((1, 1, len(arms), 1, len(arms)))
    return [Cell(image=f"{index:016x}", bin=(0.0, 1.0), arms=tuple(arms), gram=empty,
                 products=empty[:, :, :, 0], counts=(1, 0), losses=(1.0,) * len(arms),
                 grids=tuple(map(grid_of, arms)), sketches=one[None],
                 block_products=empty[0, :, :, 0], block_counts=(1,))
            for index, one in enumerate(sketches)]


def dataset_intervals(images: int, draws: int, count: int, seed: int = 1
                      ) -> tuple[float, float, float]:
    """Of the same images measured again and again: fraction of the intervals of the estimand
    "dataset" that hold the true distance, mean error of the distance, and its Monte Carlo error."""
    rng, size, held, errors = np.random.default_rng(seed), 60, [], []
    mean = rng.standard_normal((images, 2, size)) + 2 * rng.standard_normal((2, size))
    total = mean.sum(axis=0)
    truth = 1 - total[0] @ total[1] / np.linalg.norm(total[0]) / np.linalg.norm(total[1])
    for _ in range(count):
        gradients = mean[:, None] + 4 * rng.standard_normal((images, draws, 2, size))
        cells = [cell(str(index), (0.0, 1.0), ("src", "b"), rows, buckets=4096)
                 for index, rows in enumerate(gradients)]
        sums = cosine.dataset_sums(cells, "b", np.ones(images, dtype=bool))
        d, _, (low, high) = verdict.block_interval(sums)
        held.append(low <= truth <= high)
        errors.append(d - truth)
    return float(np.mean(held)), float(np.mean(errors)), float(np.std(errors) / np.sqrt(count))


def resampled_maps(family: Sequence[verdict.Contrast], images: int, count: int, seed: int
                   ) -> Iterator[tuple[list[verdict.Contrast], np.ndarray]]:
    """Maps of images drawn, with replacement, from those of a family, whose own distances are then
    the truth."""
    rng = np.random.default_rng(seed)
    truth = np.array([verdict.point(cell)[0] for cell in family])
    for _ in range(count):
        index = rng.integers(len(family[0].present), size=images)
        yield images_of(family, index), truth


def images_of(family: Sequence[verdict.Contrast], index: np.ndarray | slice
              ) -> list[verdict.Contrast]:
    """The family of some of the images, of terms of order 1."""
    return [verdict.Contrast(cosine.Terms(*(values[index] for values in (
        cell.arm.x, cell.arm.s, cell.arm.a, cell.arm.present)))) for cell in family]


@dataclass(frozen=True)
class Rates:
    """Fractions of maps with a false safe, a false unsafe cell, and a band that holds every truth;
    fraction of cells without signal; fraction of pointwise intervals that hold the truth."""

    safe: float
    unsafe: float
    covered: float
    lost: float
    pointwise: float


def rates(maps: Iterable[tuple[list[verdict.Contrast], np.ndarray]], resamples: int) -> Rates:
    """How often the verdicts err when each cell's margin is its true distance."""
    rows = []
    for number, (family, truth) in enumerate(maps):
        band = verdict.simultaneous(family, str(number), resamples)
        signal = np.array(band.signal)
        points = np.array([verdict.point(cell) for cell in family])
        safe, unsafe = _errors(band, points, truth)
        above, below = np.array(band.alone).T * points[:, 1]
        reach = np.where(points[:, 0] < truth, above, below)
        held = (np.abs(points[:, 0] - truth) <= reach)[signal]
        rows.append((safe, unsafe, not (safe or unsafe), 1 - signal.mean(),
                     held.mean() if len(held) else np.nan))
    return Rates(*np.nanmean(np.array(rows, dtype=float), axis=0).tolist())


def look_rates(maps: Iterable[tuple[list[verdict.Contrast], np.ndarray]], looks: int,
               resamples: int) -> tuple[float, float]:
    """Fractions of maps that are falsely safe and falsely unsafe in some cell at some look, when
    each cell's margin is its true distance.

    The looks are those of the probe, but for bins in which all is decided, to which it takes no
    more images: here every one of these is an error that is counted already.
    """
    rows = []
    for number, (family, truth) in enumerate(maps):
        errors = []
        for size in verdict.look_sizes(len(family[0].present), looks):
            seen = images_of(family, slice(size))
            band = verdict.simultaneous(seen, str(number), resamples, looks)
            errors.append(_errors(band, np.array([verdict.point(cell) for cell in seen]), truth))
        rows.append(np.any(errors, axis=0))
    safe, unsafe = np.mean(rows, axis=0).tolist()
    return safe, unsafe


def _errors(band: verdict.Band, points: np.ndarray, truth: np.ndarray) -> tuple[bool, bool]:
    """Whether some cell is falsely safe, and falsely unsafe, from points [cells, 2] of d and SE."""
    d, error = points.T
    signal = np.array(band.signal)
    return (bool((signal & (d + band.q_safe * error < truth)).any()),
            bool((signal & (d - band.q_unsafe * error > truth)).any()))


def _white(rng: np.random.Generator, shape: tuple[int, ...], count: int, rank: int) -> np.ndarray:
    """Coordinates [*shape, count, min(count, rank)] of `count` vectors N(0, I) in `rank`
    dimensions, up to a rotation."""
    if rank <= count:
        return rng.standard_normal((*shape, count, rank))
    lower = np.tril(rng.standard_normal((*shape, count, count)), -1)
    place = np.arange(count)
    lower[..., place, place] = np.sqrt(rng.chisquare(rank - place, (*shape, count)))
    return lower


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
