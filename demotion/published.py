"""Re-analysis of released per-image cosines, one JSON object a line and an image, as published with
arXiv 2608.04448.

A row holds cosines only: `sigma_centers` [B], the self-cosine `cos_floor` of src and `cos_self_ARM`
of an arm over two sets of draws, and `debiased_gap_ARM`, the distance in the published form. The
pooled cosine cos(a + a', b + b') follows from these, and so do the published and the stepped tables
and, on unit set norms, the consistent "ratio" with its band. The one-set form cannot be had from
cosines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from . import cosine, verdict
from .measure import reading

CONTROL = "reenc"
# The published table leaves out images beyond this excess.
TRIM = 1.5
WINDOWS = (("896", 0.5, 1.0), ("896", 0.65, 0.95), ("768", 0.65, 0.95))
LEVEL = 0.95


@dataclass(frozen=True)
class Rows:
    """Cosines of N images in B bins.

    sigma     [B] centre of each bin
    src       [N, B] self-cosine of src
    own       arm -> [N, B] self-cosine of the arm
    pooled    arm -> [N, B] cosine of both sets' sums to those of src; NaN where it cannot be known
    """

    sigma: np.ndarray
    src: np.ndarray
    own: dict[str, np.ndarray]
    pooled: dict[str, np.ndarray]

    @property
    def arms(self) -> list[str]:
        return list(self.own)

    @property
    def routes(self) -> list[str]:
        """Arms named by a tier alone."""
        return [arm for arm in self.arms if arm.isdigit()]


@dataclass(frozen=True)
class Column:
    """One arm's excess over the control per bin [B]: mean, standard error, images counted."""

    mean: np.ndarray
    se: np.ndarray
    count: np.ndarray


def read(path: str | Path) -> Rows:
    """Read released rows. Raises ValueError for a file that holds none or is damaged."""
    with reading(path) as file:
        try:
            rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
        except ValueError:
            raise ValueError(f"{file.name} is not JSON lines: give a file of released rows, one "
                             "JSON object an image") from None
        if not rows or not isinstance(rows[0], dict) or "cos_floor" not in rows[0]:
            raise ValueError(f"{file.name} has no rows of released cosines: its lines need "
                             "cos_floor, cos_self_ARM and debiased_gap_ARM")
        arms = [name.removeprefix("debiased_gap_") for name in rows[0]
                if name.startswith("debiased_gap_")]
        src = _table(rows, "cos_floor")
        own = {arm: _table(rows, f"cos_self_{arm}") for arm in arms}
        gaps = {arm: _table(rows, f"debiased_gap_{arm}") for arm in arms}
        sigma = np.array(rows[0]["sigma_centers"], dtype=float)
    pooled = {arm: (1 - gaps[arm]) * _root(src, own[arm]) for arm in arms}
    return Rows(sigma, src, own, pooled)


def distances(rows: Rows, arm: str, stepped: bool = False) -> np.ndarray:
    """[N, B] each image's distance, published or stepped; NaN without signal."""
    return 1 - cosine.published_cosine(rows.pooled[arm], rows.src, rows.own[arm], stepped)


def excess(rows: Rows, arm: str, stepped: bool = False) -> Column:
    """The published map's column of an arm: mean over images of the excess over reenc.

    Images without signal and those of an excess beyond 1.5 are left out, as in the published table;
    that trims on the outcome, which this pack's own estimates never do.
    """
    values = distances(rows, arm, stepped) - distances(rows, CONTROL, stepped)
    kept = [column[np.abs(column) <= TRIM] for column in values.T]
    mean, se, _ = zip(*map(verdict.mean_interval, kept), strict=True)
    return Column(np.array(mean), np.array(se), np.array([len(column) for column in kept]))


def window_bound(rows: Rows, arm: str, low: float, high: float, stepped: bool = False) -> float:
    """Upper 95 % bound of an arm's excess over the bins with their centre inside (low, high).

    Bonferroni over the chosen bins, normal quantile; the largest of the bins' bounds. Raises
    ValueError when no bin lies inside.
    """
    inside = _inside(rows, low, high)
    if not inside.any():
        raise ValueError(f"no bin has its centre inside sigma {low:g} to {high:g}: "
                         "widen the window")
    column = excess(rows, arm, stepped)
    reach = stats.norm.ppf(1 - (1 - LEVEL) / inside.sum())
    return float((column.mean + reach * column.se)[inside].max())


def _inside(rows: Rows, low: float, high: float) -> np.ndarray:
    return (rows.sigma > low) & (rows.sigma < high)


def ratio_terms(rows: Rows, arm: str) -> list[cosine.Terms]:
    """Terms of the estimand "ratio" per bin [B], consistent, with every set's mean gradient at unit
    length: s and a are the self-cosines, x the mean product between the sets of src and the arm.

    An image whose pooled cosine cannot be known lacks the cell.
    """
    length = _root((1 + rows.src) / 2, (1 + rows.own[arm]) / 2)
    made = []
    for index in range(len(rows.sigma)):
        present = np.isfinite(rows.pooled[arm][:, index])
        x = np.where(present, rows.pooled[arm][:, index] * length[:, index], 0)
        s, a = (np.where(present, r[:, index], 0) for r in (rows.src, rows.own[arm]))
        made.append(cosine.Terms(x, s, a, present))
    return made


def report(path: str | Path) -> str:
    """What released rows say, as text: the published and the stepped table, the bounds of the
    published windows in both, and the consistent distance with its simultaneous band.

    Raises ValueError as `read` does, and when the rows lack the control.
    """
    rows = read(path)
    if CONTROL not in rows.arms:
        raise ValueError(f"{Path(path).name} has no arm {CONTROL}, over which the published excess "
                         "is taken: give rows that have it")
    images = len(rows.src)
    forms = {"published": False, "stepped": True}
    columns = {(arm, form): excess(rows, arm, stepped)
               for arm in rows.routes for form, stepped in forms.items()}
    lines = [f"{Path(path).name}: {images} images, {len(rows.sigma)} bins, routes to "
             f"{', '.join(rows.routes)}", "",
             f"Mean excess over {CONTROL} (published form / stepped form):",
             "  sigma   " + "".join(f"{arm:>16}" for arm in rows.routes)]
    for index, sigma in enumerate(rows.sigma):
        cells = (f"{columns[arm, 'published'].mean[index]:.3f} / "
                 f"{columns[arm, 'stepped'].mean[index]:.3f}" for arm in rows.routes)
        lines.append(f"  {sigma:<8.4f}" + "".join(f"{cell:>16}" for cell in cells))
    lines += ["", "Upper 95 % bound over a window (Bonferroni over its bins):"]
    lines += [f"  {arm} over {low:g} to {high:g}: published "
              f"{window_bound(rows, arm, low, high):.3f}, stepped "
              f"{window_bound(rows, arm, low, high, stepped=True):.3f}"
              for arm, low, high in WINDOWS
              if arm in rows.routes and _inside(rows, low, high).any()]
    lines += ["", "Consistent distance, estimand ratio, simultaneous 95 % band over all of it:",
              "  sigma   " + "".join(f"{arm:>26}" for arm in rows.routes)]
    family = [verdict.contrast(terms) for arm in rows.routes for terms in ratio_terms(rows, arm)]
    band = verdict.simultaneous(family, "published rows")
    cells = [_with_band(cell, band, signal)
             for cell, signal in zip(family, band.signal, strict=True)]
    bins = len(rows.sigma)
    lines += [f"  {sigma:<8.4f}" + "".join(f"{cell:>26}" for cell in cells[index::bins])
              for index, sigma in enumerate(rows.sigma)]
    return "\n".join(lines)


def _with_band(cell: verdict.Contrast, band: verdict.Band, signal: bool) -> str:
    if not signal or cell.images < verdict.MIN_IMAGES:
        return verdict.NO_SIGNAL if not signal else verdict.NO_VERDICT
    d, error = verdict.point(cell)
    return f"{d:.3f} ({d - band.q_unsafe * error:.3f} to {d + band.q_safe * error:.3f})"


def _table(rows: Sequence[dict], name: str) -> np.ndarray:
    return np.array([[math.nan if value is None else value for value in row[name]]
                     for row in rows], dtype=float)


def _root(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Geometric mean of two arrays; NaN where a factor is not positive."""
    return np.sqrt(np.where((first > 0) & (second > 0), first * second, np.nan))
