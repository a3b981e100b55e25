"""Figures, drawn from saved data alone. Object-oriented matplotlib: no pyplot, no global state."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import verdict
from .gap_map import Gap, GapMap, arm_title, headline, is_route
from .measure import write_atomically

DPI = 100
INK, FAINT, GRID = "#22262b", "#6b7480", "#e3e7eb"
# Okabe and Ito's colours, told apart by colour-blind readers; markers repeat the distinction.
ROUTES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#56b4e9", "v"))
DASHES = ("-", "--", ":", "-.")
STRIP = {verdict.SAFE: ("#bfe3cf", "safe"), verdict.UNSAFE: ("#f3c6bd", "unsafe"),
         verdict.UNDECIDED: ("#f6e6b4", "undecided"), verdict.NO_SIGNAL: ("#e6e8eb", "no signal"),
         verdict.TOO_FEW: ("#e6e8eb", f"< {verdict.MIN_IMAGES} images")}


def gap_map_figure(gap_map: GapMap, size: tuple[int, int] = (1200, 900)) -> Figure:
    """The map as a figure of size (width, height) pixels.

    Above, every route's distance over sigma with its pointwise interval (bar) and simultaneous band
    (box), the diagnostic arms thin, and the margin. Below, each route's verdict per bin, in words.
    """
    figure = _figure(size)
    routes = [arm for arm in gap_map.arms if is_route(arm)]
    others = [arm for arm in gap_map.arms if not is_route(arm)]
    axes, strip = figure.subplots(2, 1, sharex=True,
                                  height_ratios=[6.2, 0.42 * max(len(routes), 1)])
    _style(axes)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    for index, arm in enumerate(routes):
        _draw_route(axes, gap_map.of(arm), arm_title(arm, gap_map.native_tier),
                    *ROUTES[index % len(ROUTES)], 0.12 * (index - (len(routes) - 1) / 2))
    axes.axhline(gap_map.margin, color=INK, linewidth=1.2, linestyle=(0, (6, 3)),
                 label=f"margin {gap_map.margin:g}")
    for index, arm in enumerate(others):
        _draw_diagnostic(axes, gap_map.of(arm), arm_title(arm, gap_map.native_tier),
                         DASHES[index % len(DASHES)])
    axes.set_ylim(*_limits(gap_map))
    relative = f", relative to {gap_map.control}" if gap_map.control else ""
    axes.set_ylabel(f"gradient distance 1 - cos{relative}")
    _legend(axes)
    _title(axes, "How far each arm's gradient is from the native one",
           f"{headline(gap_map)}\n"
           "bars: 95 % for each bin; boxes: 95 % for all bins and routes at once")
    _draw_strip(strip, gap_map, routes)
    return figure


def loss_figure(losses: Sequence[float], demoted: Sequence[bool],
                size: tuple[int, int] = (1200, 600)) -> Figure:
    """Training loss per step, its running mean, and a mark at every demoted step.

    losses   [T] loss of each step
    demoted  [T] whether the step had a demoted sample
    """
    figure = _figure(size)
    axes = figure.subplots()
    _style(axes)
    values, marks = np.asarray(losses, dtype=float), np.asarray(demoted, dtype=bool)
    steps = np.arange(1, len(values) + 1)
    color, mark_color = ROUTES[0][0], ROUTES[1][0]
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9, label="each step")
    window = max(len(values) // 20, 1)
    axes.plot(steps, _running_mean(values, window), color=color, linewidth=2.2,
              label=f"mean of the last {window} steps")
    axes.plot(steps[marks], np.full(int(marks.sum()), 0.02), "|", color=mark_color, markersize=11,
              transform=axes.get_xaxis_transform(),
              label=f"demoted: {int(marks.sum())} of {len(values)} steps")
    axes.set_xlim(0.5, max(len(values), 1) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(y=0.08)
    _legend(axes)
    _title(axes, "Training loss",
           "the loss of a step depends on its sigma: read the running mean")
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def save_png(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG, atomically."""
    write_atomically(Path(path), png(figure))


def _figure(size: tuple[int, int]) -> Figure:
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, layout="constrained",
                    facecolor="white")
    figure.get_layout_engine().set(w_pad=0.16, h_pad=0.12)
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=11, length=0)
    axes.xaxis.label.set(color=INK, fontsize=12)
    axes.yaxis.label.set(color=INK, fontsize=12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _title(axes: Axes, title: str, details: str) -> None:
    axes.annotate(details, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points",
                  color=FAINT, fontsize=10.5, linespacing=1.4)
    lines = details.count("\n") + 1
    axes.set_title(title, loc="left", fontsize=15, color=INK, pad=12 + 16.5 * lines)


def _legend(axes: Axes) -> None:
    axes.legend(loc="best", framealpha=0.92, edgecolor=GRID, fontsize=10.5, labelcolor=INK)


def _middle(gap: Gap, shift: float = 0.0) -> float:
    low, high = gap.bin
    return (low + high) / 2 + shift * (high - low)


def _has_signal(gap: Gap) -> bool:
    return gap.verdict != verdict.NO_SIGNAL


def _height(gap: Gap) -> float:
    # Without signal the estimate is a ratio of noise: it would only stretch the picture.
    return gap.d if _has_signal(gap) else math.nan


def _runs(gaps: Sequence[Gap]) -> list[list[Gap]]:
    """The gaps split where bins do not touch: no line bridges noise levels without measurement."""
    runs: list[list[Gap]] = []
    for gap in gaps:
        if runs and math.isclose(runs[-1][-1].bin[1], gap.bin[0], abs_tol=1e-9):
            runs[-1].append(gap)
        else:
            runs.append([gap])
    return runs


def _draw_route(axes: Axes, gaps: Sequence[Gap], title: str, color: str, marker: str,
                shift: float) -> None:
    label = f"{title} px, {gaps[0].tokens:.0f} of {gaps[0].src_tokens:.0f} tokens"
    for run in _runs(gaps):
        x = [_middle(gap, shift) for gap in run]
        axes.plot(x, [_height(gap) for gap in run], color=color, marker=marker, markersize=7,
                  linewidth=2, markeredgecolor="white", zorder=4, label=label)
        label = "_"
    for gap in filter(_has_signal, gaps):
        middle, width = _middle(gap, shift), gap.bin[1] - gap.bin[0]
        low, high = gap.band
        # A box per bin, since the band speaks of bins and not of the noise levels between them.
        axes.add_patch(Rectangle((middle - 0.05 * width, low), 0.1 * width, high - low, color=color,
                                 alpha=0.22, linewidth=0, zorder=2))
        axes.plot([middle] * 2, gap.pointwise, color=color, linewidth=1.6, zorder=3)


def _draw_diagnostic(axes: Axes, gaps: Sequence[Gap], title: str, style: str) -> None:
    label = title
    for run in _runs(gaps):
        axes.plot([_middle(gap) for gap in run], [_height(gap) for gap in run], color=FAINT,
                  linewidth=1.2, linestyle=style, zorder=1.5, label=label)
        label = "_"


def _limits(gap_map: GapMap) -> tuple[float, float]:
    """Vertical limits that hold every estimate and band, short of what little signal says."""
    values = [0.0, 1.6 * gap_map.margin]
    for gap in gap_map.gaps:
        values += [_height(gap), *(gap.band if is_route(gap.arm) else ())]
    finite = [value for value in values if math.isfinite(value)]
    low, high = max(min(finite), -0.3), min(max(finite), 1.2)
    return low - 0.04 * (high - low), high + 0.06 * (high - low)


def _draw_strip(axes: Axes, gap_map: GapMap, routes: Sequence[str]) -> None:
    first, last = gap_map.bins[0][0], gap_map.bins[-1][1]
    for row, arm in enumerate(routes):
        for gap in gap_map.of(arm):
            low, high = gap.bin
            fill, word = STRIP[gap.verdict]
            axes.add_patch(Rectangle((low, row + 0.08), high - low, 0.84, facecolor=fill,
                                     edgecolor="white", linewidth=2))
            # The longest word fills its box in a map of 16 bins at this size.
            axes.text((low + high) / 2, row + 0.5, word, ha="center", va="center", color=INK,
                      fontsize=min(10.5, max(120 * (high - low) / (last - first), 5)),
                      fontweight="bold" if gap.verdict == verdict.SAFE else "normal")
    axes.set_ylim(max(len(routes), 1), 0)
    axes.set_xlim(first, last)
    axes.set_yticks([row + 0.5 for row in range(len(routes))],
                    [arm_title(arm, gap_map.native_tier) for arm in routes])
    edges = sorted({edge for edges in gap_map.bins for edge in edges})
    axes.set_xticks(edges[::math.ceil(len(edges) / 18)])
    axes.xaxis.set_major_formatter("{x:.4g}")
    axes.tick_params(colors=INK, labelsize=11, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("noise level sigma", color=INK, fontsize=12)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """[T] mean of the last `window` values, of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
