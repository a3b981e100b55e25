"""Merging measurements: the map of one run, whatever the pieces; nothing unlike is mixed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from demotion import gap_map, measure, merge
from demotion.analyse import analyse

WORLD = synthetic.World({"null": 0.0, "demote:192": 0.2, "demote:128": 0.4}, images=12)


def one_run() -> measure.Measurement:
    """A measurement of twelve images, with the settings that a probe writes."""
    made = synthetic.measure(WORLD)
    names = sorted({cell.image for cell in made.cells})
    made.settings |= {
        "images": {
            image: {"name": f"{image}.png", "mask": None, "conditioning": "c0", "grids": {}}
            for image in names
        },
        "noise": "shared",
        "vae": "vae",
        "model": {"family": "Flux", "fingerprint": "synthetic"},
        "adapter": {"kind": "fresh", "fingerprint": "adapter"},
        "environment": {
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "attention": "attention_pytorch",
        },
    }
    return made


def piece(whole: measure.Measurement, images: slice) -> measure.Measurement:
    """What a machine measures that is given these of the images only."""
    kept = dict(list(whole.settings["images"].items())[images])
    cells = [cell for cell in whole.cells if cell.image in kept]
    return measure.Measurement(whole.settings | {"images": kept}, cells)


WHOLE = one_run()
PIECES = {
    "a.jsonl": piece(WHOLE, slice(0, 5)),
    "b.jsonl": piece(WHOLE, slice(5, 6)),
    "c.jsonl": piece(WHOLE, slice(6, 12)),
}


def changed(path: str, value: Any) -> measure.Measurement:
    """Piece c with one setting, named by dots, changed."""
    name, _, inside = path.partition(".")
    settings = PIECES["c.jsonl"].settings
    new = settings[name] | {inside: value} if inside else value
    return measure.Measurement(settings | {name: new}, PIECES["c.jsonl"].cells)


def test_pieces_in_any_order_give_the_map_of_one_run_to_the_last_byte() -> None:
    expected = gap_map.gap_map(WHOLE).to_json()
    for order in itertools.permutations(PIECES):
        merged = merge.merge({name: PIECES[name] for name in order})
        assert merged.settings == WHOLE.settings and merged.key == WHOLE.key
        assert gap_map.gap_map(merged).to_json() == expected
    assert gap_map.gap_map(PIECES["c.jsonl"]).to_json() != expected


def test_merging_step_by_step_or_again_changes_nothing(tmp_path: Path) -> None:
    a, b, c = PIECES.values()
    merge.merge({"a": a, "b": b, "c": c}).save(tmp_path / "at once")
    stepwise = merge.merge({"c": c, "ab": merge.merge({"a": a, "b": b})})
    merge.merge({"all": stepwise, "b": b}).save(tmp_path / "in steps")
    assert (tmp_path / "at once").read_bytes() == (tmp_path / "in steps").read_bytes()
    assert len(measure.Measurement.load(tmp_path / "in steps").cells) == len(WHOLE.cells)
    assert len(a.cells) == 5 * len(WORLD.bins)


def test_files_analysed_together_can_be_kept_as_one(tmp_path: Path) -> None:
    whole = synthetic.measure(WORLD, buckets=64)
    whole.settings |= WHOLE.settings | {"sketch": 64}
    files = [tmp_path / f"{index}.jsonl" for index in range(2)]
    for path, images in zip(files, (slice(0, 5), slice(5, None)), strict=True):
        piece(whole, images).save(path)
    together, begin = tmp_path / "together.jsonl", tmp_path / "map"
    words, written = analyse(files, begin, estimand="population", merged=together)
    assert written[0] == together and all(path.exists() for path in written)
    assert len(measure.Measurement.load(together).cells) == len(whole.cells)
    once = [path.read_bytes() for path in written]
    # It is a measurement as any other: analysed again it gives the same words and map.
    assert analyse([together], begin, estimand="population") == (words, written[1:])
    assert [path.read_bytes() for path in written] == once
    assert analyse(files[:1], begin, merged=tmp_path / "copy.jsonl")[1][0].read_bytes() == (
        files[0].read_bytes()
    )


@pytest.mark.parametrize(
    ("where", "value", "ours"),
    [
        ("model.fingerprint", "other", "synthetic"),
        ("adapter.fingerprint", "other", "adapter"),
        ("vae", "other", "vae"),
        ("seed", 1, "0"),
        ("draws", 12, "8"),
        ("bins", [[0.0, 0.5]], r"\[\[0.0, 0.25"),
        ("arms", ["src", "null"], r"\['src'"),
        ("noise", "independent", "shared"),
        ("environment.dtype", "bfloat16", "float32"),
        ("environment.device", "NVIDIA", "cpu"),
        ("environment.attention", "attention_sub_quad", "attention_pytorch"),
        ("environment.threads", 2, "1"),
        ("sketch", 16384, "None"),
    ],
)
def test_a_clash_of_settings_is_refused_by_its_name(where: str, value: Any, ours: str) -> None:
    said = rf"c.jsonl was measured with {where} = .*, a.jsonl has {ours}.*: only"
    with pytest.raises(ValueError, match=said):
        merge.merge(PIECES | {"c.jsonl": changed(where, value)})


def test_an_image_in_two_pieces_counts_once_and_its_name_does_not_matter() -> None:
    images = PIECES["a.jsonl"].settings["images"]
    first = next(iter(images))
    renamed = images | {first: images[first] | {"name": "picture 1"}}
    again = measure.Measurement(WHOLE.settings | {"images": renamed}, PIECES["a.jsonl"].cells)
    merged = merge.merge(PIECES | {"again": again})
    assert gap_map.gap_map(merged).to_json() == gap_map.gap_map(WHOLE).to_json()


def test_an_image_with_another_mask_text_or_other_numbers_is_refused() -> None:
    a = PIECES["a.jsonl"]
    for name, value in (("mask", "m1"), ("conditioning", "c1"), ("grids", {"demote:192": [8, 8]})):
        images = {key: entry | {name: value} for key, entry in a.settings["images"].items()}
        other = measure.Measurement(a.settings | {"images": images}, a.cells)
        with pytest.raises(ValueError, match=rf"b was measured with image {'0' * 16}\.{name}"):
            merge.merge({"a": a, "b": other})
    moved = replace(a.cells[-1], losses=(2.0, *a.cells[-1].losses[1:]))
    other = measure.Measurement(a.settings, [*a.cells[:-1], moved])
    with pytest.raises(ValueError, match=f"image {moved.image} in bin 0.75-1"):
        merge.merge({"a": a, "b": other})


def test_an_image_half_measured_here_and_half_there_is_whole() -> None:
    a = PIECES["a.jsonl"]
    halves = {str(half): measure.Measurement(a.settings, a.cells[half::2]) for half in (1, 0)}
    merged = merge.merge(halves)
    assert [(cell.image, cell.bin) for cell in merged.cells] == [
        (cell.image, cell.bin) for cell in a.cells
    ]


def test_of_checks_lists_are_joined_and_all_else_must_agree() -> None:
    def checked(name: str, cosines: list[float], dtype: str = "bfloat16") -> measure.Measurement:
        checks = {"precision": {"dtype": dtype, "cosines": cosines}}
        return replace(PIECES[name], checks=checks)

    a, b = checked("a.jsonl", [0.9, 0.8]), checked("b.jsonl", [0.7])
    c = replace(PIECES["c.jsonl"], checks={"null": 1})
    merged = merge.merge({"a": a, "a again": a, "b": b, "c": c})
    assert merged.checks == {
        "precision": {"dtype": "bfloat16", "cosines": [0.9, 0.8, 0.7]},
        "null": 1,
    }
    with pytest.raises(ValueError, match=r"b has check precision\.dtype = float16, the rest bfl"):
        merge.merge({"a": a, "b": checked("b.jsonl", [0.7], "float16")})


def test_ranges_that_each_stop_by_their_own_looks_are_refused() -> None:
    a, b = (
        measure.Measurement(piece.settings | {"looks": 2}, piece.cells, {"look 1": [name]})
        for name, piece in PIECES.items()
        if name != "c.jsonl"
    )
    with pytest.raises(ValueError, match="a and b stop by planned looks at different images"):
        merge.merge({"a": a, "b": b})
    assert merge.merge({"a": a, "again": a}).checks == a.checks


def test_nothing_to_merge_is_said() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        merge.merge({})


def test_differences_are_named_by_their_places() -> None:
    one = {"a": {"b": [1, 2], "c": None}, "d": 1}
    assert measure.differences(one, one) == []
    assert measure.differences({"b": (1, 2)}, {"b": [1, 2]}) == []
    assert measure.differences(one, {"a": 3, "d": 1}) == [("a", one["a"], 3)]
    both = measure.differences(one, {"a": {"b": [2, 1]}, "d": 1, "e": 0})
    assert both == [("a.b", [1, 2], [2, 1]), ("e", None, 0)]
    assert (
        measure.told(both, "this run")
        == "a.b = [2, 1], this run has [1, 2]; e = 0, this run has None"
    )
    many = measure.differences({}, dict.fromkeys("abcdef", 1))
    assert measure.told(many, "b").endswith("d = 1, b has None; 2 more")
