"""Figures, drawn from saved data alone. Object-oriented matplotlib: no pyplot, no global state.

Colours are told apart by colour-blind readers, and never stand alone: routes have markers, verdicts
have signs. The same data gives the same bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory
from scipy import stats

from . import compare, study, verdict
from .arms import Arm
from .draws import Bin, SigmaDensity
from .gap_map import Gap, GapMap, arm_title, headline, is_route
from .gate import Gate
from .gate_cost import Forecast
from .measure import write_atomically

DPI = 100
SIZE = (1200, 900)
FIGURES = ("map", "heat", "checks")
ENDPOINT = (1.0, 1.0)
LOGIT_NORMAL = SigmaDensity("logit_normal")
# Five colours and seven markers: 35 routes before a pair returns.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# A diagnostic arm has the colour of its tier's route and the dashes of its kind.
DASHES = {
    "null": "-",
    "reenc": (0, (5, 2)),
    "repromote": (0, (1, 1.5)),
    "resample": (0, (5, 2, 1, 2)),
    "shifted": (0, (3, 1, 1, 1, 1, 1)),
}
SIGNS = {
    verdict.SAFE: "\u2713",
    verdict.UNSAFE: "\u2717",
    verdict.UNDECIDED: "?",
    verdict.NO_SIGNAL: "\u2205",
}
NO_VERDICT = "\u2013"
MARGIN = (0, (7, 4))
# How LoRAs beside a first one are drawn: place among the colours, marker, dashes.
ROLES = {
    compare.SECOND: (0, "o", "-"),
    compare.TWIN: (2, "s", (0, (5, 2))),
    compare.OTHER_SEED: (1, "^", (0, (1, 1.5))),
}


@dataclass(frozen=True)
class Theme:
    """Colours of a figure. verdicts: fill and ink by verdict; cool and warm: below, above margin.

    The routes' are Okabe and Ito's, lightened where the paper is dark.
    """

    paper: str
    ink: str
    faint: str
    grid: str
    routes: tuple[str, ...]
    verdicts: Mapping[str, tuple[str, str]]
    cool: str
    warm: str

    def verdict(self, word: str) -> tuple[str, str]:
        """Fill and ink of a verdict's box; every reason for having none looks alike."""
        return self.verdicts.get(word, (self.paper, self.faint))


THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#1f2328",
        faint="#5f6975",
        grid="#e1e5ea",
        routes=("#0072b2", "#d55e00", "#009e73", "#b5588f", "#56b4e9"),
        verdicts={
            verdict.SAFE: ("#00664c", "#ffffff"),
            verdict.UNSAFE: ("#f5c4b0", "#5c1f05"),
            verdict.UNDECIDED: ("#dde4eb", "#37414b"),
        },
        cool="#74b3e8",
        warm="#f09a55",
    ),
    "dark": Theme(
        paper="#16191d",
        ink="#e9ecef",
        faint="#a3adb8",
        grid="#30363d",
        routes=("#58aef2", "#ff8a3d", "#2ecc9a", "#e79cc9", "#f0e442"),
        verdicts={
            verdict.SAFE: ("#46d6a8", "#06241b"),
            verdict.UNSAFE: ("#6e2f17", "#ffd9c9"),
            verdict.UNDECIDED: ("#3b444e", "#dfe6ed"),
        },
        cool="#1f66a6",
        warm="#a54c16",
    ),
}


def gap_map_figure(
    gap_map: GapMap,
    theme: str = "light",
    density: SigmaDensity | None = LOGIT_NORMAL,
    predicted: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """The map: distance over sigma above, each route's verdicts below.

    theme      "light" or "dark"
    density    density of sigma in training, drawn faintly behind; a map is measured without one
    predicted  arm -> [(sigma, distance)]: curves drawn dashed in the colour of the arm

    Routes have markers, a bar for the pointwise interval and a box for the simultaneous band;
    diagnostic arms are thin lines. The endpoint sigma = 1, a bin without width, stands apart.
    """
    view = _view(gap_map, theme)
    figure = _figure(view.look)
    rows = max(len(view.routes), 1)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[8 - 0.3 * rows, 0.5 * rows])
    _style(axes, view.look)
    # In the order of the legend.
    for index, arm in enumerate(view.routes):
        _draw_route(axes, arm, view, 0.55 * ((index + 0.5) / rows - 0.5))
    for arm, curve in (predicted or {}).items():
        sigma, distance = zip(*curve)
        label = f"{view.title(arm)}, predicted"
        axes.plot(sigma, distance, "--", color=view.styles[arm].color, linewidth=2.4, label=label)
    axes.axhline(
        gap_map.margin,
        color=view.look.ink,
        linewidth=1.6,
        linestyle=MARGIN,
        label=f"margin {gap_map.margin:g}",
    )
    for arm in view.others:
        _draw_diagnostic(axes, arm, view)
    axes.axhline(0, color=view.look.faint, linewidth=0.8)
    if density is not None:
        _draw_density(axes, density, view)
    _distance_axis(axes, view)
    _draw_strip(strip, view)
    _title(
        axes,
        "How far each arm's gradient is from the native one",
        f"{headline(gap_map)}\n{_intervals(view)}",
        view.look,
    )
    _legend(figure, view.look)
    return figure


def heat_figure(gap_map: GapMap, theme: str = "light") -> Figure:
    """The map as a table, arms by bins: distance as number and colour, the verdict as a sign.

    theme  "light" or "dark"

    Diagnostic arms stand below the routes and bear no verdict, since they open no gate.
    """
    view = _view(gap_map, theme)
    figure = _figure(view.look)
    axes = figure.subplots()
    colors = LinearSegmentedColormap.from_list(
        "margin", [view.look.cool, view.look.paper, view.look.warm]
    )
    arms, bins = [*view.routes, *view.others], gap_map.bins
    for row, arm in enumerate(arms):
        for gap in gap_map.of(arm):
            _draw_heat(axes, gap, (bins.index(gap.bin), row), view, colors)
    axes.axhline(len(view.routes), color=view.look.ink, linewidth=2)
    axes.set_xlim(0, len(bins))
    axes.set_ylim(len(arms), 0)
    _bare(axes, view.look)
    axes.set_yticks(np.arange(len(arms)) + 0.5, map(view.title, arms))
    upright = 90 if len(bins) > 8 else 0
    axes.set_xticks(np.arange(len(bins)) + 0.5, map(_bin_name, bins), rotation=upright)
    axes.set_xlabel("bin of the noise level sigma")
    _draw_scale(figure, axes, gap_map.margin, colors, view.look)
    _title(
        axes,
        "Distance from the native gradient, arm by bin",
        f"{headline(gap_map)}\n{_key(view)}",
        view.look,
    )
    return figure


def checks_figure(gap_map: GapMap, theme: str = "light") -> Figure:
    """Whether the instrument can be trusted: null, precision, draw limit, split halves.

    theme  "light" or "dark"
    """
    view = _view(gap_map, theme)
    figure = _figure(view.look)
    panels = figure.subplots(2, 2)
    for axes in panels.flat:
        _style(axes, view.look)
    _draw_null(panels[0, 0], view)
    _draw_precision(panels[0, 1], view)
    _draw_limit(panels[1, 0], view)
    _draw_split_halves(panels[1, 1], view)
    details = "\n".join(_wrapped(headline(gap_map)))
    figure.suptitle(
        f"Self-checks of the map\n{details}", x=0.012, ha="left", color=view.look.ink, fontsize=14
    )
    _legend(figure, view.look)
    return figure


def draw(
    gap_map: GapMap,
    figure: str,
    theme: str = "light",
    density: SigmaDensity | None = LOGIT_NORMAL,
) -> Figure:
    """The figure of this name, one of FIGURES; the density is the map's alone."""
    if figure == "map":
        return gap_map_figure(gap_map, theme, density)
    return {"heat": heat_figure, "checks": checks_figure}[figure](gap_map, theme)


def loss_figure(
    losses: Sequence[float],
    demoted: Sequence[int],
    validation: Sequence[tuple[int, float]] = (),
) -> Figure:
    """Training loss per step, its running mean, validation losses, and a mark at every demoted
    step.

    losses      [T] loss of each step
    demoted     [T] samples of the step that were demoted
    validation  (steps done, loss on held-out pictures)
    """
    look = THEMES["light"]
    figure = _figure(look, (1200, 600))
    axes = figure.subplots()
    _style(axes, look)
    values, marks = np.asarray(losses, dtype=float), np.asarray(demoted, dtype=bool)
    steps = np.arange(1, len(values) + 1)
    color, mark_color, held_out_color = look.routes[:3]
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9, label="each step")
    window = max(len(values) // 20, 1)
    axes.plot(
        steps,
        _running_mean(values, window),
        color=color,
        linewidth=2.2,
        label=f"mean of the last {window} steps",
    )
    if validation:
        axes.plot(
            *zip(*validation),
            "o-",
            color=held_out_color,
            markersize=6,
            linewidth=1.6,
            label="validation: held-out pictures",
        )
    axes.plot(
        steps[marks],
        np.full(int(marks.sum()), 0.02),
        "|",
        color=mark_color,
        markersize=11,
        transform=axes.get_xaxis_transform(),
        label=f"demoted: {int(marks.sum())} of {len(values)} steps",
    )
    axes.set_xlim(-0.5 if validation else 0.5, max(len(values), 1) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(y=0.08)
    axes.legend(framealpha=0.92, edgecolor=look.grid, fontsize=12, labelcolor=look.ink)
    _title(
        axes,
        "Training loss",
        "the loss of a step depends on its sigma: read the running mean",
        look,
    )
    return figure


def gate_figure(gate: Gate, density: SigmaDensity, found: Forecast, theme: str = "light") -> Figure:
    """How training draws sigma, and which of the samples each rule of a gate takes.

    theme  "light" or "dark"

    Above, the density of sigma: the area in a colour is P(rule), the share of the run's samples
    that its rule takes. Below, the rules' windows.
    """
    look = _theme(theme)
    basis = f"safe at margin {gate.margin:g}" if gate.measured else "the gate was not measured"
    figure, rows = _figure(look), max(len(gate.rules), 1)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[8 - 0.3 * rows, 0.5 * rows])
    _style(axes, look)
    _bare(strip, look)
    tops = np.zeros(len(found.edges) - 1)
    for number, rule in enumerate(gate.rules, 1):
        again, color = divmod(number - 1, len(look.routes))
        # A colour that returns is hatched.
        fill = {"facecolor": look.routes[color], "edgecolor": look.paper, "hatch": "//" * again}
        share = found.shares[number - 1]
        label = f"rule {number}: {share:.1%} of the samples"
        tops = _stack(axes, tops, found, number, label=label, alpha=0.65, **fill)
        _draw_rule(strip, number, f"{rule}: P = {share:.1%}", rule.window, look.ink, fill)
    label = f"native: {1 - found.shares.sum():.1%}"
    tops = _stack(axes, tops, found, 0, label=label, color=look.faint, alpha=0.2)
    axes.stairs(tops, found.edges, baseline=None, color=look.ink, linewidth=1.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.06 * tops.max())
    axes.set_ylabel("density of sigma in training")
    strip.set_ylim(rows, 0)
    strip.set_yticks(
        np.arange(len(gate.rules)) + 0.5, [f"rule {n}" for n in range(1, len(gate.rules) + 1)]
    )
    strip.set_xlabel("noise level sigma, from clean picture (0) to pure noise (1)")
    _panel(strip, "windows: the first rule that fits a sample decides", look)
    _title(
        axes,
        "Which samples the gate demotes",
        f"sigma {density}; tokens saved: {found.saving:.1%}; {basis}",
        look,
    )
    _legend(figure, look)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as SVG bytes, its letters as outlines; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "demotion", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save_png(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG, atomically."""
    write_atomically(Path(path), png(figure))


def save_svg(figure: Figure, path: str | Path) -> None:
    """Write the figure as SVG, atomically."""
    write_atomically(Path(path), svg(figure))


@dataclass(frozen=True)
class _Style:
    """How an arm is drawn."""

    color: str
    marker: str
    dashes: str | tuple


@dataclass(frozen=True)
class _View:
    """A map and how its arms and bins are shown: what every part of a figure needs.

    places  where each bin lies across
    """

    map: GapMap
    look: Theme
    routes: list[str]
    others: list[str]
    styles: dict[str, _Style]
    places: dict[Bin, tuple[float, float]]

    def title(self, arm: str) -> str:
        return arm_title(arm, self.map.native_tier)


def _theme(name: str) -> Theme:
    if name not in THEMES:
        raise ValueError(f"theme '{name}' is unknown: use one of {', '.join(THEMES)}")
    return THEMES[name]


def _view(gap_map: GapMap, theme: str) -> _View:
    look = _theme(theme)
    routes = [arm for arm in gap_map.arms if is_route(arm)]
    others = [arm for arm in gap_map.arms if not is_route(arm)]
    styles = _styles(routes, others, look)
    return _View(gap_map, look, routes, others, styles, _places(gap_map.bins))


def _styles(routes: Sequence[str], others: Sequence[str], look: Theme) -> dict[str, _Style]:
    """A route has a colour and a marker; a diagnostic arm its tier's colour, its kind's dashes."""
    styles = {
        arm: _Style(look.routes[index % len(look.routes)], MARKERS[index % len(MARKERS)], "-")
        for index, arm in enumerate(routes)
    }
    of_tier: dict[int | None, str] = {}
    for arm in routes:
        of_tier.setdefault(Arm.parse(arm).tier, styles[arm].color)
    for arm in others:
        parsed = Arm.parse(arm)
        styles[arm] = _Style(of_tier.get(parsed.tier, look.faint), "", DASHES[parsed.kind])
    return styles


def _places(bins: Sequence[Bin]) -> dict[Bin, tuple[float, float]]:
    """Each bin lies at its edges, but the endpoint, which has no width, in a box beyond 1."""
    places = {edges: edges for edges in bins}
    if ENDPOINT in places:
        span = 1 - bins[0][0] or 1.0
        places[ENDPOINT] = (1 + 0.025 * span, 1 + 0.1 * span)
    return places


def _figure(look: Theme, size: tuple[int, int] = SIZE) -> Figure:
    figure = Figure(
        figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, layout="constrained", facecolor=look.paper
    )
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
    FigureCanvasAgg(figure)
    return figure


def _bare(axes: Axes, look: Theme) -> None:
    axes.set_facecolor(look.paper)
    axes.tick_params(colors=look.ink, labelsize=13, length=0)
    axes.xaxis.label.set(color=look.ink, fontsize=13)
    axes.yaxis.label.set(color=look.ink, fontsize=13)
    axes.spines[:].set_visible(False)


def _style(axes: Axes, look: Theme) -> None:
    _bare(axes, look)
    axes.grid(color=look.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set(visible=True, color=look.grid)


def _wrapped(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, 114)]


def _title(axes: Axes, title: str, details: str, look: Theme) -> None:
    lines = _wrapped(details)
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        (0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        color=look.faint,
        fontsize=12,
        linespacing=1.35,
    )
    axes.set_title(title, loc="left", fontsize=17, color=look.ink, pad=14 + 18 * len(lines))


def _legend(figure: Figure, look: Theme) -> None:
    figure.legend(
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=12,
        labelcolor=look.ink,
        columnspacing=1.4,
        handlelength=2.6,
    )


def _bin_name(edges: Bin) -> str:
    return "1" if edges == ENDPOINT else f"{edges[0]:.3g}\u2013{edges[1]:.3g}"


def _sigma_axis(axes: Axes, view: _View, apart: float) -> None:
    """Ticks at edges of bins, at least a fraction of the axis apart; one in the endpoint's box."""
    places = view.places
    first, last = min(places.values())[0], max(places.values())[1]
    kept = [_middle(places[ENDPOINT])] if ENDPOINT in places else []
    names = ["= 1"] * len(kept)
    for edge in sorted({edge for edges in places if edges != ENDPOINT for edge in edges}):
        if all(abs(edge - other) > apart * (last - first) for other in kept):
            kept.append(edge)
            names.append(f"{edge:.3g}")
    axes.set_xlim(first, last)
    axes.set_xticks(kept, names)


def _distance_axis(axes: Axes, view: _View) -> None:
    """Linear near 0, where verdicts fall, and logarithmic beyond, where a route is lost anyway."""
    margin = view.map.margin
    values = [-margin, 2 * margin]
    for gap in filter(_has_signal, view.map.gaps):
        values += [gap.d, *(*gap.pointwise, *gap.band) * is_route(gap.arm)]
    finite = np.clip([value for value in values if math.isfinite(value)], -0.5, 2.0)
    low, high = 1.1 * min(finite), 1.12 * max(finite)
    axes.set_yscale("asinh", linear_width=2 * margin)
    axes.set_ylim(low, high)
    steps = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    ticks = sorted([0.0, *steps, *(-step for step in steps)])
    axes.set_yticks([tick for tick in ticks if low < tick < high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    relative = f", relative to {view.map.control}" if view.map.control else ""
    axes.set_ylabel(f"gradient distance 1 - cos{relative}\n(scale stretched near 0)")


def _middle(place: tuple[float, float], shift: float = 0.0) -> float:
    left, right = place
    return (left + right) / 2 + shift * (right - left)


def _has_signal(gap: Gap) -> bool:
    return gap.verdict != verdict.NO_SIGNAL


def _height(gap: Gap) -> float:
    # Without signal the estimate is a ratio of noise: it would only stretch the picture.
    return gap.d if _has_signal(gap) else math.nan


def _stretches(gaps: Sequence[Gap]) -> list[list[Gap]]:
    """The gaps split where bins do not touch: no line bridges noise levels without measurement."""
    found: list[list[Gap]] = []
    for gap in gaps:
        touches = found and math.isclose(found[-1][-1].bin[1], gap.bin[0], abs_tol=1e-9)
        if touches and gap.bin != ENDPOINT:
            found[-1].append(gap)
        else:
            found.append([gap])
    return found


def _draw_line(axes: Axes, arm: str, view: _View, label: str, shift: float = 0.0, **how) -> None:
    """An arm's distances, joined over bins that touch, each moved by a fraction of its bin."""
    style = view.styles[arm]
    for stretch in _stretches(view.map.of(arm)):
        x = [_middle(view.places[gap.bin], shift) for gap in stretch]
        y = [_height(gap) for gap in stretch]
        if len(stretch) == 1 and not style.marker:
            x, y = list(view.places[stretch[0].bin]), y * 2
        axes.plot(
            x,
            y,
            color=style.color,
            marker=style.marker,
            linestyle=style.dashes,
            markeredgecolor=view.look.paper,
            label=label,
            **how,
        )
        label = "_"


def _draw_interval(axes: Axes, gap: Gap, place: tuple[float, float], color: str) -> None:
    """A box for the simultaneous band over a place, and a bar for the pointwise interval."""
    (left, right), (low, high) = place, gap.band
    # A box per bin, since the band speaks of bins and not of the noise levels between them.
    box = Rectangle((left, low), right - left, high - low, color=color, alpha=0.3, linewidth=0)
    axes.add_patch(box)
    axes.plot([_middle(place)] * 2, gap.pointwise, color=color, linewidth=2, zorder=3)


def _draw_route(axes: Axes, arm: str, view: _View, shift: float) -> None:
    """A route, moved by a fraction of a bin so that routes do not hide one another."""
    gaps = view.map.of(arm)
    label = f"{view.title(arm)}: {gaps[0].tokens:.0f} of {gaps[0].src_tokens:.0f} tokens"
    size = max(9 - 0.15 * len(view.places), 5)
    _draw_line(axes, arm, view, label, shift, linewidth=2, markersize=size, zorder=4)
    for gap in filter(_has_signal, gaps):
        left, right = view.places[gap.bin]
        middle, half = _middle((left, right), shift), 0.055 * (right - left)
        _draw_interval(axes, gap, (middle - half, middle + half), view.styles[arm].color)


def _draw_diagnostic(axes: Axes, arm: str, view: _View) -> None:
    _draw_line(axes, arm, view, view.title(arm), linewidth=1.6, zorder=1.5)


def _draw_density(axes: Axes, density: SigmaDensity, view: _View) -> None:
    """The density as a faint hill at the bottom, a fifth of the panel high."""
    sigma = np.linspace(view.map.bins[0][0], view.map.bins[-1][1], 201)
    height = np.diff([density.cdf(value) for value in sigma])
    if not height.any():
        return  # the endpoint alone has no density
    axes.fill_between(
        (sigma[1:] + sigma[:-1]) / 2,
        0,
        0.22 * height / height.max(),
        transform=axes.get_xaxis_transform(),
        color=view.look.faint,
        alpha=0.16,
        linewidth=0,
        zorder=0.5,
        label=f"sigma in training: {density}",
    )


def _intervals(view: _View) -> str:
    """What bars and boxes are; an estimand that drives no verdict has no boxes."""
    banded = any(math.isfinite(gap.band[0]) for arm in view.routes for gap in view.map.of(arm))
    boxes = "; box: 95 % for all bins and routes at once" if banded else ""
    return f"bar: 95 % for this bin{boxes}"


def _key(view: _View) -> str:
    """The signs of a map's verdicts, explained."""
    words = {gap.verdict for arm in view.routes for gap in view.map.of(arm)}
    named = [f"{sign} {word}" for word, sign in SIGNS.items() if word in words]
    named += [f"{NO_VERDICT} {word}" for word in sorted(words - set(SIGNS))]
    if any(gap.look for arm in view.routes for gap in view.map.of(arm)):
        named.append("(for boxes across it a planned look decided)")
    return "    ".join(named)


def _draw_strip(axes: Axes, view: _View) -> None:
    """Each route's verdicts, in one box where adjacent bins agree, since that is a window."""
    _bare(axes, view.look)
    _sigma_axis(axes, view, apart=0.055)
    axes.set_xlabel("noise level sigma, from clean picture (0) to pure noise (1)")
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    for row, arm in enumerate(view.routes):
        for stretch in _stretches(view.map.of(arm)):
            for word, same in groupby(stretch, key=lambda gap: gap.verdict):
                _draw_window(axes, [view.places[gap.bin] for gap in same], row, word, view.look)
        style = view.styles[arm]
        axes.plot(
            [-0.012],
            [row + 0.5],
            style.marker,
            color=style.color,
            markersize=9,
            transform=beside,
            clip_on=False,
        )
    axes.set_ylim(max(len(view.routes), 1), 0)
    axes.set_yticks(np.arange(len(view.routes)) + 0.5, map(view.title, view.routes))
    axes.tick_params(axis="y", pad=20)
    verdicts = f"verdict at margin {view.map.margin:g}:   {_key(view)}"
    _panel(axes, verdicts if view.routes else "no route, no verdict", view.look)


def _draw_window(
    axes: Axes, places: Sequence[tuple[float, float]], row: int, word: str, look: Theme
) -> None:
    left, right = places[0][0], places[-1][1]
    fill, ink = look.verdict(word)
    axes.add_patch(
        Rectangle(
            (left, row + 0.07),
            right - left,
            0.86,
            facecolor=fill,
            edgecolor=look.grid if fill == look.paper else look.paper,
            linewidth=2,
        )
    )
    axes.vlines([low for low, _ in places[1:]], row + 0.78, row + 0.93, look.paper, linewidth=1.5)
    sign = SIGNS.get(word, NO_VERDICT)
    first, last = axes.get_xlim()
    # About 90 letters fit across the panel.
    fits = 90 * (right - left) / (last - first) > len(word) + 4
    axes.text(
        (left + right) / 2,
        row + 0.5,
        f"{sign} {word}" if fits else sign,
        ha="center",
        va="center",
        color=ink,
        fontsize=12.5,
        fontweight="bold" if word == verdict.SAFE else "normal",
    )


def _draw_heat(
    axes: Axes,
    gap: Gap,
    corner: tuple[int, int],
    view: _View,
    colors: LinearSegmentedColormap,
) -> None:
    shown = _has_signal(gap) and math.isfinite(gap.d)
    fill = colors(_shade(gap.d, view.map.margin)) if shown else view.look.paper
    (column, row), wide = corner, len(view.places) <= 12
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=fill, edgecolor=view.look.grid))
    how = {"ha": "center", "va": "center", "color": view.look.ink}
    route = is_route(gap.arm)
    if route:
        sign = SIGNS.get(gap.verdict, NO_VERDICT)
        axes.text(column + 0.5, row + 0.36, sign, fontsize=18 if wide else 14, **how)
    if route and gap.verdict == verdict.SAFE:
        frame = {"fill": False, "edgecolor": view.look.ink, "linewidth": 2.5}
        axes.add_patch(Rectangle((column + 0.03, row + 0.04), 0.94, 0.92, **frame))
    if shown:
        number, height = _short(gap.d, 3 if wide else 2), 0.68 if route else 0.5
        axes.text(column + 0.5, row + height, number, fontsize=13 if wide else 10.5, **how)


def _short(value: float, digits: int) -> str:
    """A number without the 0 before its point and without the sign of a 0."""
    # Adding 0 turns -0 into 0.
    written = f"{round(value, digits) + 0:.{digits}f}"
    return written.replace("0.", ".", 1) if abs(value) < 1 else written


def _shade(distance: float, margin: float) -> float:
    """Place on the colour scale: 1/2 at the margin, 0 and 1 at an eighth of it and at 8 times."""
    return min(0.5 + math.log2(max(distance / margin, 1 / 8)) / 6, 1.0)


def _draw_scale(
    figure: Figure, axes: Axes, margin: float, colors: LinearSegmentedColormap, look: Theme
) -> None:
    factors = [2.0**power for power in range(-3, 4)]
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), colors),
        ax=axes,
        location="bottom",
        shrink=0.6,
        aspect=40,
        ticks=[_shade(factor, 1) for factor in factors],
    )
    bar.outline.set_visible(False)
    bar.ax.set_xticklabels([f"{'margin ' * (f == 1)}{f * margin:.2g}" for f in factors])
    bar.ax.tick_params(colors=look.ink, labelsize=12, length=0)


def _panel(axes: Axes, title: str, look: Theme) -> None:
    axes.set_title(title, loc="left", color=look.ink, fontsize=13)


def _draw_null(axes: Axes, view: _View) -> None:
    """The native gradient under other noise: its band must hold 0."""
    gaps = view.map.of("null")
    bands = [gap.band for gap in gaps if math.isfinite(gap.band[0])]
    held = sum(low <= 0 <= high for low, high in bands)
    color = view.look.routes[0]
    for gap in filter(_has_signal, gaps):
        place = view.places[gap.bin]
        _draw_interval(axes, gap, place, color)
        axes.plot([_middle(place)], [gap.d], "o", color=color)
    axes.axhline(0, color=view.look.ink, linewidth=1)
    _sigma_axis(axes, view, apart=0.12)
    axes.set_ylabel("distance of null")
    if not bands:
        _panel(axes, f"{NO_VERDICT} null: no band to judge by", view.look)
        return
    sign = SIGNS[verdict.SAFE if held == len(bands) else verdict.UNSAFE]
    _panel(axes, f"{sign} null: its band holds 0 in {held} of {len(bands)} bins", view.look)


def _draw_precision(axes: Axes, view: _View) -> None:
    """How far the compute precision moves each checked gradient, beside the margin."""
    axes.axhline(view.map.margin, color=view.look.ink, linewidth=1.6, linestyle=MARGIN)
    axes.set_yscale("asinh", linear_width=0.001)
    axes.set_ylim(-0.001, 1)
    axes.set_yticks([0, 0.001, 0.01, 0.1, 1])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylabel("1 - cos to float32")
    axes.set_xlabel("checked draw")
    check = view.map.checks.get("precision")
    if check is None:
        axes.set_xticks([])
        _panel(axes, f"{NO_VERDICT} precision: not measured (float32 needs none)", view.look)
        return
    moved = 1 - np.asarray(check["cosines"])
    draws = np.arange(1, len(moved) + 1)
    axes.plot(draws, moved, "o", color=view.look.routes[0])
    axes.set_xticks(draws[:: math.ceil(len(draws) / 10)])
    sign = SIGNS[verdict.SAFE if moved.mean() <= view.map.margin else verdict.UNSAFE]
    _panel(axes, f"{sign} {check['dtype']} moves a gradient by {moved.mean():.2g}", view.look)


def _draw_limit(axes: Axes, view: _View) -> None:
    """Draw-limit fits by the error of each: the native self-cosine must tend to 1, and an arm's
    distance must not change with draws."""
    _sigma_axis(axes, view, apart=0.12)
    axes.set_ylabel("off by, standard errors")
    check = view.map.checks.get("draw_limit", {"native": [], "arms": []})
    fits = [("src", tuple(row["bin"]), row["a"] - 1, row["se"]) for row in check["native"]]
    fits += [(row["arm"], tuple(row["bin"]), row["c"], row["se"]) for row in check["arms"]]
    fits = [(arm, edges, off / error) for arm, edges, off, error in fits if error > 0]
    if not fits:
        _panel(axes, f"{NO_VERDICT} draw limit: needs an even number of draws from 4 on", view.look)
        return
    # One test at 5 % for all fits together.
    reach = float(stats.t.ppf(1 - 0.025 / len(fits), view.map.images - 1))
    axes.axhspan(-reach, reach, color=view.look.faint, alpha=0.16, linewidth=0)
    axes.axhline(0, color=view.look.ink, linewidth=1)
    labels = {"src": "native self-cosine", next(iter(view.others), ""): "arms that are no routes"}
    for arm in dict.fromkeys(arm for arm, _, _ in fits):
        places = {edges: off for name, edges, off in fits if name == arm}
        style = view.styles.get(arm, _Style(view.look.ink, "*", ""))
        _draw_points(axes, view, style, places, labels.get(arm, "_"))
    inside = sum(abs(off) <= reach for _, _, off in fits)
    sign = SIGNS[verdict.SAFE if inside == len(fits) else verdict.UNSAFE]
    _panel(axes, f"{sign} draw limit: {inside} of {len(fits)} fits where they must be", view.look)


def _draw_points(
    axes: Axes, view: _View, style: _Style, values: Mapping[Bin, float], label: str
) -> None:
    """A value per bin; arms without a marker of their own get a small dot."""
    axes.plot(
        [_middle(view.places[edges]) for edges in values],
        list(values.values()),
        style.marker or ".",
        color=style.color,
        markersize=7,
        label=label,
    )


def _draw_split_halves(axes: Axes, view: _View) -> None:
    """Correlation over images of the distances from even and from odd draws."""
    found = []
    for arm in view.routes:
        values = {gap.bin: gap.split_half for gap in view.map.of(arm)}
        _draw_points(axes, view, view.styles[arm], values, view.title(arm))
        found += [value for value in values.values() if math.isfinite(value)]
    axes.axhline(0, color=view.look.ink, linewidth=1)
    axes.set_ylim(-1.05, 1.05)
    _sigma_axis(axes, view, apart=0.12)
    axes.set_ylabel("even against odd draws")
    median = f"median correlation {np.median(found):.2f}" if found else "not measured"
    _panel(axes, f"split half over images: {median}", view.look)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """[T] mean of the last `window` values, of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def comparison_figure(comparison: compare.Comparison, theme: str = "light") -> Figure:
    """Cosine of each LoRA's weight change with the first's, by block and by part.

    theme  "light" or "dark"

    A line across is the cosine over all modules, a marker that of one block or part. Those of twin
    and other seed are the references: what a rerun keeps, and what another seed leaves.
    """
    look = _theme(theme)
    figure = _figure(look)
    grouped = {"by block": comparison.blocks, "by part": comparison.parts}
    counts = [len(of(compare.SECOND)) for of in grouped.values()]
    panels = figure.subplots(1, 2, sharey=True, width_ratios=np.maximum(counts, sum(counts) / 5))
    for axes, (title, of), count in zip(panels, grouped.items(), counts):
        _style(axes, look)
        axes.grid(visible=False, axis="x")
        axes.axhline(0, color=look.faint, linewidth=0.8)
        for role in comparison.overlaps:
            cosines = [overlap.cosine for overlap in of(role).values()]
            _draw_role(axes, role, cosines, comparison.whole(role).cosine, look)
        # About 70 names fit across both panels.
        shown = slice(None, None, math.ceil(sum(counts) / 70))
        names = list(of(compare.SECOND))
        axes.set_xticks(range(count)[shown], names[shown], rotation=90)
        axes.tick_params(axis="x", labelsize=12 if sum(counts) < 40 else 9)
        axes.set_xlim(-0.6, count - 0.4)
        axes.set_xlabel(title)
    panels[0].set_ylabel("cosine of Delta W with that of the first")
    lowest = min(np.nanmin(line.get_ydata()) for axes in panels for line in axes.lines)
    panels[0].set_ylim(1.05 * lowest - 0.03, 1.03)
    first = comparison.loras[compare.FIRST]
    details = f"{first['name']} is the first: {compare.described(first)}"
    figure.suptitle(
        "\n".join(["How alike the weight changes of LoRAs are", *_wrapped(details)]),
        x=0.012,
        ha="left",
        color=look.ink,
        fontsize=14,
    )
    _role_legend(figure, comparison, look)
    return figure


def _draw_role(axes: Axes, role: str, cosines: Sequence[float], whole: float, look: Theme) -> None:
    """One LoRA beside the first, moved a little so that markers do not hide one another."""
    index, marker, dashes = ROLES[role]
    color, shift = look.routes[index], 0.2 * (list(ROLES).index(role) - 1)
    axes.axhline(whole, color=color, linestyle=dashes, linewidth=1.8)
    how = {"color": color, "markeredgecolor": look.paper, "linestyle": "", "markersize": 9}
    axes.plot(np.arange(len(cosines)) + shift, cosines, marker=marker, zorder=3, **how)


def _role_legend(figure: Figure, comparison: compare.Comparison, look: Theme) -> None:
    """A row for each LoRA beside the first: its cosine over all modules, and its file."""
    handles = []
    for role in comparison.overlaps:
        index, marker, dashes = ROLES[role]
        cosine = f"{comparison.whole(role).cosine:.3f} over all modules"
        label = f"{role}: {cosine}, {comparison.loras[role]['name']}"
        how = {"color": look.routes[index], "linestyle": dashes, "linewidth": 1.8}
        handles.append(Line2D([], [], marker=marker, label="\n".join(_wrapped(label)), **how))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        frameon=False,
        fontsize=13,
        labelcolor=look.ink,
        handlelength=4,
    )


def _stack(axes: Axes, base: np.ndarray, found: Forecast, column: int, **how) -> np.ndarray:
    """Draw a column of a forecast as density upon a base [C]; the top of it."""
    top = base + found.mass[:, column] / np.diff(found.edges)
    axes.stairs(top, found.edges, baseline=base, fill=True, linewidth=0, **how)
    return top


def _draw_rule(
    axes: Axes,
    number: int,
    text: str,
    window: tuple[float, float],
    ink: str,
    fill: Mapping[str, str],
) -> None:
    left, right = window
    size = right - left, 0.86
    axes.add_patch(Rectangle((left, number - 0.93), *size, alpha=0.35, linewidth=0, **fill))
    # About 125 letters fit across the panel: words that are longer than their window go beside it.
    length, side, place = len(text) / 125, "center", (left + right) / 2
    if right - left < length < left:
        side, place = "right", left - 0.006
    elif right - left < length < 1 - right:
        side, place = "left", right + 0.006
    axes.text(place, number - 0.5, text, ha=side, va="center", color=ink, fontsize=12.5)


def study_figure(found: study.Study, theme: str = "light") -> Figure:
    """What each gated arm of a study saved of native training's tokens, and how near to native its
    weight change stayed; hollow markers are at the saving that was predicted. (Times are in the
    table: they are the machine's as much as the gate's.)

    theme  "light" or "dark"

    Lines across are the references: native training again, and native training from another seed.
    """
    look = _theme(theme)
    figure = _figure(look, (1200, 700))
    axes = figure.subplots()
    _style(axes, look)
    cosines = {row.arm: row.cosine for row in found.rows}
    references = [(study.TWIN, "-", "twin"), (study.OTHER_SEED, (0, (5, 2)), "another seed")]
    for arm, dashes, name in references:
        label = f"{name}: cosine {cosines[arm]:.3f}"
        axes.axhline(cosines[arm], color=look.ink, linestyle=dashes, linewidth=1.6, label=label)
    for index, row in enumerate(row for row in found.rows if row.rules):
        color = look.routes[index % len(look.routes)]
        how = {"color": color, "marker": MARKERS[index % len(MARKERS)], "markersize": 11}
        saved = 100 * row.saved
        axes.plot([saved, 100 * row.predicted], [row.cosine] * 2, color=color, linewidth=1)
        label = f"{row.arm}: {saved:.1f} %, cosine {row.cosine:.3f}"
        axes.plot([saved], [row.cosine], linestyle="", label=label, **how)
        axes.plot([100 * row.predicted], [row.cosine], linestyle="", fillstyle="none", **how)
    axes.axvline(0, color=look.faint, linewidth=0.8)
    axes.margins(x=0.08, y=0.08)
    axes.set_xlabel("tokens saved, % of native training's (hollow: predicted)")
    axes.set_ylabel("cosine of Delta W with that of native")
    title = "What demotion saves, and how near to native training it stays"
    _title(axes, title, found.setting, look)
    _legend(figure, look)
    return figure
