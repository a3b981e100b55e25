"""Measurements of different images, made by several machines or runs, as one measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import draws
from .measure import Cell, Measurement, differences, told


def merge(measurements: Mapping[str, Measurement]) -> Measurement:
    """The union of measurements, each under the name that messages give it.

    What a number depends on must be the same in all: every setting but the list of images and, of
    an image that several have, everything but its name. A cell that several have must be the same
    in each. Of checks, lists of what was measured are joined and all else must agree. Images come
    in the order of their hashes. So the gaps of the result are those of one run over all images.
    Runs of several looks, which stop by what they have seen, can be merged over the same images
    only.

    Raises ValueError naming the differences.
    """
    if not measurements:
        raise ValueError("there is no measurement to merge: give at least one")
    base, start = next(iter(measurements.items()))
    images: dict[str, dict[str, Any]] = {}
    cells: dict[tuple[str, tuple[float, float]], Cell] = {}
    checks: dict[str, Any] = {}
    for name, one in measurements.items():
        found = differences(_but("images", start.settings), _but("images", one.settings))
        same_images = one.settings["images"].keys() == start.settings["images"].keys()
        if start.settings.get("looks", 1) > 1 and not same_images:
            raise ValueError(
                f"{base} and {name} stop by planned looks at different images, and together they "
                "are no planned look: measure ranges of images with looks = 1"
            )
        for image, entry in one.settings["images"].items():
            known = images.setdefault(image, entry)
            found += differences(_but("name", known), _but("name", entry), f"image {image}")
        if found:
            raise ValueError(
                f"{name} was measured with {told(found, base)}: only measurements of equal "
                "settings can be merged"
            )
        for cell in one.cells:
            known = cells.setdefault((cell.image, cell.bin), cell)
            if not _equal(known, cell):
                raise ValueError(
                    f"{name} has other numbers than the rest for image {cell.image} in bin "
                    f"{draws.bin_text(cell.bin)}: leave one of the two measurements out"
                )
        for check, value in one.checks.items():
            checks[check] = _joined(checks.get(check, value), value, f"check {check}", name)
    settings = start.settings | {"images": dict(sorted(images.items()))}
    return Measurement(settings, [cells[key] for key in sorted(cells)], checks)


def _joined(known: Any, new: Any, what: str, name: str) -> Any:
    """One check from two."""
    if known == new:
        return known
    if isinstance(known, list) and isinstance(new, list):
        return known + new
    if isinstance(known, dict) and isinstance(new, dict) and known.keys() == new.keys():
        return {key: _joined(known[key], new[key], f"{what}.{key}", name) for key in known}
    raise ValueError(
        f"{name} has {what} = {new}, the rest {known}: leave one of the measurements out"
    )


def _equal(first: Cell, second: Cell) -> bool:
    return all(
        np.array_equal(getattr(first, field.name), getattr(second, field.name))
        for field in dataclasses.fields(Cell)
    )


def _but(key: str, data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != key}
