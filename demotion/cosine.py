"""Debiased cosines between the mean gradients of arms, in one cell and over images.

A mean over D draws is the true mean gradient plus noise that is nearly orthogonal to it, so the
cosine of two such means reads low, and lower where the noise is larger. Products between different
draws carry no such bias. With S_a the sum of arm a's gradients over the draws and
P_ab = sum_d <g_a,d, g_b,d>,

    M_ab = (<S_a, S_b> - P_ab) / (D (D - 1))    one-set: all pairs of different draws
    M_ab = (<a, b'> + <a', b>) / 2              two-set: means of the even and of the odd draws

are both unbiased for the inner product of the true mean gradients, whatever arms share inside a
draw, and c_ab = M_ab / sqrt(M_aa M_bb) is the debiased cosine (arXiv 2608.04448, in its consistent
form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .measure import Cell

ESTIMATORS = ("one_set", "two_set")


def one_set(sums: Any, products: Any, count: int) -> np.ndarray:
    """Debiased inner products of the arms' mean gradients from all pairs of different draws.

    sums      [A, P] gradient of each arm summed over the draws; torch tensor or numpy array
    products  [A, A] sum over the draws of <g_a,d, g_b,d>
    count     draws D

    Returns M [A, A] float64. Raises ValueError for fewer than 2 draws.
    """
    sums = _float64(sums)
    return debias(sums @ sums.T, _float64(products), count)


def two_set(first: Any, second: Any) -> np.ndarray:
    """Debiased cosines [A, A] float64 from the half-set mean gradients first, second [A, P].

    The numerator is (<a, b'> + <a', b>)/2, never a product inside a half, where arms share draws.
    NaN where a factor under the root is not positive.
    """
    cross = _float64(first) @ _float64(second).T
    return cosine((cross + cross.T) / 2)


def debias(gram: np.ndarray, products: np.ndarray, count: int) -> np.ndarray:
    """One-set M [A, A] from the Gram matrix of the sums, gram [A, A], and products [A, A].

    Raises ValueError for fewer than 2 draws.
    """
    if count < 2:
        raise ValueError(f"{count} draws have no pair of different draws to multiply: "
                         "measure at least 2 draws a cell")
    return (gram - products) / (count * (count - 1))


def moments(cell: Cell, estimator: str, part: int | None = None) -> np.ndarray:
    """M [A, A] of a cell: debiased inner products of the arms' mean gradients.

    estimator is "one_set", "two_set", or "raw" for the biased products of the plain means; part
    picks one part of the adapter. Raises ValueError for another estimator and for fewer than 2
    draws.
    """
    gram, products = cell.pooled(part)
    if estimator == "one_set":
        return debias(gram, products, cell.count)
    if estimator == "raw":
        return gram / cell.count ** 2
    if estimator != "two_set":
        raise ValueError(f"estimator '{estimator}' is unknown: use one of {', '.join(ESTIMATORS)}")
    if min(cell.counts) < 1:
        raise ValueError(f"{cell.count} draws do not fill two half-sets: "
                         "measure at least 2 draws a cell")
    blocks = cell.gram.sum(axis=0) if part is None else cell.gram[part]
    cross = blocks[0, :, 1] / (cell.counts[0] * cell.counts[1])
    return (cross + cross.T) / 2


def cosine(matrix: np.ndarray) -> np.ndarray:
    """c [A, A] = M_ab / sqrt(M_aa M_bb) of M [A, A].

    NaN ("no signal") where a factor under the root is not positive. Values above 1 are kept:
    they are what makes the estimate unbiased.
    """
    square = np.diag(matrix)
    length = np.sqrt(square, out=np.full(len(square), np.nan), where=square > 0)
    return matrix / np.outer(length, length)


def mean_square(cell: Cell, part: int | None = None) -> np.ndarray:
    """q [A] = P_aa / D: mean squared norm of one draw's gradient, per arm."""
    return np.diag(cell.pooled(part)[1]) / cell.count


def noise_trace(cell: Cell, part: int | None = None) -> np.ndarray:
    """trace(Sigma_a) [A] = (P_aa - |S_a|^2 / D) / (D - 1): noise of a draw's gradient, per arm."""
    gram, products = cell.pooled(part)
    return (np.diag(products) - np.diag(gram) / cell.count) / (cell.count - 1)


def half(cell: Cell, index: int) -> Cell:
    """The cell of the even (0) or the odd (1) draws alone."""
    return replace(cell, gram=cell.gram[:, index:index + 1, :, index:index + 1],
                   products=cell.products[:, index:index + 1], counts=(cell.counts[index],))


@dataclass(frozen=True)
class Terms:
    """Each image's terms in an estimand's three sums; over images c = X / sqrt(S A).

    x, s, a  [N] terms of <src, arm>, <src, src> and <arm, arm>; 0 where the image lacks the arm
    present  [N] whether the image has the arm
    """

    x: np.ndarray
    s: np.ndarray
    a: np.ndarray
    present: np.ndarray

    def where(self, mask: np.ndarray) -> Terms:
        """The same terms on fewer images [N]."""
        return Terms(self.x * mask, self.s * mask, self.a * mask, self.present & mask)


def ratio_terms(cells: Sequence[Cell], arm: str, estimator: str, part: int | None = None) -> Terms:
    """Terms of the estimand "ratio" for one arm, from the N images' cells of one bin.

    x_i = M_sa / sqrt(q_s q_a), s_i = M_ss / q_s, a_i = M_aa / q_a, each image's gradients scaled by
    their mean squared draw norm q. So an image counts by its direction and its signal, not by its
    loss or its length.
    """
    x, s, a = np.zeros((3, len(cells)))
    present = np.array([arm in cell.arms for cell in cells], dtype=bool)
    for i in np.flatnonzero(present):
        index = cells[i].arms.index(arm)
        square = mean_square(cells[i], part)
        # A gradient of exactly 0 has no direction: its terms are 0, not 0/0.
        scale = np.sqrt(np.divide(1, square, out=np.zeros_like(square), where=square > 0))
        scaled = moments(cells[i], estimator, part) * np.outer(scale, scale)
        x[i], s[i], a[i] = scaled[0, index], scaled[0, 0], scaled[index, index]
    return Terms(x, s, a, present)


def per_image(terms: Terms) -> np.ndarray:
    """Each image's own cosine [N]; NaN where it lacks the arm or either factor is not positive."""
    signal = terms.present & (terms.s > 0) & (terms.a > 0)
    root = np.sqrt(terms.s * terms.a, out=np.full(len(terms.x), np.nan), where=signal)
    return terms.x / root


def _float64(values: Any) -> np.ndarray:
    # A torch tensor may live on a device or have a type that numpy lacks (bf16).
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values, dtype=np.float64)
