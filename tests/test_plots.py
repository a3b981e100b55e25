"""Figures: their size, their words, their signs, nothing clipped, the same bytes, no global
state."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import synthetic
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from demotion import adapter, compare, draws, plots, verdict
from demotion.gap_map import GapMap, gap_map
from demotion.gate import Course, Gate, Rule
from demotion.gate_cost import Picture, forecast

LOGIT_NORMAL = draws.SigmaDensity("logit_normal")
BINS = tuple((index / 8, (index + 1) / 8) for index in range(8))
END = (1.0, 1.0)
SHAPE = np.array([1.0, 0.8, 0.5, 0.2, 0.1, 0.05, 0.05, 0.1])
WORLD = synthetic.World(
    {
        "null": 0.0,
        "reenc": 0.02,
        "demote:224": 0.3 * SHAPE,
        "demote:192": 0.6 * SHAPE,
        "repromote:192": 0.2 * SHAPE,
    },
    bins=BINS,
)
TWENTY_FOUR = tuple((round(index / 24, 6), round((index + 1) / 24, 6)) for index in range(24))
ROUTES = ("demote:224", "demote:192", "demote:160", "demote:128", "demote:128+yarn")
CASES = {
    "plain": {},
    "relative": {"control": "reenc"},
    "no band": {"estimand": "per_image"},
    "noise": {"noise": 60.0},
    "wide": {"noise": 6.0, "images": 9},
    "few images": {"images": 4},
    "24 bins, 5 routes": {
        "bins": TWENTY_FOUR,
        "distances": {"null": 0.0, **{arm: 0.1 * row for row, arm in enumerate(ROUTES)}},
    },
    "gaps and endpoint": {
        "bins": ((0.1, 0.2), (0.5, 0.6), (0.6, 0.7), END),
        "distances": {
            "demote:224": 0.02,
            "demote:192+yarn": 0.2,
            "shifted:192": 0.1,
            "resample:192": 0.01,
        },
    },
    "endpoint alone": {"bins": (END,), "distances": {"null": 0.0, "demote:192": 0.1}},
    "no route": {"distances": {"null": 0.0}},
}


def make(control: str | None = None, estimand: str = "ratio", **changes) -> GapMap:
    measurement = synthetic.measure(replace(WORLD, **changes))
    measurement.checks["precision"] = {"dtype": "bfloat16", "cosines": [0.999, 0.998]}
    return gap_map(measurement, control=control, estimand=estimand)


the_map = cache(make)


@cache
def case(name: str) -> GapMap:
    return make(**CASES[name])


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def assert_nothing_clipped(figure: Figure) -> None:
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, box


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("figure", plots.FIGURES)
@pytest.mark.parametrize("name", CASES)
def test_no_word_of_a_figure_is_clipped(name: str, figure: str) -> None:
    assert_nothing_clipped(plots.draw(case(name), figure))


@pytest.mark.parametrize("name", CASES)
def test_verdicts_fit_their_boxes_and_ticks_do_not_touch(name: str) -> None:
    figure = plots.gap_map_figure(case(name))
    figure.draw_without_rendering()
    strip = figure.axes[1]
    for text, box in zip(strip.texts, strip.patches, strict=True):
        inner, outer = text.get_window_extent(), box.get_window_extent()
        assert outer.x0 <= inner.x0 and inner.x1 <= outer.x1
    ticks = [label.get_window_extent() for label in strip.get_xticklabels()]
    ticks.sort(key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in zip(ticks, ticks[1:]))


@pytest.mark.parametrize("name", ["plain", "wide", "24 bins, 5 routes", "gaps and endpoint"])
def test_the_strip_covers_every_bin_of_every_route_with_its_verdict(name: str) -> None:
    shown = case(name)
    strip = plots.gap_map_figure(shown).axes[1]
    found = set()
    for text, box in zip(strip.texts, strip.patches, strict=True):
        row = int(box.get_y())
        arm = [arm for arm in shown.arms if arm.startswith("demote")][row]
        for edges, (left, right) in plots._places(shown.bins).items():
            if box.get_x() <= left and right <= box.get_x() + box.get_width() + 1e-9:
                found.add((arm, edges, text.get_text()[0]))
    assert found == {
        (gap.arm, gap.bin, plots.SIGNS[gap.verdict])
        for gap in shown.gaps
        if gap.arm.startswith("demote")
    }


def test_a_verdict_that_stands_from_a_look_is_told_from_those_of_the_boxes() -> None:
    told = "a planned look decided"
    plain = plots.gap_map_figure(the_map())
    assert not any(told in word for word in words(plain))
    gaps = [replace(gap, look=gap.arm.startswith("demote")) for gap in the_map().gaps]
    figure = plots.gap_map_figure(replace(the_map(), gaps=tuple(gaps)))
    assert any(told in word for word in words(figure))
    assert_nothing_clipped(figure)


def test_safe_unsafe_undecided_and_no_signal_have_different_signs() -> None:
    decisions = (verdict.SAFE, verdict.UNSAFE, verdict.UNDECIDED, verdict.NO_SIGNAL)
    assert len({*plots.SIGNS.values(), plots.NO_VERDICT}) == 5 and set(plots.SIGNS) == set(
        decisions
    )


@pytest.mark.parametrize("theme", plots.THEMES)
def test_words_stand_out_from_what_is_behind_them(theme: str) -> None:
    look = plots.THEMES[theme]
    pairs = [(look.ink, look.paper), (look.faint, look.paper), *look.verdicts.values()]
    pairs += [(look.ink, look.cool), (look.ink, look.warm)]
    assert min(contrast(*pair) for pair in pairs) >= 4.5
    assert min(contrast(color, look.paper) for color in look.routes) >= 2.2


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2."""

    def luminance(color: str) -> float:
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in to_rgb(color)
        ]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("figure", plots.FIGURES)
def test_a_figure_names_estimand_draws_images_and_margin(figure: str) -> None:
    text = "\n".join(words(plots.draw(the_map("reenc"), figure)))
    for part in (
        "estimand ratio (one_set)",
        "8 draws",
        "12 images",
        "margin 0.05",
        "relative to reenc",
    ):
        assert part in text


def test_the_map_names_tokens_arms_and_the_density() -> None:
    text = words(plots.gap_map_figure(case("gaps and endpoint")))
    for part in (
        "256 -> 224: 196 of 256 tokens",
        "256 -> 192 yarn: 144 of 256 tokens",
        "shifted 192",
        "resample 192",
        "= 1",
        "sigma in training: logit-normal(0, 1)",
    ):
        assert part in text
    uniform = plots.gap_map_figure(the_map(), density=draws.SigmaDensity())
    assert "sigma in training: uniform" in words(uniform)
    assert not any(
        "training" in word for word in words(plots.gap_map_figure(the_map(), "light", None))
    )


def test_the_hill_is_as_high_as_the_density() -> None:
    """Heights at two noise levels are in the proportion of the density there."""
    density = draws.SigmaDensity("logit_normal", mean=1.0, std=0.7)
    figure = plots.gap_map_figure(the_map(), density=density)
    outline = figure.axes[0].collections[0].get_paths()[0].vertices

    def height(sigma: float) -> float:
        return outline[np.abs(outline[:, 0] - sigma) < 0.003][:, 1].max()

    def mass(sigma: float) -> float:
        return density.cdf(sigma + 1e-4) - density.cdf(sigma - 1e-4)

    assert height(0.5) / height(0.75) == pytest.approx(mass(0.5) / mass(0.75), rel=0.03)


def test_bars_and_boxes_are_the_intervals_and_bands_of_the_map() -> None:
    axes = plots.gap_map_figure(the_map()).axes[0]
    routes = [gap for gap in the_map().gaps if gap.arm.startswith("demote")]
    boxes = {
        (round(box.get_y(), 9), round(box.get_y() + box.get_height(), 9)) for box in axes.patches
    }
    assert boxes == {tuple(round(bound, 9) for bound in gap.band) for gap in routes}
    bars = {tuple(line.get_ydata()) for line in axes.lines if len(set(line.get_xdata())) == 1}
    assert {gap.pointwise for gap in routes} <= bars


def test_a_prediction_is_dashed_in_the_colour_of_its_arm() -> None:
    curve = [(0.1, 0.3), (0.5, 0.1), (0.9, 0.02)]
    lines = plots.gap_map_figure(the_map(), predicted={"demote:192": curve}).axes[0].lines
    drawn = {line.get_label(): line for line in lines}
    predicted = drawn["256 -> 192, predicted"]
    assert predicted.get_linestyle() == "--"
    assert predicted.get_color() == drawn["256 -> 192: 144 of 256 tokens"].get_color()
    assert list(zip(*predicted.get_data())) == curve


def test_the_endpoint_has_room_beyond_1_and_no_line_leads_to_it() -> None:
    shown = make(bins=(*BINS, END), distances={"demote:192": 0.1})
    left, right = plots._places(shown.bins)[END]
    assert 1 < left < right
    lines = [
        line.get_xdata()
        for line in plots.gap_map_figure(shown).axes[0].lines
        if line.get_marker() == "o"
    ]
    assert [len(x) for x in lines] == [8, 1] and left < lines[1][0] < right


def test_no_line_bridges_a_gap_between_bins() -> None:
    gaps = tuple(gap for gap in the_map().gaps if gap.bin != BINS[3])
    figure = plots.gap_map_figure(replace(the_map(), gaps=gaps))
    for line in figure.axes[0].lines:
        x = np.asarray(line.get_xdata(), dtype=float)
        if line.get_marker() == "o":
            assert x.max() < BINS[3][0] or x.min() > BINS[3][1]


def test_every_number_of_the_map_stands_in_the_table() -> None:
    axes = plots.heat_figure(the_map()).axes[0]
    found = {
        (int(text.get_position()[0]), int(text.get_position()[1]), text.get_text())
        for text in axes.texts
    }
    rows = ["demote:224", "demote:192", "null", "reenc", "repromote:192"]
    for gap in the_map().gaps:
        column, row = BINS.index(gap.bin), rows.index(gap.arm)
        written = {word for x, y, word in found if (x, y) == (column, row)} - {""}
        number = [float(word) for word in written if word not in plots.SIGNS.values()]
        assert number == [pytest.approx(gap.d, abs=6e-4)]
        assert (plots.SIGNS[gap.verdict] in written) == gap.arm.startswith("demote")


@pytest.mark.parametrize(
    "value, text",
    [(0.6, ".600"), (-0.0301, "-.030"), (1.25, "1.250"), (-0.0001, ".000"), (10.0, "10.000")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert plots._short(value, 3) == text


def test_colours_of_the_table_turn_at_the_margin() -> None:
    values = [plots._shade(distance, 0.05) for distance in (-1.0, 0.0, 0.02, 0.05, 0.08, 0.4, 2.0)]
    assert values == sorted(values) and values[0] == 0 and values[3] == 0.5 and values[-1] == 1


def titles(shown: GapMap) -> list[str]:
    return [axes.get_title(loc="left") for axes in plots.checks_figure(shown).axes]


def test_checks_that_hold_and_checks_that_fail_are_told_apart() -> None:
    good = titles(the_map())
    assert [title[0] for title in good[:3]] == [plots.SIGNS[verdict.SAFE]] * 3
    assert "holds 0 in 8 of 8 bins" in good[0] and "0.0015" in good[1]
    assert "median correlation" in good[3]
    # A null that is as far as a route, a coarse precision, a distance that changes with draws.
    bad = make(distances={**WORLD.distances, "null": 0.3})
    bad.checks["precision"]["cosines"] = [0.9]
    bad.checks["draw_limit"]["arms"][0] |= {"c": 1.0, "se": 0.01}
    failed = titles(bad)
    assert [title[0] for title in failed[:3]] == [plots.SIGNS[verdict.UNSAFE]] * 3
    assert "holds 0 in 0 of 8 bins" in failed[0]


def test_checks_that_were_not_made_are_not_passed() -> None:
    shown = make(distances={"demote:192": 0.1}, draws=3)
    shown.checks.clear()
    assert [title[0] for title in titles(shown)[:3]] == [plots.NO_VERDICT] * 3
    assert "not measured" in titles(shown)[3]


def test_a_map_is_drawn_the_same_from_its_file(tmp_path) -> None:
    the_map().save(tmp_path / "map.json")
    first, again = (
        plots.png(plots.gap_map_figure(item))
        for item in (the_map(), GapMap.load(tmp_path / "map.json"))
    )
    assert first == again
    assert Image.open(io.BytesIO(first)).size == (1200, 900)


def test_two_processes_draw_the_same_bytes(tmp_path) -> None:
    the_map().save(tmp_path / "map.json")
    script = (
        "import sys; from demotion import gap_map, plots\n"
        "shown = gap_map.GapMap.load(sys.argv[1] + '/map.json')\n"
        "plots.save_svg(plots.gap_map_figure(shown, 'dark'), sys.argv[1] + '/other.svg')"
    )
    root = Path(plots.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True)
    here = plots.svg(plots.gap_map_figure(the_map(), "dark"))
    assert here == (tmp_path / "other.svg").read_bytes()
    assert b"<dc:date>" not in here and b"NaN" not in here


def test_themes_differ_and_an_unknown_one_is_refused() -> None:
    light, dark = (
        Image.open(io.BytesIO(plots.png(plots.checks_figure(the_map(), theme)))).convert("L")
        for theme in ("light", "dark")
    )
    assert light.getpixel((2, 2)) > 240 and dark.getpixel((2, 2)) < 40
    with pytest.raises(ValueError, match="theme 'sepia' is unknown: use one of light, dark"):
        plots.heat_figure(the_map(), "sepia")


def test_many_routes_are_told_apart() -> None:
    arms = [
        f"demote:{tier}{mode}"
        for tier in (224, 208, 192, 176, 160)
        for mode in ("", "+pi", "+yarn")
    ]
    styles = plots._styles(arms, ["repromote:192"], plots.THEMES["light"])
    assert len({(styles[arm].color, styles[arm].marker) for arm in arms}) == len(arms)
    assert styles["repromote:192"].color == styles["demote:192"].color


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


@cache
def comparison(doubles: int, singles: int, roles: tuple[str, ...]) -> compare.Comparison:
    """A first LoRA, and as many others, of which the second lacks a whole block."""
    generator = torch.Generator().manual_seed(0)
    blocks = [f"double_blocks.{n}.img_mlp" for n in range(doubles)]
    names = [*blocks, *(f"single_blocks.{n}.linear{k}" for n in range(singles) for k in (1, 2))]
    weights = {}
    for role in (compare.FIRST, *roles):
        held = names[1:] if role == compare.SECOND else names
        modules = {
            name: adapter.lora(*torch.randn(2, 4, 4, generator=generator), 1.0) for name in held
        }
        weights[role] = adapter.Weights(modules)
    files = {role: f"{role}_of_a_long_name/{'lora_' * 12}.safetensors" for role in weights}
    return compare.compare(files, weights, lambda name: torch.ones(4, 4), lambda: None)


ALONE, ALL = (compare.SECOND,), (compare.SECOND, compare.TWIN, compare.OTHER_SEED)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("theme", plots.THEMES)
@pytest.mark.parametrize("size", [(2, 0), (1, 1), (19, 38), (60, 60)])
@pytest.mark.parametrize("roles", [ALONE, ALL], ids=len)
def test_nothing_of_a_comparison_is_clipped_or_touches(size, roles, theme) -> None:
    figure = plots.comparison_figure(comparison(*size, roles), theme)
    assert_nothing_clipped(figure)
    for axes in figure.axes:
        ticks = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in zip(ticks, ticks[1:]))


def test_a_comparison_shows_every_cosine_where_it_belongs() -> None:
    shown = comparison(3, 2, ALL)
    figure = plots.comparison_figure(shown)
    for axes, grouped in zip(figure.axes, (shown.blocks, shown.parts), strict=True):
        lines = [line for line in axes.lines if len(line.get_xdata()) == 2]
        markers = [line for line in axes.lines if line.get_marker() not in ("None", "")]
        labels = [label.get_text() for label in axes.get_xticklabels()]
        for role, points in zip(ALL, markers, strict=True):
            assert labels == list(grouped(role))
            expected = [overlap.cosine for overlap in grouped(role).values()]
            np.testing.assert_array_equal(points.get_ydata(), expected)
            assert np.abs(points.get_xdata() - np.arange(len(expected))).max() < 0.5
            (line,) = [line for line in lines if line.get_color() == points.get_color()]
            assert set(line.get_ydata()) == {shown.whole(role).cosine}
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    for role, label in zip(ALL, said, strict=True):
        assert label.startswith(f"{role}: {shown.whole(role).cosine:.3f} over all modules")


def test_a_saved_comparison_is_redrawn_to_the_same_bytes(tmp_path) -> None:
    shown = comparison(3, 2, ALL)
    shown.save(tmp_path / "comparison.json")
    again = compare.Comparison.load(tmp_path / "comparison.json")
    for write in (plots.png, plots.svg):
        drawn = [write(plots.comparison_figure(one)) for one in (shown, again)]
        assert drawn[0] == drawn[1]
    with pytest.raises(ValueError, match="theme 'sepia' is unknown"):
        plots.comparison_figure(shown, "sepia")


GATES = {
    "empty": (),
    "one": (Rule((256, 192), (0.5, 1.0)),),
    "many": (
        Rule((256, 192), (0.3, 0.7), "late:0.5 by mass", "gated_yarn"),
        Rule((256, 160), (0.97, 0.99), "spread:1/3", "yarn"),
        Rule((256, 128), (0.0, 0.02)),
        Rule((256, 224), (0.05, 1.0)),
        Rule((256, 96), (0.4, 0.8), "early:0.25"),
        Rule((256, 192), (0.2, 0.5)),
    ),
}


def gate_case(name: str, density: draws.SigmaDensity, theme: str = "light") -> Figure:
    gate = Gate(GATES[name], False, None, "by hand", 256)
    tokens = {256: 256, 224: 196, 192: 144, 160: 100, 128: 64, 96: 36}
    found = forecast(gate, density, [Picture(tokens), Picture({256: 240, 192: 135})], Course(100))
    return plots.gate_figure(gate, density, found, theme)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("density", draws.DENSITIES)
def test_the_figure_of_a_gate_says_which_share_each_rule_takes(name: str, density: str) -> None:
    figure = gate_case(name, draws.SigmaDensity(density, shift=3.0))
    assert_nothing_clipped(figure)
    text = "\n".join(words(figure))
    assert "not measured" in text and "tokens saved" in text
    shares = dict(re.findall(r"rule (\d): ([0-9.]+)% of the samples", text))
    native = re.search(r"native: ([0-9.]+)%", text)[1]
    assert len(shares) == len(GATES[name])
    assert sum(map(float, (*shares.values(), native))) == pytest.approx(100, abs=0.4)
    for number, rule in enumerate(GATES[name], 1):
        assert f"{rule}: P = {shares[str(number)]}%" in text


def test_the_area_of_a_rule_is_its_share_of_the_samples() -> None:
    figure = gate_case("one", LOGIT_NORMAL)
    top = figure.axes[0]
    areas = [
        float(np.sum((step.values - step.baseline) * np.diff(step.edges)))
        for step in (patch.get_data() for patch in top.patches[:2])
    ]
    assert areas == pytest.approx([0.5, 0.5], abs=1e-6)
    low, high = figure.axes[1].patches[0].get_x(), figure.axes[1].patches[0].get_width() + 0.5
    assert (low, high) == pytest.approx((0.5, 1.0))


def test_the_figure_of_a_gate_has_two_themes_and_says_if_it_was_measured() -> None:
    papers = [gate_case("one", LOGIT_NORMAL, theme).get_facecolor() for theme in plots.THEMES]
    assert papers[0] != papers[1]
    with pytest.raises(ValueError, match="theme 'sepia'"):
        gate_case("one", LOGIT_NORMAL, "sepia")
    measured = Gate(GATES["one"], True, 0.05, "0123456789abcdef", 256)
    found = forecast(measured, LOGIT_NORMAL, [Picture({256: 256, 192: 144})], Course(100))
    figure = plots.gate_figure(measured, LOGIT_NORMAL, found)
    assert any("safe at margin 0.05" in word for word in words(figure))


def test_pyplot_is_never_loaded() -> None:
    assert "matplotlib.pyplot" not in sys.modules
