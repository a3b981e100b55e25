"""What the widgets draw: it says what the map, the gate and the history say, and is plain JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import synthetic

from demotion import gate, verdict, views
from demotion.gap_map import gap_map
from demotion.measure import Measurement
from demotion.train import History

WORLD = synthetic.World(
    {"null": 0.0, "demote:224": [0.3, 0.1, 0.02, 0.01], "demote:192": [0.4, 0.2, 0.08, 0.06]},
    spread=0.01,
)
MADE = synthetic.measure(WORLD)
IMAGES = sorted({cell.image for cell in MADE.cells})
MEASUREMENT = replace(MADE, settings=MADE.settings | {"images": dict.fromkeys(IMAGES, {})})
MAP = gap_map(MEASUREMENT)


def gaps(view: dict) -> dict[tuple[str, tuple[float, float]], dict]:
    return {(arm["name"], tuple(gap["bin"])): gap for arm in view["arms"] for gap in arm["gaps"]}


def first_images(count: int) -> Measurement:
    cells = [cell for cell in MEASUREMENT.cells if cell.image in IMAGES[:count]]
    return Measurement(MEASUREMENT.settings, cells)


def test_a_finished_view_says_what_the_map_says() -> None:
    shown = gaps(views.map_view(MAP))
    assert len(shown) == len(MAP.gaps)
    for gap in MAP.gaps:
        view = shown[gap.arm, gap.bin]
        assert (view["d"], view["verdict"], view["images"]) == (gap.d, gap.verdict, gap.images)
        assert view["band"] == list(gap.band) and view["interval"] == list(gap.pointwise)


def test_so_far_has_the_distances_of_the_map_and_no_verdict() -> None:
    shown = gaps(views.map_so_far(MEASUREMENT, 0.05))
    for gap in MAP.gaps:
        view = shown[gap.arm, gap.bin]
        assert view["d"] == pytest.approx(gap.d, abs=1e-12)
        assert view["verdict"] == views.NOT_YET and view["band"] == [None, None]
        low, high = view["interval"]
        assert low < gap.d < high
        assert high - low == pytest.approx(
            2 * 2.201 * gap.se, rel=1e-3
        )  # Student's t of 11 degrees of freedom at 97.5 %


@pytest.mark.parametrize("count", [0, 1, 2])
def test_so_far_is_drawn_from_the_first_image_on(count: int) -> None:
    for view in gaps(views.map_so_far(first_images(count), 0.05)).values():
        assert view["images"] == count
        assert (view["d"] is None) == (count == 0)
        assert (view["interval"][0] is None) == (count < 2)


def test_so_far_keeps_the_verdicts_of_planned_looks() -> None:
    checks = {"look 1": [["demote:224", [0.75, 1.0], verdict.SAFE]]}
    shown = gaps(views.map_so_far(replace(MEASUREMENT, checks=checks), 0.05))
    assert shown["demote:224", (0.75, 1.0)]["verdict"] == verdict.SAFE
    assert shown["demote:192", (0.75, 1.0)]["verdict"] == views.NOT_YET


def test_so_far_does_not_touch_the_measurement() -> None:
    before = [cell.gram.copy() for cell in MEASUREMENT.cells]
    views.map_so_far(MEASUREMENT, 0.05)
    assert len(before) == len(MEASUREMENT.cells)
    assert all((one == cell.gram).all() for one, cell in zip(before, MEASUREMENT.cells))


def test_a_gate_view_has_its_rules_in_order_and_its_map() -> None:
    made = gate.from_gap_map(MAP)
    view = views.gate_view(made, MAP)
    assert [rule["window"] for rule in view["rules"]] == [list(r.window) for r in made.rules]
    assert view["rules"] and view["map"] == views.map_view(MAP)
    assert view["text"] == gate.describe(made)


@pytest.mark.parametrize("steps", [0, 1, 7, 499, 501, 1234])
def test_a_run_is_told_in_at_most_500_points_that_lose_no_step(steps: int) -> None:
    history = History(
        losses=[float(step % 5) for step in range(steps)],
        tiers=[[192] * (step % 3) for step in range(steps)],
        cells=[3] * steps,
        native_cells=[4] * steps,
    )
    view = views.training_view(history, 2000, 3, 0.2)
    points, ends = view["losses"], [0, *(end for end, _ in view["losses"])]
    assert len(points) == min(steps, views.POINTS) == len(view["smoothed"])
    assert ends == sorted(set(ends)) and ends[-1] == steps == view["done"]
    weighed = sum(loss * (end - start) for (end, loss), start in zip(points, ends))
    assert weighed == pytest.approx(sum(history.losses))
    demoted = sum(count for _, counts in view["demoted"] for count in counts.values())
    assert demoted == sum(map(len, history.tiers))
    assert view["saving"] == (0.25 if steps else 0.0) and view["expected"] == 0.2
    assert view["tokens"] == steps


def test_a_view_is_json_without_nan() -> None:
    gone = replace(MAP, gaps=tuple(replace(gap, d=math.nan) for gap in MAP.gaps))
    lost = History([math.nan], [[]], [1], [1])
    for view in (views.map_view(gone), views.training_view(lost, 5, 1, 0.0)):
        json.dumps(view, allow_nan=False)
