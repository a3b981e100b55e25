"""Bias, coverage and false verdicts of the estimators on gradients whose true distances are known.

    python bench/coverage.py [--maps 1000] [--resamples 1000] [--rows FILE]

Four tables: the bias of "ratio" by rank and self-cosine; the published form against its closed
form; how often a map of 24 cells, all exactly at the margin, has a cell called safe or unsafe; and
the same for maps resampled from released rows of cosines (--rows, or the folder that
DEMOTION_PUBLISHED_ROWS names).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import conftest  # noqa: E402, F401 - names the pack's rooms
import synthetic  # noqa: E402

from demotion import cosine, published  # noqa: E402

RANKS = (8, 64, 1000, 10000)
SELF_COSINES = (0.2, 0.5, 0.8, 0.98)
IMAGES = (8, 12, 24, 40)
WORLDS = {
    "self-cosine .8, rank 64, norms .3": synthetic.Cloud(0.8, 64, shared=0.7),
    "self-cosine .8, rank 1000, norms 1, gains .2, noisiness .5": synthetic.Cloud(
        0.8, 1000, shared=0.7, norms=1.0, gains=0.2, noisiness=0.5),
    "self-cosine .5, rank 64, norms 1, gains .2": synthetic.Cloud(
        0.5, 64, shared=0.7, norms=1.0, gains=0.2),
}
LAST_BINS = 8  # of the released rows: 24 cells as well


def bias(cloud: synthetic.Cloud, maps: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Mean error of the distance over maps of 40 images, its Monte Carlo error, and the fraction of
    maps without signal."""
    own = synthetic.DISTANCES["gamma(2)"](rng, (maps, 40, 1), 0.05)
    x, s, a = synthetic.terms_of(cloud, own, rng)[..., 0].sum(axis=-1)
    signal = (s > 0) & (a > 0)
    error = 1 - x[signal] / np.sqrt(s[signal] * a[signal]) - 0.05
    return error.mean(), error.std() / np.sqrt(signal.sum()), 1 - signal.mean()


def published_form(cloud: synthetic.Cloud, cells: int,
                   rng: np.random.Generator) -> tuple[float, float]:
    """Mean published distance of cells at a true distance of 0, and its closed form."""
    gram, _ = synthetic.products_of(cloud, np.zeros((cells, 1)), rng)
    whole = gram.sum(axis=(-4, -2))
    pooled = whole[:, 0, 1] / np.sqrt(whole[:, 0, 0] * whole[:, 1, 1])
    own = [gram[:, 0, k, 1, k] / np.sqrt(gram[:, 0, k, 0, k] * gram[:, 1, k, 1, k])
           for k in (0, 1)]
    values = 1 - cosine.published_cosine(pooled, *own, stepped=False)
    return np.nanmean(values), 1 - 2 / (1 + cloud.self_cosine)


def print_rates(name: str, found: synthetic.Rates) -> None:
    print(f"  {name:10} safe {found.safe:.3f}  unsafe {found.unsafe:.3f}  "
          f"band {found.covered:.3f}  pointwise {found.pointwise:.3f}  "
          f"no signal {found.lost:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--maps", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    folder = os.environ.get("DEMOTION_PUBLISHED_ROWS")
    rows = arguments.rows or (Path(folder) / "published_rows.jsonl" if folder else None)
    rng = np.random.default_rng(0)
    for shared in (0.7, 0.0):
        print(f"bias of ratio, 40 images, 8 draws, {'shared' if shared else 'independent'} noise "
              "(+- Monte Carlo error):")
        for rank in RANKS:
            found = [bias(synthetic.Cloud(value, rank, shared=shared, norms=1.0), arguments.maps,
                          rng) for value in SELF_COSINES]
            print(f"  rank {rank:<6}" + "  ".join(
                f"{value:g}: {mean:+.4f} +- {error:.4f}" + (f" ({lost:.1%} lost)" if lost else "")
                for value, (mean, error, lost) in zip(SELF_COSINES, found)), flush=True)
    print("published form at a true distance of 0, independent noise, rank 10000: measured, closed")
    for value in (0.5, 0.8, 0.95):
        # The closed form's self-cosines are those of one set, half of these draws.
        whole = 2 * value / (1 + value)
        cloud = synthetic.Cloud(whole, 10000, draws=16, shared=0.0, along=0.0, slope=0.0)
        measured, _ = published_form(cloud, 4000, rng)
        print(f"  self-cosine {value:g}: {measured:+.4f}  {1 - 2 / (1 + value):+.4f}")
    for name, cloud in WORLDS.items():
        for kind in ("gamma(2)", "exponential"):
            print(f"24 cells at the margin, {name}, distances {kind}:")
            for images in IMAGES:
                made = synthetic.maps_at_margin(cloud, kind, images, arguments.maps, seed=images)
                print_rates(f"{images} images", synthetic.rates(made, arguments.resamples))
    if rows is None:
        print("resamples of released rows: not run, set DEMOTION_PUBLISHED_ROWS or give --rows")
        return
    read = published.read(rows)
    family = [synthetic.verdict.contrast(terms) for arm in read.routes
              for terms in published.ratio_terms(read, arm)[-LAST_BINS:]]
    print(f"resamples of {rows.name}, last {LAST_BINS} bins:")
    for images in IMAGES:
        made = synthetic.resampled_maps(family, images, arguments.maps, seed=images)
        print_rates(f"{images} images", synthetic.rates(made, arguments.resamples))


if __name__ == "__main__":
    main()
