"""Measurement files: exact, appendable, safe against interruption and mixed settings."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic

from demotion import gap_map, gate, measure
from demotion.measure import Cell, Measurement

BUCKETS = 16
WORLD = synthetic.World({"null": 0.0, "demote:192": 0.2}, images=2)
MEASUREMENT = synthetic.measure(WORLD)


def with_sketches(measurement: Measurement) -> Measurement:
    """The same cells with random sketches of four blocks."""
    rng = np.random.default_rng(0)
    cells = []
    for cell in measurement.cells:
        arms = len(cell.arms)
        cells.append(dataclasses.replace(
            cell, sketches=rng.standard_normal((4, arms, BUCKETS)).astype(np.float32),
            block_products=rng.standard_normal((4, arms, arms)), block_counts=(2, 2, 2, 2)))
    return Measurement(measurement.settings | {"sketch": BUCKETS}, cells)


SKETCHED = with_sketches(MEASUREMENT)


def assert_same(first: Cell, second: Cell) -> None:
    assert (first.image, first.bin, first.arms, first.counts, first.grids, first.losses) == (
        second.image, second.bin, second.arms, second.counts, second.grids, second.losses)
    np.testing.assert_array_equal(first.gram, second.gram)
    np.testing.assert_array_equal(first.products, second.products)
    for name in ("sketches", "block_products", "block_counts"):
        one, other = getattr(first, name), getattr(second, name)
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


def appended(path: Path, cells: list[Cell], settings=MEASUREMENT.settings) -> None:
    measure.open_for_append(path, settings)
    for cell in cells:
        measure.append(path, cell)


def bytes_of(path: Path) -> tuple[bytes, bytes]:
    """The lines and the sketches of a file."""
    return path.read_bytes(), measure.sketch_path(path).read_bytes()


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


def test_sketches_are_kept_exactly_beside_the_lines(tmp_path: Path) -> None:
    appended(tmp_path / "a.jsonl", SKETCHED.cells, SKETCHED.settings)
    SKETCHED.save(tmp_path / "b.jsonl")
    assert bytes_of(tmp_path / "a.jsonl") == bytes_of(tmp_path / "b.jsonl")
    again = Measurement.load(tmp_path / "a.jsonl")
    for first, second in zip(SKETCHED.cells, again.cells, strict=True):
        assert_same(first, second)
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "a.jsonl", "a.sketches", "b.jsonl", "b.sketches"]
    assert not measure.sketch_path(tmp_path / "none.jsonl").exists()


def test_a_loaded_sketch_stays_on_the_disk(tmp_path: Path) -> None:
    SKETCHED.save(tmp_path / "m.jsonl")
    for cell in Measurement.load(tmp_path / "m.jsonl").cells:
        owner = cell.sketches
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert isinstance(owner, np.memmap)


@pytest.mark.parametrize("which", ["lines", "sketches"])
def test_a_sketched_run_continues_to_the_same_bytes_after_any_cut_of_either_file(
    which: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.jsonl"
    appended(path, SKETCHED.cells[:-1], SKETCHED.settings)
    measure.append_check(path, "precision", [1.0])
    measure.append(path, SKETCHED.cells[-1])
    lines, sketches = bytes_of(path)
    victim = path if which == "lines" else measure.sketch_path(path)
    whole, header = victim.read_bytes(), lines.index(b"\n") + 1
    start = header if which == "lines" else 0
    for cut in np.linspace(start, len(whole), 40, dtype=int):
        path.write_bytes(lines)
        measure.sketch_path(path).write_bytes(sketches)
        victim.write_bytes(whole[:cut])
        assert Measurement.load(path).cells == [] or cut > start
        kept = measure.open_for_append(path, SKETCHED.settings)
        for first, second in zip(SKETCHED.cells, kept.cells):
            assert_same(first, second)
        for cell in SKETCHED.cells[len(kept.cells):-1]:
            measure.append(path, cell)
        if "precision" not in kept.checks:
            measure.append_check(path, "precision", [1.0])
        if len(kept.cells) < len(SKETCHED.cells):
            measure.append(path, SKETCHED.cells[-1])
        assert bytes_of(path) == (lines, sketches)


def test_the_size_of_a_file_is_known_before(tmp_path: Path) -> None:
    SKETCHED.save(tmp_path / "m.jsonl")
    arms = len(MEASUREMENT.arms)
    stated = len(SKETCHED.cells) * measure.cell_bytes(arms, 2, 4, BUCKETS)
    assert sum(map(len, bytes_of(tmp_path / "m.jsonl"))) == pytest.approx(stated, rel=0.15)


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
