"""Measurement: the scalars of every (image, bin) cell that estimators use, and their file.

A measurement never holds gradients. Per cell it keeps, for the even and the odd draws apart, the
inner products of the arms' gradient sums and the sums of their per-draw inner products: all that
the debiased cosines, their errors and the noise scales need. The file is JSON lines: a header, then
one line a cell, appended as cells are finished, so that what was measured before an interruption is
kept, and one line a check of the instrument.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "demotion-measurement"
VERSION = 1


@dataclass(frozen=True)
class Cell:
    """The primitives of one image in one sigma bin.

    With A arms, H = 2 half-sets (even draws, odd draws) and G parts of the adapter:

    image     content hash of the picture
    bin       (lo, hi) of sigma
    arms      names of the arms measured here, "src" first; an off-route picture has fewer
    gram      [G, H, A, H, A]  <S_a, S_b> between the half-sets' gradient sums, float64
    products  [G, H, A, A]     sum over the draws of a half of <g_a,d, g_b,d>, float64
    counts    draws in each half
    grids     latent cells (H, W) of each arm
    losses    mean loss of each arm over the draws
    """

    image: str
    bin: tuple[float, float]
    arms: tuple[str, ...]
    gram: np.ndarray
    products: np.ndarray
    counts: tuple[int, int]
    grids: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]

    @property
    def count(self) -> int:
        """Draws D."""
        return sum(self.counts)

    def pooled(self, part: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Gram [A, A] of the sums over all draws, and products [A, A]; one part of the adapter or
        all."""
        gram = self.gram.sum(axis=(1, 3))
        products = self.products.sum(axis=1)
        if part is None:
            return gram.sum(axis=0), products.sum(axis=0)
        return gram[part], products[part]


@dataclass
class Measurement:
    """Settings and cells of one run of the probe.

    settings holds everything that a number depends on: arms, bins, draws, noise, seed, parts,
    adapter, model, images (hash -> name and realised grids), native tier and environment. It is
    plain JSON data. checks holds what was measured of the instrument itself, by name.
    """

    settings: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    checks: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Hash of the settings: names the file, and seeds what is resampled from the
        measurement."""
        return settings_key(self.settings)

    @property
    def bins(self) -> list[tuple[float, float]]:
        return [tuple(edges) for edges in self.settings["bins"]]

    @property
    def arms(self) -> list[str]:
        return list(self.settings["arms"])

    def header(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "settings": self.settings}

    def save(self, path: str | Path) -> None:
        """Write the whole file atomically."""
        lines = [
            json.dumps(self.header()),
            *(json.dumps(_cell_to_json(cell)) for cell in self.cells),
            *(json.dumps(_check_to_json(name, value)) for name, value in self.checks.items()),
        ]
        write_atomically(Path(path), ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read a file; a last line cut short by a killed process is not a cell and is left out.

        Raises ValueError when the file is not a measurement, is damaged, or is of a later version.
        """
        with reading(path) as file:
            lines = file.read_bytes().split(b"\n")
            settings = read_json(file, FORMAT, VERSION, lines[0])["settings"]
            # Every finished line ends in a newline: what follows the last one is never whole.
            entries = [json.loads(line) for line in lines[1:-1]]
            checks = {entry["check"]: entry["value"] for entry in entries if "check" in entry}
            cells = [_cell_from_json(entry) for entry in entries if "check" not in entry]
        return cls(settings, cells, checks)


def settings_key(settings: dict[str, Any]) -> str:
    """16 hex digits naming the settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def open_for_append(path: Path, settings: dict[str, Any]) -> Measurement:
    """Start a measurement file, or continue one: what is there and whole is returned, the rest cut
    off.

    Raises ValueError naming the first difference when the file was made with other settings.
    """
    if not path.exists():
        measurement = Measurement(settings)
        measurement.save(path)
        return measurement
    measurement = Measurement.load(path)
    for name in sorted(settings.keys() | measurement.settings.keys()):
        ours, theirs = settings.get(name), measurement.settings.get(name)
        if json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True):
            raise ValueError(
                f"{path.name} was measured with {name} = {theirs}, this run has {ours}: "
                "use the same settings or another file name"
            )
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return measurement


def append(path: Path, cell: Cell) -> None:
    """Add one finished cell to the file, in one write, and flush it to the disk."""
    _append_line(path, _cell_to_json(cell))


def append_check(path: Path, name: str, value: Any) -> None:
    """Add what was measured of the instrument itself, as plain JSON data."""
    _append_line(path, _check_to_json(name, value))


def _append_line(path: Path, data: dict[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(json.dumps(data).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target and rename, so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


def read_json(path: Path, name: str, version: int, text: bytes | None = None) -> dict[str, Any]:
    """The object in a file (or in its text) of this format, of this version or an earlier one.

    Raises ValueError when it is none, or is of a later version.
    """
    try:
        data = json.loads(path.read_bytes() if text is None else text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("format") != name:
        raise ValueError(f"{path.name} is not a {name} file")
    if data["version"] > version:
        raise ValueError(
            f"{path.name} is a {name} file of version {data['version']}; "
            f"this pack reads up to {version}: update the pack"
        )
    return data


@contextmanager
def reading(path: str | Path) -> Iterator[Path]:
    """Turn what a damaged file makes fail into a ValueError that names the file."""
    path = Path(path)
    try:
        yield path
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path.name} is damaged or incomplete ({error}): make it again"
        ) from error


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    data = asdict(cell)
    return data | {"gram": cell.gram.tolist(), "products": cell.products.tolist()}


def _check_to_json(name: str, value: Any) -> dict[str, Any]:
    return {"check": name, "value": value}


def _cell_from_json(data: dict[str, Any]) -> Cell:
    return Cell(
        image=data["image"],
        bin=tuple(data["bin"]),
        arms=tuple(data["arms"]),
        gram=np.array(data["gram"], dtype=np.float64),
        products=np.array(data["products"], dtype=np.float64),
        counts=tuple(data["counts"]),
        grids=tuple(map(tuple, data["grids"])),
        losses=tuple(data["losses"]),
    )
