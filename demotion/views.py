"""What the widgets on the canvas draw, as plain JSON data: a map, finished or so far, a gate, a
training run. NaN is null."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from . import cosine, verdict
from .arms import Arm
from .gap_map import GapMap, arm_title, headline, is_route
from .gate import Gate, describe
from .grid import token_count
from .measure import Cell, Measurement
from .train import History

NOT_YET = "not yet"
# A chart has room for so many points across.
POINTS = 500


def map_view(made: GapMap) -> dict[str, Any]:
    """A finished map: margin, native tier, and per arm its gaps in ascending order of sigma."""
    gaps = {
        arm: [
            {
                "bin": list(gap.bin),
                "d": gap.d,
                "interval": list(gap.pointwise),
                "band": list(gap.band),
                "verdict": gap.verdict,
                "look": gap.look,
                "images": gap.images,
                "tokens": gap.tokens,
                "src_tokens": gap.src_tokens,
                "decide": gap.decide,
            }
            for gap in made.of(arm)
        ]
        for arm in made.arms
    }
    return _map(headline(made), made.margin, made.native_tier, gaps, so_far=False)


def map_so_far(measurement: Measurement, margin: float) -> dict[str, Any]:
    """The map of a measurement that goes on, as `map_view` has it: estimand "ratio", one-set.

    A band and verdicts hold for a number of images that was planned, so there are none yet, but the
    verdicts of planned looks. The interval is d +- t SE with the linearised standard error, which
    takes no resamples.
    """
    settings = measurement.settings
    cells = {(cell.image, cell.bin): cell for cell in measurement.cells}
    images = sorted({image for image, _ in cells})
    decided = {
        (arm, tuple(edges)): judged
        for name, found in sorted(measurement.checks.items())
        if name.startswith("look ")
        for arm, edges, judged in found
    }
    gaps = {
        arm: [
            _gap_so_far(
                arm,
                edges,
                [cells[image, edges] for image in images if (image, edges) in cells],
                settings["patch"],
                decided.get((arm, edges), NOT_YET),
            )
            for edges in sorted(measurement.bins)
        ]
        for arm in measurement.arms
        if arm != "src"
    }
    text = f"so far: {len(images)} of {len(settings['images'])} images, margin {margin:g}"
    return _map(text, margin, settings["native_tier"], gaps, so_far=True)


def gate_view(gate: Gate, made: GapMap | None = None) -> dict[str, Any]:
    """A gate: its rules in order, and the map that it was made from, if it is at hand."""
    return {
        "native_tier": gate.native_tier,
        "measured": gate.measured,
        "text": describe(gate),
        "rules": [
            {
                "route": list(rule.route),
                "window": list(rule.window),
                "span": rule.span,
                "rotary": rule.rotary,
            }
            for rule in gate.rules
        ],
        "map": None if made is None else map_view(made),
    }


def training_view(history: History, steps: int, cells: int, expected: float) -> dict[str, Any]:
    """A run of so many steps, up to now, in at most 500 points: [step, loss], each the mean over
    the steps since the point before; [step, mean of the last steps]; and [step, {tier: samples}] of
    those demoted. cells is how many of a latent are a token, expected the share of the tokens that
    the whole run should save."""
    done = len(history.losses)
    ends = np.unique(np.linspace(0, done, min(done, POINTS) + 1).round().astype(int)).tolist()
    stretches = list(zip(ends[:-1], ends[1:]))
    demoted = [
        [end, Counter(tier for tiers in history.tiers[start:end] for tier in tiers)]
        for start, end in stretches
    ]
    view = {
        "steps": steps,
        "done": done,
        "losses": [[end, float(np.mean(history.losses[start:end]))] for start, end in stretches],
        "smoothed": [[end, history.smoothed(end)] for _, end in stretches],
        "validation": [list(point) for point in history.validation],
        "demoted": [point for point in demoted if point[1]],
        "demoted_steps": sum(map(bool, history.tiers)),
        "tokens": sum(history.cells) // cells,
        "saving": history.saving if done else 0.0,
        "expected": expected,
    }
    return _without_nan(view)


def _map(
    text: str,
    margin: float,
    native_tier: int,
    gaps: dict[str, list[dict[str, Any]]],
    *,
    so_far: bool,
) -> dict[str, Any]:
    arms = [
        {
            "name": arm,
            "title": arm_title(arm, native_tier),
            "route": is_route(arm),
            "tier": Arm.parse(arm).tier,
            "rotary": Arm.parse(arm).rotary,
            "gaps": own,
        }
        for arm, own in gaps.items()
    ]
    view = {
        "so_far": so_far,
        "headline": text,
        "margin": margin,
        "native_tier": native_tier,
        "arms": arms,
    }
    return _without_nan(view)


def _gap_so_far(
    arm: str, edges: tuple[float, float], cells: Sequence[Cell], patch: int, judged: str
) -> dict[str, Any]:
    own = [cell for cell in cells if arm in cell.arms]
    d, reach = math.nan, math.nan
    if own and all(cell.count >= 2 for cell in own):
        d, error = verdict.point(verdict.contrast(cosine.ratio_terms(own, arm, "one_set")))
        if len(own) > 1:
            reach = float(stats.t.ppf(verdict.LEVEL, len(own) - 1)) * error
    return {
        "bin": list(edges),
        "d": d,
        "interval": [d - reach, d + reach],
        "band": [math.nan, math.nan],
        "verdict": judged,
        "images": len(own),
        "tokens": _mean(token_count(cell.grids[cell.arms.index(arm)], patch) for cell in own),
        "src_tokens": _mean(token_count(cell.grids[0], patch) for cell in own),
        "decide": "",
    }


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def _without_nan(data: Any) -> Any:
    """The same plain data with non-finite floats as None, since JSON has no NaN."""
    if isinstance(data, dict):
        return {name: _without_nan(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
