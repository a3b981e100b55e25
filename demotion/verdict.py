"""From per-image terms to a verdict: standard errors, the simultaneous band, and what would decide.

Images are the sample. A distance d = 1 - X / sqrt(S A), or a difference of two such distances, has
over images with weights w the linearised influence

    e_i = o (x_i / sqrt(S A) - c (s_i / 2S + a_i / 2A)),  o = images in a term (1, or 2 for pairs)
    SE^2 = n / (n - 1) sum_i w_i e_i^2,  n = sum_i w_i

with n over the images that have the arm. A studentised bootstrap over images gives each cell its
own interval, and a family of cells one band, since windows are chosen after looking at all of them.
On the side where the bootstrap's tail is short its quantile is that of too few images, so Student's
t of n - 1 degrees of freedom is the least. (Of 24 images whose distances are exponential either one
alone covers .91 to .93 where .95 is asked, the wider of the two on each side .94 to .95.) The
jackknife serves below 8 images, which are too few to resample. With planned looks at the data, each
look has its share of the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .cosine import DatasetSums, Terms
from .draws import stream

SAFE, UNSAFE, UNDECIDED, NO_SIGNAL = "safe", "unsafe", "undecided", "no signal"
# The estimand is one that no verdict may rest on.
NO_VERDICT = "no verdict"
MIN_IMAGES = 8
TOO_FEW = f"fewer than {MIN_IMAGES} images: no verdict"
RESAMPLES = 4000
LEVEL = 0.975
MAX_LOOKS = 4
MAX_LOST = 0.01
# An arm equal to src has d = 0 and SE = 0 up to rounding; so it has T = 0, not 0/0.
TINY = 1e-9


@dataclass(frozen=True)
class Contrast:
    """What a verdict is about: an arm's distance from src, or its excess over a control's."""

    arm: Terms
    control: Terms | None = None

    @property
    def present(self) -> np.ndarray:
        """[N] images that enter."""
        return self.arm.present

    @property
    def images(self) -> int:
        return int(self.present.sum())


def contrast(arm: Terms, control: Terms | None = None) -> Contrast:
    """Contrast of an arm; an excess is taken over the images that have both arms."""
    if control is None:
        return Contrast(arm)
    return Contrast(arm.where(control.present), control.where(arm.present))


def distance(terms: Terms, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d [R] = 1 - c, and influences on c, e [R, N], under image weights [R, N].

    NaN where S or A is not positive.
    """
    x, s, a = terms.under(weights)
    total_x, total_s, total_a = ((weights * values).sum(axis=1) if terms.order == 2
                                 else weights @ values[0] for values in (x, s, a))
    signal = (total_s > 0) & (total_a > 0)
    root = np.sqrt(total_s * total_a, out=np.full(len(weights), np.nan), where=signal)
    cosine = total_x / root
    with np.errstate(divide="ignore", invalid="ignore"):
        bracket = s * (0.5 / total_s)[:, None] + a * (0.5 / total_a)[:, None]
        return 1 - cosine, terms.order * (x / root[:, None] - cosine[:, None] * bracket)


def estimate(cell: Contrast, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d [R], its linearised standard error [R] and influences [R, N] under image weights [R, N]."""
    d, influence = distance(cell.arm, weights)
    if cell.control is not None:
        control_d, control_influence = distance(cell.control, weights)
        d, influence = d - control_d, influence - control_influence
    count = weights @ cell.present
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(count / (count - 1) * (weights * influence ** 2).sum(axis=1))
    return d, error, influence


def point(cell: Contrast) -> tuple[float, float]:
    """d and its linearised standard error over all images."""
    d, error, _ = estimate(cell, np.ones((1, len(cell.present))))
    return float(d[0]), float(error[0])


def jackknife(cell: Contrast) -> tuple[float, float]:
    """95 % interval of one cell, by itself, from as few as 2 images.

    Delete-one-image jackknife standard error, t of n - 1 degrees of freedom. NaN when an image
    less leaves no signal, and for fewer than 2 images.
    """
    count = cell.images
    if count < 2:
        return math.nan, math.nan
    left_out, _, _ = estimate(cell, (1 - np.eye(len(cell.present)))[cell.present])
    error = math.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
    reach = float(stats.t.ppf(LEVEL, count - 1)) * error
    d, _ = point(cell)
    return d - reach, d + reach


def mean_interval(values: np.ndarray) -> tuple[float, float, tuple[float, float]]:
    """Mean, standard error and 95 % t interval of one number an image [k]; NaN for fewer than 2."""
    count = len(values)
    if count < 2:
        return float(values.mean()) if count else math.nan, math.nan, (math.nan, math.nan)
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(count))
    reach = float(stats.t.ppf(LEVEL, count - 1)) * error
    return mean, error, (mean - reach, mean + reach)


def block_interval(arm: DatasetSums, control: DatasetSums | None = None
                   ) -> tuple[float, float, tuple[float, float]]:
    """Distance over exactly these images, its standard error over draws, and a 95 % interval.

    Delete-one-block jackknife inside each image; images draw independently, so their variances add:
    SE^2 = sum_i (K - 1) / K sum_k (d_ik - mean_k d_ik)^2, with t of N (K - 1) degrees of freedom.
    NaN where a norm is not positive.
    """
    d, left_out = _sum_distance(arm.full), _sum_distance(arm.left_out)
    if control is not None:
        d, left_out = d - _sum_distance(control.full), left_out - _sum_distance(control.left_out)
    images, blocks = left_out.shape
    spread = (left_out - left_out.mean(axis=1, keepdims=True)) ** 2
    error = math.sqrt((blocks - 1) / blocks * spread.sum())
    reach = float(stats.t.ppf(LEVEL, images * (blocks - 1))) * error
    return float(d), error, (float(d) - reach, float(d) + reach)


def _sum_distance(sums: np.ndarray) -> np.ndarray:
    """1 - X / sqrt(S A) of sums [..., 3]; NaN where S or A is not positive."""
    x, s, a = np.moveaxis(sums, -1, 0)
    return 1 - x / np.sqrt(np.where((s > 0) & (a > 0), s * a, np.nan))


@dataclass(frozen=True)
class Band:
    """Simultaneous 95 % band of a family: bounds d + q_safe SE and d - q_unsafe SE.

    signal  per cell, False where a norm is not clearly positive and the cell has left the family
    alone   per cell, (q_safe, q_unsafe) of its own 95 % interval; NaN where it takes no part
    """

    q_safe: float
    q_unsafe: float
    signal: tuple[bool, ...]
    alone: tuple[tuple[float, float], ...] = ()


def simultaneous(family: Sequence[Contrast], key: str, resamples: int = RESAMPLES,
                 looks: int = 1) -> Band:
    """Studentised bootstrap over images for all cells of a family at once.

    One multinomial weight vector a resample serves every cell, so their correlation is kept;
    T = (d - d*) / SE*. q_safe and q_unsafe are the 1 - .025 / looks quantiles of the largest T and
    the largest -T over the cells, so that the bands of all planned looks at the data hold together
    at 95 %, and at least that quantile of Student's t, of the cell of fewest images. key names the
    measurement and fixes the resamples. A cell whose S* or A* is not
    positive in more than 1 % of the resamples leaves the family; the few such resamples of a cell
    that stays count as its own most extreme ones, on both sides. Cells of fewer than 8 images get
    no verdict and take no part.
    """
    signal = [False] * len(family)
    alone = [(math.nan, math.nan)] * len(family)
    images = len(family[0].present)
    weights = stream("bootstrap", key).multinomial(images, np.full(images, 1 / images), resamples)
    highest = np.full(resamples, -np.inf)
    lowest = np.full(resamples, np.inf)
    fewest = images
    for index, cell in enumerate(family):
        center, _ = point(cell)
        d, error, _ = estimate(cell, weights)
        kept = np.isfinite(d) & np.isfinite(error)
        signal[index] = math.isfinite(center) and kept.mean() >= 1 - MAX_LOST
        if not signal[index] or cell.images < MIN_IMAGES:
            continue
        t = (center - d[kept]) / np.maximum(error[kept], TINY)
        above, below = np.full(resamples, t.max()), np.full(resamples, t.min())
        above[kept] = below[kept] = t
        alone[index] = _reach(above, below, LEVEL, cell.images)
        highest, lowest = np.maximum(highest, above), np.minimum(lowest, below)
        fewest = min(fewest, cell.images)
    if not np.isfinite(highest).all():
        return Band(math.nan, math.nan, tuple(signal), tuple(alone))
    reach = _reach(highest, lowest, 1 - (1 - LEVEL) / looks, fewest)
    return Band(*reach, tuple(signal), tuple(alone))


def _reach(highest: np.ndarray, lowest: np.ndarray, level: float, images: int
           ) -> tuple[float, float]:
    """(q_safe, q_unsafe) from the largest and the smallest T of each resample."""
    least = stats.t.ppf(level, images - 1)
    q_safe, q_unsafe = np.quantile([highest, -lowest], level, axis=1).clip(least).tolist()
    return q_safe, q_unsafe


def look_sizes(images: int, looks: int) -> list[int]:
    """How many images have been measured at each look: evenly spaced from the first, which is not
    planned before a verdict is possible, to all."""
    first = min(images, max(MIN_IMAGES, images // looks))
    steps = max(looks - 1, 1)
    return [images - round((images - first) * left / steps) for left in reversed(range(looks))]


def judge(images: int, signal: bool, low: float, high: float, margin: float) -> str:
    """Verdict of a cell from its simultaneous bounds, provided it has images and signal enough."""
    if images < MIN_IMAGES:
        return TOO_FEW
    if not signal:
        return NO_SIGNAL
    if high < margin:
        return SAFE
    if low > margin:
        return UNSAFE
    return UNDECIDED


def split_variance(cell: Contrast, even: Contrast, odd: Contrast) -> tuple[float, float]:
    """Within-image and between-image variance of d, as SE^2 = (within + between) / n.

    even and odd are the same contrast from the half-sets of draws, psi = n e an image's influence.
    within = mean (psi_even - psi_odd)^2 / 4 is an upper bound; between is the rest, at least 0.
    More draws shrink the first, only more images the second.
    """
    weights = np.ones((1, len(cell.present)))
    count = cell.images
    psi = [count * estimate(part, weights)[2][0][cell.present] for part in (even, odd)]
    within = float(((psi[0] - psi[1]) ** 2).mean() / 4)
    return within, max(count * point(cell)[1] ** 2 - within, 0.0)


def what_decides(judged: str, d: float, error: float, band: Band, margin: float, images: int,
                 draws: int, within: float, between: float) -> str:
    """One sentence with numbers on what would settle an open cell; empty for a settled one.

    Assumes that d stays where it is, that within-image variance falls as 1 / draws, and that the
    standard error falls as 1 / sqrt(images).
    """
    if judged == TOO_FEW:
        return f"measure at least {MIN_IMAGES} pictures on this route (now {images})"
    if judged == NO_SIGNAL:
        return (f"the gradient does not stand clear of its noise at {draws} draws of {images} "
                "images: measure more draws")
    if judged != UNDECIDED:
        return ""
    below = d < margin
    side = "upper bound below" if below else "lower bound above"
    if abs(d - margin) < error:
        return (f"{d:.3f} lies within one standard error ({error:.3f}) of the margin {margin:g}, "
                "so it may fall on either side: much more data would tell, and these data are "
                f"enough for a margin above {d + band.q_safe * error:.3f}")
    target = (abs(d - margin) / (band.q_safe if below else band.q_unsafe)) ** 2
    ways = [f"about {_rounded_up(images * error ** 2 / target)} images (now {images})"]
    room = images * target - between
    if room > 0:
        needed = draws * min(within, images * error ** 2) / room
        ways.insert(0, f"about {_rounded_up(needed)} draws (now {draws})")
    only = "; more draws alone would not" if room <= 0 else ""
    return f"if it stays at {d:.3f}, {' or '.join(ways)} would bring the {side} {margin:g}{only}"


def _rounded_up(count: float) -> int:
    """The next even number of two digits: more would pretend to a precision that is not there."""
    unit = max(2, 10 ** (math.ceil(math.log10(count)) - 2))
    return unit * math.ceil(count / unit)
