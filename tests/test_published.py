"""Released rows: the published figures come out again, and the reader refuses what it cannot read.

The rows themselves are not part of the pack: DEMOTION_PUBLISHED_ROWS names their folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import synthetic

from demotion import cosine, published, verdict

# Mean excess over reenc per bin, as published / stepped.
TABLE = {
    ("896", False): (0.029, 0.158, 0.239, 0.282, 0.218, 0.291, 0.067, 0.029, 0.026, -0.027, -0.007,
                     -0.039, -0.008, 0.018, 0.034),
    ("768", False): (0.059, 0.219, 0.323, 0.366, 0.348, 0.378, 0.253, 0.078, 0.032, 0.034, 0.039,
                     0.019, 0.026, 0.034, 0.130),
    ("512", False): (0.154, 0.480, 0.575, 0.622, 0.640, 0.714, 0.504, 0.360, 0.242, 0.218, 0.205,
                     0.200, 0.120, 0.217, 0.406),
    ("896", True): (0.031, 0.139, 0.244, 0.259, 0.209, 0.202, 0.088, 0.059, 0.034, -0.002, 0.005,
                    -0.007, 0.005, 0.024, 0.073),
    ("768", True): (0.066, 0.213, 0.302, 0.343, 0.312, 0.322, 0.266, 0.131, 0.069, 0.043, 0.067,
                    0.038, 0.042, 0.057, 0.155),
    ("512", True): (0.159, 0.454, 0.566, 0.581, 0.568, 0.589, 0.507, 0.362, 0.304, 0.274, 0.252,
                    0.239, 0.170, 0.301, 0.416),
}
COUNTS = {
    ("896", False): (40, 40, 39, 40, 40, 39, 40, 40, 40, 40, 40, 40, 39, 40, 37),
    ("768", False): (40, 40, 40, 40, 40, 39, 39, 39, 40, 39, 40, 40, 39, 39, 36),
    ("512", False): (40, 40, 39, 39, 40, 40, 37, 38, 39, 40, 39, 39, 39, 36, 37),
    ("896", True): (40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 39, 40, 38),
    ("768", True): (40, 40, 40, 40, 40, 39, 39, 39, 40, 40, 40, 40, 39, 39, 37),
    ("512", True): (40, 40, 40, 39, 40, 40, 37, 39, 39, 40, 39, 39, 39, 38, 38),
}
BOUNDS = {("896", 0.5, 1.0): (0.087, 0.102), ("896", 0.65, 0.95): (0.061, 0.051),
          ("768", 0.65, 0.95): (0.084, 0.105)}
# Three decimals of a figure printed in three or four.
ROUNDED = 0.00055


@pytest.fixture(scope="module")
def released() -> Path:
    folder = os.environ.get("DEMOTION_PUBLISHED_ROWS")
    if not folder:
        pytest.skip("the check against the published rows was not run: "
                    "set DEMOTION_PUBLISHED_ROWS to the folder of published_rows.jsonl")
    return Path(folder) / "published_rows.jsonl"


@pytest.mark.parametrize("arm, stepped", list(TABLE))
def test_the_published_and_the_stepped_table_come_out_of_the_rows(released: Path, arm: str,
                                                                  stepped: bool) -> None:
    column = published.excess(published.read(released), arm, stepped)
    np.testing.assert_allclose(column.mean, TABLE[arm, stepped], rtol=0, atol=ROUNDED)
    assert column.count.tolist() == list(COUNTS[arm, stepped])


@pytest.mark.parametrize("window", list(BOUNDS))
def test_the_bounds_of_the_published_windows_come_out_of_the_rows(released: Path,
                                                                  window: tuple) -> None:
    rows = published.read(released)
    for stepped, bound in zip((False, True), BOUNDS[window], strict=True):
        found = published.window_bound(rows, *window, stepped=stepped)
        assert found == pytest.approx(bound, abs=ROUNDED)


def test_a_consistent_estimate_does_not_certify_the_768_window(released: Path) -> None:
    rows = published.read(released)
    family = [verdict.contrast(terms) for terms in published.ratio_terms(rows, "768")]
    band = verdict.simultaneous(family, "rows")
    bounds = [d + band.q_safe * error for d, error in map(verdict.point, family)]
    inside = (rows.sigma > 0.65) & (rows.sigma < 0.95)
    assert max(np.array(bounds)[inside]) > 0.09


def test_resamples_of_the_rows_are_rarely_called_safe_or_unsafe(released: Path) -> None:
    rows = published.read(released)
    family = [verdict.contrast(terms) for arm in rows.routes
              for terms in published.ratio_terms(rows, arm)[-8:]]
    for images in (8, 12, 24, 40):
        found = synthetic.rates(synthetic.resampled_maps(family, images, 60, images), 300)
        assert max(found.safe, found.unsafe) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 60), images


NAMES = {"demote:192": "896", "reenc": "reenc"}


def rows_of(cells: list, path: Path) -> Path:
    """One cell of independent noise an image as released rows."""
    lines = [{"image": index, "sigma_centers": [0.5]} for index in range(len(cells))]
    for arm, name in NAMES.items():
        gaps = 1 - cosine.image_cosines(cells, arm, "published")
        for line, cell, gap in zip(lines, cells, gaps, strict=True):
            gram, index = cell.gram.sum(axis=0), cell.arms.index(arm)
            own = [float(cosine.cosine(gram[:, k, :, k])[0, 1]) for k in (0, index)]
            line |= {"cos_floor": own[:1], f"cos_self_{name}": own[1:],
                     f"debiased_gap_{name}": [None if np.isnan(gap) else float(gap)]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def made(tmp_path: Path) -> tuple[list, Path]:
    cloud = synthetic.Cloud(0.9, 300, shared=0.0, along=0.0, slope=0.0)
    cells = synthetic.cells_of(cloud, np.tile([0.1, 0.0], (30, 1)), np.random.default_rng(0),
                               ("src", *NAMES))
    # An image without signal: its arm's halves are opposed.
    cells[3].gram[:, 0, 1, 1, 1] *= -1
    cells[3].gram[:, 1, 1, 0, 1] *= -1
    return cells, rows_of(cells, tmp_path / "rows.jsonl")


def test_rows_give_the_same_image_cosines_as_the_cells_they_were_made_of(made: tuple) -> None:
    cells, path = made
    rows = published.read(path)
    for form in ("published", "stepped"):
        found = published.distances(rows, "896", form == "stepped")[:, 0]
        own = 1 - cosine.image_cosines(cells, "demote:192", form)
        assert np.isnan(found[3]) and np.isnan(own[3])
        np.testing.assert_allclose(np.delete(found, 3), np.delete(own, 3), atol=1e-9)
    terms = published.ratio_terms(rows, "896")[0]
    np.testing.assert_allclose(cosine.per_image(terms), 1 - published.distances(
        rows, "896", stepped=True)[:, 0], atol=1e-9)
    assert terms.present.sum() == 29


def test_an_excess_beyond_the_published_limit_is_left_out(made: tuple) -> None:
    _, path = made
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before = published.excess(published.read(path), "896")
    lines[7]["debiased_gap_896"] = [2.5]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = published.excess(published.read(path), "896")
    assert (before.count[0], after.count[0]) == (29, 28)
    assert after.mean[0] == pytest.approx(before.mean[0], abs=0.1)


def test_the_report_names_its_forms_and_is_plain_text(made: tuple) -> None:
    text = published.report(made[1])
    for part in ("30 images, 1 bins", "published form / stepped form", "estimand ratio", "0.5000"):
        assert part in text
    assert text.isascii() and "nan" not in text


@pytest.mark.parametrize("text, sentence", [
    ("not json", "is not JSON lines"),
    ("", "has no rows"),
    ('{"image": 0}\n', "has no rows"),
    ('{"cos_floor": [0.9], "debiased_gap_896": [0.1]}\n', "rows.jsonl is damaged"),
])
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        published.report(path)


def test_a_window_without_bins_and_rows_without_the_control_are_refused(made: tuple) -> None:
    path = made[1]
    with pytest.raises(ValueError, match="no bin has its centre inside"):
        published.window_bound(published.read(path), "896", 0.6, 0.7)
    path.write_text(path.read_text().replace("_reenc", "_other"))
    with pytest.raises(ValueError, match="has no arm reenc"):
        published.report(path)
