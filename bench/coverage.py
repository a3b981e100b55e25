"""Bias, coverage and false verdicts of the estimators on gradients whose true distances are known.

    python bench/coverage.py [TABLE ...] [--maps 1000] [--resamples 400] [--rows FILE]

bias        of "ratio" by rank and self-cosine, and of null, which has noise of its own
published   the published form against its closed form
dataset     coverage of the interval over blocks of draws
looks       how often a map of 24 cells, all exactly at the margin, has a cell called safe or unsafe
            at any of its planned looks
margin      the same for one look at the end, by what the gradients are made of
population  the same for the estimand "population"
rows        the same for maps resampled from released rows of cosines (--rows, or the folder that
            DEMOTION_PUBLISHED_ROWS names)

All of them without a name.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
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
LOUD = synthetic.Cloud(0.8, 1000, shared=0.7, norms=1.0, gains=0.2, noisiness=0.5)
FAINT = synthetic.Cloud(0.5, 64, shared=0.7, norms=1.0, gains=0.2)
WORLDS = (
    ("self-cosine .8, rank 64, norms .3", synthetic.Cloud(0.8, 64, shared=0.7), "gamma(2)"),
    ("self-cosine .8, rank 1000, norms 1, gains .2, noisiness .5", LOUD, "exponential"),
    ("self-cosine .5, rank 64, norms 1, gains .2", FAINT, "gamma(2)"),
    ("self-cosine .5, rank 64, norms 1, gains .2", FAINT, "exponential"),
)
LOOKS = ((24, 2), (40, 4))  # images and looks
LOOK_RESAMPLES = 1000  # a quantile of a look lies further out
LAST_BINS = 8  # of the released rows: 24 cells as well


def bias(maps: int) -> None:
    for shared in (0.7, 0.0):
        for along in (0.01, 0.1):
            print(f"bias of ratio, 40 images, 8 draws, {'shared' if shared else 'independent'} "
                  f"noise, {along:.0%} of its trace along the mean (+- Monte Carlo error):")
            for rank in RANKS:
                print_bias(f"rank {rank}", [synthetic.Cloud(
                    own, rank, shared=shared, along=along, norms=1.0) for own in SELF_COSINES],
                    maps, 40)
    print("the same at self-cosine .2, rank 1000, shared noise, 1% along the mean, by images:")
    cloud = synthetic.Cloud(0.2, 1000, shared=0.7, along=0.01, norms=1.0)
    for images in (10, 40, 160):
        print_bias(f"{images} images", [cloud], maps * 40 // images, images)
    for along in (0.1, 1.0):
        print(f"null, 40 images, rank 1000, noise of its own, {along:.0%} along the mean:")
        for draws in (4, 8):
            print_bias(f"{draws} draws", [synthetic.Cloud(
                own, 1000, draws, shared=0.0, along=along, slope=0.0, norms=1.0)
                for own in (0.5, 0.8, 0.98)], maps, 40, null=True)


def print_bias(name: str, clouds: Sequence[synthetic.Cloud], maps: int, images: int,
               null: bool = False) -> None:
    """Print the mean error of the distance over maps of some images, its Monte Carlo error, and the
    fraction of maps without signal."""
    rng, found = np.random.default_rng(0), []
    truth = 0.0 if null else 0.05
    for cloud in clouds:
        own = synthetic.DISTANCES["gamma(2)"](rng, (maps, images, 1), truth)
        x, s, a = synthetic.terms_of(cloud, own, rng, null)[..., 0].sum(axis=-1)
        signal = (s > 0) & (a > 0)
        error = 1 - x[signal] / np.sqrt(s[signal] * a[signal]) - truth
        lost = f" ({1 - signal.mean():.1%} lost)" if not signal.all() else ""
        found.append(f"{cloud.self_cosine:g}: {error.mean():+.4f} +- "
                     f"{error.std() / np.sqrt(signal.sum()):.4f}{lost}")
    print(f"  {name:10} " + "  ".join(found), flush=True)


def published_form(cells: int) -> None:
    print("published form at a true distance of 0, independent noise, rank 10000: measured, closed")
    for own in (0.5, 0.8, 0.95):
        # The closed form's self-cosines are those of one set, half of these draws.
        whole = 2 * own / (1 + own)
        cloud = synthetic.Cloud(whole, 10000, draws=16, shared=0.0, along=0.0, slope=0.0)
        gram, _ = synthetic.products_of(cloud, np.zeros((cells, 1)), np.random.default_rng(0))
        total = gram.sum(axis=(-4, -2))
        pooled = total[:, 0, 1] / np.sqrt(total[:, 0, 0] * total[:, 1, 1])
        sets = [gram[:, 0, k, 1, k] / np.sqrt(gram[:, 0, k, 0, k] * gram[:, 1, k, 1, k])
                for k in (0, 1)]
        values = 1 - cosine.published_cosine(pooled, *sets, stepped=False)
        print(f"  self-cosine {own:g}: {np.nanmean(values):+.4f}  {1 - 2 / (1 + own):+.4f}")


def dataset(maps: int) -> None:
    print("dataset: intervals that hold the distance over these images; mean error")
    for images, draws in ((10, 4), (10, 8), (40, 8)):
        held, mean, error = synthetic.dataset_intervals(images, draws, maps)
        print(f"  {images} images, {draws} draws: {held:.3f}  {mean:+.4f} +- {error:.4f}",
              flush=True)


def looks(maps: int) -> None:
    name, cloud, kind = WORLDS[1]
    print(f"24 cells at the margin, planned looks, {name}, {kind}:")
    for images, count in LOOKS:
        made = synthetic.maps_at_margin(cloud, kind, images, maps, seed=images + count)
        safe, unsafe = synthetic.look_rates(made, count, LOOK_RESAMPLES)
        print(f"  {images} images, {count} looks  safe {safe:.3f}  unsafe {unsafe:.3f}", flush=True)


def print_rates(images: int, maps: Iterable, resamples: int) -> None:
    found = synthetic.rates(maps, resamples)
    print(f"  {images:<2} images  safe {found.safe:.3f}  unsafe {found.unsafe:.3f}  "
          f"band {found.covered:.3f}  pointwise {found.pointwise:.3f}  "
          f"no signal {found.lost:.3f}", flush=True)


def margin(maps: int, resamples: int) -> None:
    for name, cloud, kind in WORLDS:
        print(f"24 cells at the margin, {name}, {kind}:")
        for images in IMAGES:
            made = synthetic.maps_at_margin(cloud, kind, images, maps, seed=images)
            print_rates(images, made, resamples)


def population(maps: int, resamples: int) -> None:
    print("24 cells at the margin, population, one draw an image, 4,096 buckets:")
    for images in (12, 40):
        print_rates(images, synthetic.population_maps(images, maps, seed=images), resamples)


def rows(file: Path | None, maps: int, resamples: int) -> None:
    if file is None:
        print("resamples of released rows: not run, set DEMOTION_PUBLISHED_ROWS or give --rows")
        return
    read = published.read(file)
    family = [synthetic.verdict.contrast(terms) for arm in read.routes
              for terms in published.ratio_terms(read, arm)[-LAST_BINS:]]
    print(f"resamples of {file.name}, last {LAST_BINS} bins:")
    for images in IMAGES:
        print_rates(images, synthetic.resampled_maps(family, images, maps, seed=images), resamples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", metavar="TABLE", nargs="*", help="only these")
    parser.add_argument("--maps", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    folder = os.environ.get("DEMOTION_PUBLISHED_ROWS")
    file = options.rows or (Path(folder) / "published_rows.jsonl" if folder else None)
    maps, resamples = options.maps, options.resamples
    tables = {
        "bias": lambda: bias(maps),
        "published": lambda: published_form(4 * maps),
        "dataset": lambda: dataset(maps),
        "looks": lambda: looks(maps),
        "margin": lambda: margin(maps, resamples),
        "population": lambda: population(maps, resamples),
        "rows": lambda: rows(file, maps, resamples),
    }
    unknown = set(options.tables) - tables.keys()
    if unknown:
        parser.error(f"no table {', '.join(sorted(unknown))}: use {', '.join(tables)}")
    for name in options.tables or tables:
        tables[name]()


if __name__ == "__main__":
    main()
