"""Figures: their size, their words, nothing clipped, no global state."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import synthetic
from matplotlib.figure import Figure
from PIL import Image

from demotion import plots
from demotion.gap_map import GapMap, gap_map

BINS = tuple((index / 8, (index + 1) / 8) for index in range(8))
SHAPE = np.array([1.0, 0.8, 0.5, 0.2, 0.1, 0.05, 0.05, 0.1])
WORLD = synthetic.World({"null": 0.0, "reenc": 0.02, "demote:224": 0.3 * SHAPE,
                         "demote:192": 0.6 * SHAPE, "repromote:192": 0.2 * SHAPE}, bins=BINS)


@cache
def the_map(control: str | None = None, **changes) -> GapMap:
    return gap_map(synthetic.measure(replace(WORLD, **changes)), control=control)


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def assert_nothing_clipped(figure: Figure) -> None:
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, box


CASES = {"plain": {}, "relative": {"control": "reenc"}, "noise": {"noise": 60.0},
         "few images": {"images": 4}, "sixteen bins": {
             "bins": tuple((index / 16, (index + 1) / 16) for index in range(16)),
             "distances": {"demote:224": 0.1, "demote:192": 0.2, "demote:128": 0.4}},
         "no route": {"distances": {"null": 0.0}}}


@pytest.mark.parametrize("case", CASES)
def test_no_word_of_a_map_is_clipped(case: str) -> None:
    options = dict(CASES[case])
    control = options.pop("control", None)
    assert_nothing_clipped(plots.gap_map_figure(
        gap_map(synthetic.measure(replace(WORLD, **options)), control=control)))


def test_verdicts_are_written_out_and_fit_their_boxes() -> None:
    figure = plots.gap_map_figure(the_map())
    figure.draw_without_rendering()
    strip = figure.axes[1]
    expected = [gap.verdict for arm in ("demote:224", "demote:192") for gap in the_map().of(arm)]
    assert [text.get_text() for text in strip.texts] == expected
    for text, box in zip(strip.texts, strip.patches, strict=True):
        inner, outer = text.get_window_extent(), box.get_window_extent()
        assert outer.x0 <= inner.x0 and inner.x1 <= outer.x1


def test_the_figure_names_estimand_draws_images_margin_tokens_and_control() -> None:
    text = "\n".join(words(plots.gap_map_figure(the_map("reenc"))))
    for part in ("estimand ratio (one_set)", "8 draws", "12 images", "margin 0.05",
                 "relative to reenc", "256 -> 192 px, 144 of 256 tokens"):
        assert part in text


def test_a_map_is_drawn_the_same_from_its_file(tmp_path) -> None:
    the_map().save(tmp_path / "map.json")
    first, again = (plots.png(plots.gap_map_figure(item))
                    for item in (the_map(), GapMap.load(tmp_path / "map.json")))
    assert first == again
    assert Image.open(io.BytesIO(first)).size == (1200, 900)


def test_no_line_bridges_a_gap_between_bins() -> None:
    gaps = tuple(gap for gap in the_map().gaps if gap.bin != BINS[3])
    figure = plots.gap_map_figure(replace(the_map(), gaps=gaps))
    for line in figure.axes[0].lines:
        x = np.asarray(line.get_xdata(), dtype=float)
        if line.get_marker() == "o":
            assert x.max() < BINS[3][0] or x.min() > BINS[3][1]


def test_the_loss_figure_marks_every_demoted_step(tmp_path) -> None:
    losses, demoted = np.linspace(1, 0.5, 60), np.arange(60) % 3 == 0
    figure = plots.loss_figure(losses, demoted)
    assert_nothing_clipped(figure)
    assert "demoted: 20 of 60 steps" in words(figure)
    plots.save_png(figure, tmp_path / "loss.png")
    assert Image.open(tmp_path / "loss.png").size == (1200, 600)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_short_run_has_a_loss_figure(count: int) -> None:
    assert_nothing_clipped(plots.loss_figure([0.5] * count, [False] * count))


def test_the_running_mean_is_that_of_the_last_steps() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(plots._running_mean(values, 2), [1.0, 1.5, 2.5, 3.5])


def test_pyplot_is_never_loaded() -> None:
    assert "matplotlib.pyplot" not in sys.modules
