"""Debiased cosines between the mean gradients of arms, in one cell and over images.

A mean over D draws is the true mean gradient plus noise that is nearly orthogonal to it, so the
cosine of two such means reads low, and lower where the noise is larger. Products between different
draws carry no such bias. With S_a the sum of arm a's gradients over the draws and
P_ab = sum_d <g_a,d, g_b,d>,

    M_ab = (<S_a, S_b> - P_ab) / (D (D - 1))    one-set: all pairs of different draws
    M_ab = (<a, b'> + <a', b>) / 2              two-set: means of the even and of the odd draws

are both unbiased for the inner product of the true mean gradients, whatever arms share inside a
draw, and c_ab = M_ab / sqrt(M_aa M_bb) is the debiased cosine (arXiv 2608.04448, in its consistent
form). Two forms that are not consistent are kept to stand beside published numbers, for arms of
independent noise alone:

    published  cos(a + a', b + b') / sqrt(cos(a, a') cos(b, b'))
    stepped    the same with both self-cosines stepped up to the pooled draws, 2 r / (1 + r)

Over images five estimands ask different questions: see the functions that end in `_terms`,
`image_cosines` and `dataset_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arms import NULL
from .measure import Cell

CONSISTENT = ("one_set", "two_set")
PUBLISHED = ("published", "stepped")
ESTIMATORS = (*CONSISTENT, *PUBLISHED)
ESTIMANDS = ("ratio", "power_ratio", "per_image", "population", "dataset")
MIN_BLOCKS = 4


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
    """One-set M [..., A, A] from the Gram matrix of the sums, gram [..., A, A], and products
    [..., A, A].

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
        raise ValueError(f"estimator '{estimator}' has no inner products: "
                         f"use one of {', '.join(CONSISTENT)}")
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
    """The images' terms in an estimand's three sums; over images c = X / sqrt(S A).

    x, s, a  terms of <src, arm>, <src, src> and <arm, arm>: [N], one an image, or [N, N], one a
             pair of images (symmetric); 0 where an image lacks the arm
    present  [N] whether the image has the arm
    """

    x: np.ndarray
    s: np.ndarray
    a: np.ndarray
    present: np.ndarray

    @property
    def order(self) -> int:
        """Images in a term: 1 or 2. A sum of order 2 moves by twice an image's own terms."""
        return self.x.ndim

    def under(self, weights: np.ndarray) -> list[np.ndarray]:
        """x, s, a [R or 1, N] such that a sum over images under weights [R, N] is sum w x.

        A pair term is w_i w_j x_ij, so that an image's own term is (x w)_i.
        """
        if self.order == 1:
            return [values[None] for values in (self.x, self.s, self.a)]
        return [weights @ values for values in (self.x, self.s, self.a)]

    def where(self, mask: np.ndarray) -> Terms:
        """The same terms on fewer images [N]."""
        kept = mask if self.order == 1 else np.outer(mask, mask)
        return Terms(self.x * kept, self.s * kept, self.a * kept, self.present & mask)


def has_arm(cells: Sequence[Cell | None], arm: str) -> np.ndarray:
    """[N] whether each image has the arm; None stands for an image without the cell."""
    return np.array([cell is not None and arm in cell.arms for cell in cells], dtype=bool)


def ratio_terms(cells: Sequence[Cell | None], arm: str, estimator: str,
                part: int | None = None) -> Terms:
    """Terms [N] of the estimand "ratio" for one arm, from the N images' cells of one bin.

    x_i = M_sa / sqrt(q_s q_a), s_i = M_ss / q_s, a_i = M_aa / q_a, each image's gradients scaled by
    their mean squared draw norm q. So an image counts by its direction and its signal, not by its
    loss or its length.

    null is src once more, under noise of its own: the two have one length, and here one q, the mean
    of theirs. With a q each, c is off by cov(M_ss, q) / (2 M_ss q) - var(q) / (4 q^2), since a draw
    that adds to an arm's M adds to its q; arms of shared noise have that in x as in s and a.
    """
    return _image_terms(cells, arm, estimator, part, scaled=True)


def power_terms(cells: Sequence[Cell | None], arm: str, estimator: str) -> Terms:
    """Terms [N] of the estimand "power_ratio": as "ratio", with every gradient in its own length.

    Large gradients count more, and gains that differ between images read as distance.
    """
    return _image_terms(cells, arm, estimator, None, scaled=False)


def scale(matrix: np.ndarray, square: np.ndarray) -> np.ndarray:
    """M_ab / sqrt(q_a q_b) [..., A, A] of M [..., A, A] and q [..., A].

    A gradient of exactly 0 has no direction: its products are 0, not 0/0.
    """
    factor = np.sqrt(np.divide(1, square, out=np.zeros_like(square), where=square > 0))
    return matrix * factor[..., :, None] * factor[..., None, :]


def effective_images(terms: Terms) -> float:
    """(sum g^2)^2 / sum g^4 with g^2 = s: images that an estimand of order 1 really rests on."""
    squares = (terms.s ** 2).sum()
    return float(terms.s.sum() ** 2 / squares) if squares > 0 else 0.0


def _image_terms(cells: Sequence[Cell | None], arm: str, estimator: str, part: int | None,
                 scaled: bool) -> Terms:
    x, s, a = np.zeros((3, len(cells)))
    present = has_arm(cells, arm)
    for i in np.flatnonzero(present):
        index = cells[i].arms.index(arm)
        matrix = moments(cells[i], estimator, part)
        if scaled:
            square = mean_square(cells[i], part)
            if arm == str(NULL):
                square[[0, index]] = square[[0, index]].mean()
            matrix = scale(matrix, square)
        x[i], s[i], a[i] = matrix[0, index], matrix[0, 0], matrix[index, index]
    return Terms(x, s, a, present)


def population_terms(cells: Sequence[Cell | None], arm: str, fold: int = 1,
                     half: int | None = None) -> Terms:
    """Terms [N, N] of the estimand "population": the direction of the batch gradient, images taken
    as a sample.

    x_ij = <m_s,i, m_a,j>, symmetrised, for i != j and 0 on the diagonal, m = S / D from the cells'
    sketches. Images share no draw, so no bias is there to remove, and one draw an image is enough.
    fold divides the buckets; half takes the first (0) or the second (1) half of the blocks of draws
    alone. Raises ValueError for cells without sketches.
    """
    present = has_arm(cells, arm)
    means = None
    for i in np.flatnonzero(present):
        blocks, counts = _blocks(cells[i], arm, fold)
        if half is not None:
            middle = len(counts) // 2
            kept = slice(middle) if half == 0 else slice(middle, None)
            blocks, counts = blocks[kept], counts[kept]
        if means is None:
            means = np.zeros((2, len(cells), blocks.shape[-1]))
        means[:, i] = blocks.sum(axis=0) / counts.sum()
    if means is None:
        return Terms(*np.zeros((3, len(cells), len(cells))), present)
    src, other = means
    x, s, a = src @ other.T, src @ src.T, other @ other.T
    apart = 1 - np.eye(len(cells))
    return Terms((x + x.T) / 2 * apart, s * apart, a * apart, present)


@dataclass(frozen=True)
class DatasetSums:
    """The sums <src, arm>, <src, src>, <arm, arm> of the estimand "dataset".

    full      [3] over all images
    left_out  [N, K, 3] the same without block k of the draws of image i; `full` where it lacks the
              arm
    """

    full: np.ndarray
    left_out: np.ndarray


def dataset_sums(cells: Sequence[Cell | None], arm: str, present: np.ndarray,
                 fold: int = 1) -> DatasetSums:
    """Sums of the estimand "dataset": the full-batch gradient over exactly these images.

    Products between images come from the sketches as in "population"; an image's own product with
    itself is its one-set M. present [N] picks the images; fold divides the buckets. Raises
    ValueError for cells without sketches or with fewer than 4 blocks of draws.
    """
    chosen = np.flatnonzero(present)
    pairs = ((0, 1), (0, 0), (1, 1))
    sketched = [_blocks(cells[i], arm, fold) for i in chosen]
    short = [len(counts) for _, counts in sketched if len(counts) < MIN_BLOCKS]
    if short:
        raise ValueError(f"a cell has {short[0]} blocks of draws, and the interval of the estimand "
                         f"dataset needs {MIN_BLOCKS}: measure at least {MIN_BLOCKS} draws")
    means = [blocks.sum(axis=0) / counts.sum() for blocks, counts in sketched]
    total = sum(means)
    gram = total @ total.T
    change = []
    for i, mean, (blocks, counts) in zip(chosen, means, sketched, strict=True):
        index = [0, cells[i].arms.index(arm)]
        gram = gram - mean @ mean.T + moments(cells[i], "one_set")[np.ix_(index, index)]
        products = cells[i].block_products[:, index][:, :, index]
        sums, count = blocks.sum(axis=0), counts.sum()
        own = debias(sums @ sums.T, products.sum(axis=0), count)
        rest, left = sums - blocks, count - counts
        moved = rest / left[:, None, None] - mean
        cross = moved @ (total - mean).T
        change.append([cross[k] + cross[k].T - own
                       + debias(rest[k] @ rest[k].T, products.sum(axis=0) - products[k], left[k])
                       for k in range(len(counts))])
    full = np.array([gram[pair] for pair in pairs]) if len(chosen) else np.zeros(3)
    left_out = np.tile(full, (len(cells), MIN_BLOCKS, 1))
    for i, rows in zip(chosen, change, strict=True):
        left_out[i] += np.array([[row[pair] for pair in pairs] for row in rows])
    return DatasetSums(full, left_out)


def _blocks(cell: Cell, arm: str, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """Sketched gradient sums [K, 2, W / fold] of src and an arm per block of draws, and the blocks'
    draw counts [K].

    Buckets that lie W / fold apart are added: that is a count-sketch with fewer buckets.
    """
    if cell.sketches is None:
        raise ValueError("the measurement has no sketches, which products between images are made "
                         "of: measure with sketch buckets, or use the estimand ratio")
    both = cell.sketches[:, [0, cell.arms.index(arm)]].astype(np.float64)
    count, arms, buckets = both.shape
    return both.reshape(count, arms, fold, buckets // fold).sum(axis=2), np.array(cell.block_counts)


def image_cosines(cells: Sequence[Cell | None], arm: str, estimator: str) -> np.ndarray:
    """Each image's own cosine [N]; NaN where it lacks the arm or a factor is not positive."""
    if estimator in CONSISTENT:
        return per_image(ratio_terms(cells, arm, estimator))
    values = np.full(len(cells), np.nan)
    for i in np.flatnonzero(has_arm(cells, arm)):
        index = [0, cells[i].arms.index(arm)]
        gram = cells[i].gram.sum(axis=0)[:, index][:, :, :, index]
        pooled = cosine(gram.sum(axis=(0, 2)))[0, 1]
        own = [cosine(gram[:, k, :, k])[0, 1] for k in (0, 1)]
        values[i] = published_cosine(pooled, *own, stepped=estimator == "stepped")
    return values


def published_cosine(pooled: Any, src: Any, arm: Any, stepped: bool) -> np.ndarray:
    """cos(a + a', b + b') / sqrt(r_a r_b), from the pooled cosine and two sets' self-cosines r.

    Too large by 2 / sqrt((1 + r_a)(1 + r_b)), since the numerator pools twice the draws of a
    self-cosine; stepped takes 2 r / (1 + r), the self-cosine at the pooled draws, instead. NaN
    where a self-cosine is not positive.
    """
    src, arm = (np.where(np.asarray(r) > 0, r, np.nan) for r in (src, arm))
    if stepped:
        src, arm = (2 * r / (1 + r) for r in (src, arm))
    return pooled / np.sqrt(src * arm)


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
