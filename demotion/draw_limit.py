"""Draw-limit checks: what estimates tend to as the number of draws grows.

Independent draws make the self-cosine of two means over D draws follow 1 / rho(D) = a + n / D with
a = 1, and a debiased distance follow y(D) = y_inf + c / D with c = 0. One run holds few draw
counts: single draws and half-sets for rho, half-sets and all draws for y. So the check is that of
exchangeable draws and a consistent estimator inside the run; to see the limit itself, measure again
with more draws and give both points to `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import cosine, verdict
from .measure import Cell


def fit(counts: Sequence[int], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Limit and slope [...] of values [..., K] = limit + slope / D at K draw counts D, by least
    squares.

    Raises ValueError for fewer than 2 different draw counts.
    """
    if len(set(counts)) < 2:
        raise ValueError(f"draw counts are {list(counts)}: a limit needs at least 2 different ones")
    design = np.stack([np.ones(len(counts)), 1 / np.array(counts, dtype=float)], axis=1)
    limit, slope = np.linalg.pinv(design) @ np.moveaxis(np.asarray(values), -1, 0).reshape(
        len(counts), -1)
    shape = np.shape(values)[:-1]
    return limit.reshape(shape), slope.reshape(shape)


def self_cosine(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """a and n of the native self-cosine over the N images of one bin, with a's standard error.

    Each image's gradients are scaled by their mean squared draw norm. The error is the
    delete-one-image jackknife's. None where images are fewer than 2, draws fewer than 4 or odd, or
    the half-sets' products not positive.
    """
    if len(cells) < 2 or not _halved(cells):
        return None
    half = cells[0].counts[0]
    # Of each image: one draw against itself, a half against itself, and a half against the other.
    rows = []
    for cell in cells:
        square, gram = cosine.mean_square(cell)[0], cell.gram.sum(axis=0)[:, 0, :, 0]
        if square > 0:
            rows.append(np.array([square, np.trace(gram) / (2 * half ** 2), gram[0, 1] / half ** 2])
                        / square)
    sums = _with_left_out(np.array(rows))
    if not (sums[:, 2] > 0).all():
        return None
    limit, slope = fit((1, half), sums[:, :2] / sums[:, 2:])
    return {"a": float(limit[0]), "se": _jackknife(limit[1:]), "n": float(slope[0]),
            "draws": [1, half]}


def distance(cells: Sequence[Cell], arm: str) -> dict[str, Any] | None:
    """y_inf and c of an arm's distance ("ratio", one-set) in one bin, with c's standard error.

    None as in `self_cosine`, and where a norm is not positive.
    """
    if len(cells) < 2 or not _halved(cells):
        return None
    half = cells[0].counts[0]
    weights = np.concatenate([np.ones((1, len(cells))), 1 - np.eye(len(cells))])
    whole, *halves = (
        verdict.distance(cosine.ratio_terms(row, arm, "one_set"), weights)[0]
        for row in (cells, *([cosine.half(cell, index) for cell in cells] for index in (0, 1))))
    limit, slope = fit((half, 2 * half), np.stack([sum(halves) / 2, whole], axis=-1))
    if not np.isfinite(slope).all():
        return None
    return {"y_inf": float(limit[0]), "c": float(slope[0]), "se": _jackknife(slope[1:]),
            "draws": [half, 2 * half]}


def _halved(cells: Sequence[Cell]) -> bool:
    counts = {cell.counts for cell in cells}
    return len(counts) == 1 and all(first == second >= 2 for first, second in counts)


def _with_left_out(rows: np.ndarray) -> np.ndarray:
    """Sums [1 + N, K] of rows [N, K]: all, and without each."""
    total = rows.sum(axis=0)
    return np.concatenate([total[None], total - rows])


def _jackknife(left_out: np.ndarray) -> float:
    count = len(left_out)
    return math.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
