"""Measurement files: exact, appendable, safe against interruption and mixed settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic

from demotion import gap_map, gate, measure
from demotion.measure import Cell, Measurement

WORLD = synthetic.World({"null": 0.0, "demote:192": 0.2}, images=2)
MEASUREMENT = synthetic.measure(WORLD)


def assert_same(first: Cell, second: Cell) -> None:
    assert (first.image, first.bin, first.arms, first.counts, first.grids, first.losses) == (
        second.image, second.bin, second.arms, second.counts, second.grids, second.losses)
    np.testing.assert_array_equal(first.gram, second.gram)
    np.testing.assert_array_equal(first.products, second.products)


def appended(path: Path, cells: list[Cell]) -> None:
    measure.open_for_append(path, MEASUREMENT.settings)
    for cell in cells:
        measure.append(path, cell)


def test_saving_and_loading_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "run" / "m.jsonl"
    MEASUREMENT.save(path)
    again = Measurement.load(path)
    assert again.settings == MEASUREMENT.settings and again.key == MEASUREMENT.key
    assert again.bins == list(WORLD.bins) and again.arms == WORLD.arms
    for first, second in zip(MEASUREMENT.cells, again.cells, strict=True):
        assert_same(first, second)
    assert [item.name for item in path.parent.iterdir()] == ["m.jsonl"]


def test_appending_gives_the_bytes_of_saving(tmp_path: Path) -> None:
    appended(tmp_path / "a.jsonl", MEASUREMENT.cells)
    MEASUREMENT.save(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_run_continues_from_its_whole_cells_after_any_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    appended(path, MEASUREMENT.cells)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for cut in np.linspace(header, len(whole), 25, dtype=int):
        path.write_bytes(whole[:cut])
        kept = measure.open_for_append(path, MEASUREMENT.settings).cells
        assert len(kept) == whole[:cut].count(b"\n") - 1
        for cell in MEASUREMENT.cells[len(kept):]:
            measure.append(path, cell)
        assert path.read_bytes() == whole


def test_a_cell_cut_short_is_left_out_on_loading(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MEASUREMENT.save(path)
    path.write_bytes(path.read_bytes()[:-40])
    assert len(Measurement.load(path).cells) == len(MEASUREMENT.cells) - 1


def test_other_settings_are_refused_by_the_name_of_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    appended(path, MEASUREMENT.cells[:1])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"draws = 8, this run has 12.*another file name"):
        measure.open_for_append(path, MEASUREMENT.settings | {"draws": 12})
    with pytest.raises(ValueError, match="measured with mask = None"):
        measure.open_for_append(path, MEASUREMENT.settings | {"mask": "on"})
    assert path.read_bytes() == before


def test_tuples_and_lists_in_settings_are_the_same_setting(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    as_tuples = MEASUREMENT.settings | {"bins": list(map(tuple, MEASUREMENT.settings["bins"]))}
    measure.open_for_append(path, as_tuples)
    assert measure.open_for_append(path, MEASUREMENT.settings).bins == MEASUREMENT.bins
    assert measure.settings_key(as_tuples) == MEASUREMENT.key


def test_other_files_and_later_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for text in ("", "not json\n", "[]\n", '{"format": "demotion-gate", "version": 1}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a demotion-measurement file"):
            Measurement.load(path)
    path.write_text(json.dumps(MEASUREMENT.header() | {"version": 2}) + "\n")
    with pytest.raises(ValueError, match="reads up to 1: update the pack"):
        Measurement.load(path)


def test_every_setting_changes_the_key() -> None:
    keys = {measure.settings_key(MEASUREMENT.settings | {name: "other"})
            for name in MEASUREMENT.settings}
    assert len(keys | {MEASUREMENT.key}) == len(MEASUREMENT.settings) + 1


def test_pooling_adds_halves_and_parts() -> None:
    cell = MEASUREMENT.cells[0]
    parts = [cell.pooled(part) for part in (0, 1)]
    for whole, first, second in zip(cell.pooled(), *parts, strict=True):
        np.testing.assert_allclose(whole, first + second)


@pytest.mark.parametrize("kind", [Measurement, gap_map.GapMap, gate.Gate])
def test_a_damaged_file_is_named(kind, tmp_path) -> None:
    path = tmp_path / "damaged.json"
    module = sys.modules[kind.__module__]
    path.write_text(json.dumps({"format": module.FORMAT, "version": module.VERSION}) + "\n")
    with pytest.raises(ValueError, match="damaged.json is damaged or incomplete"):
        kind.load(path)
