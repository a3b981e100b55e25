"""Measurement: the scalars of every (image, bin) cell that estimators use, and their file.

A measurement never holds gradients. Per cell it keeps, for the even and the odd draws apart, the
inner products of the arms' gradient sums and the sums of their per-draw inner products: all that
the debiased cosines, their errors and the noise scales need; and, where inner products between
pictures are wanted, count-sketches of the sums. The file is JSON lines: a header, then one line a
cell, appended as cells are finished, so that what was measured before an interruption is kept, and
one line a check of the instrument. Sketches lie in a binary file beside it (`sketch_path`), float32
little-endian, cell after cell in the order of the lines; a cell's bytes are on the disk before its
line is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "demotion-measurement"
VERSION = 1
FLOAT32 = 4
# Characters of a float64 in JSON, with its share of brackets and commas.
DIGITS = 23
# Differences that a message lists.
TOLD = 4
# What a line always has of a cell.
LINE = ("image", "bin", "arms", "gram", "products", "counts", "grids", "losses")


@dataclass(frozen=True)
class Cell:
    """The primitives of one image in one sigma bin.

    With A arms, H = 2 half-sets (even draws, odd draws), G parts of the adapter, and K blocks of
    draws (draw d is in block d mod K) sketched to W buckets:

    image           content hash of the picture
    bin             (lo, hi) of sigma
    arms            names of the arms measured here, "src" first; an off-route picture has fewer
    gram            [G, H, A, H, A]  <S_a, S_b> between the half-sets' gradient sums, float64
    products        [G, H, A, A]     sum over the draws of a half of <g_a,d, g_b,d>, float64
    counts          draws in each half
    grids           latent cells (H, W) of each arm
    losses          mean loss of each arm over the draws
    sketches        [K, A, W]  count-sketch of each block's gradient sum, float32; like the next two
                    None without sketches
    block_products  [K, A, A]  sum over the draws of a block of <g_a,d, g_b,d>, float64
    block_counts    draws in each block
    """

    image: str
    bin: tuple[float, float]
    arms: tuple[str, ...]
    gram: np.ndarray
    products: np.ndarray
    counts: tuple[int, int]
    grids: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]
    sketches: np.ndarray | None = None
    block_products: np.ndarray | None = None
    block_counts: tuple[int, ...] | None = None

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
        """Write the whole file atomically, after that of the sketches."""
        if any(cell.sketches is not None for cell in self.cells):
            _write_pieces(sketch_path(Path(path)), map(_sketch_bytes, self.cells))
        lines = [
            json.dumps(self.header()),
            *(json.dumps(_cell_to_json(cell)) for cell in self.cells),
            *(json.dumps(_check_to_json(name, value)) for name, value in self.checks.items()),
        ]
        write_atomically(Path(path), ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read a file; what a killed process left unfinished at its end is left out. Sketches stay
        on the disk until they are used.

        Raises ValueError when the file is not a measurement, is damaged, or is of a later version.
        """
        with reading(path) as file:
            return _measurement(file, _read_whole(file))


@dataclass(frozen=True)
class _Whole:
    """What of a file is whole: settings, entries (cells and checks), and the bytes that they and
    their sketches take from the start of either file."""

    settings: dict[str, Any]
    entries: list[dict[str, Any]]
    line_bytes: int
    sketch_bytes: int


def _read_whole(path: Path) -> _Whole:
    header, *lines = path.read_bytes().split(b"\n")
    settings = read_json(path, FORMAT, VERSION, header)["settings"]
    sketched = sketch_path(path)
    available = sketched.stat().st_size if sketched.exists() else 0
    entries, line_bytes, sketch_bytes = [], len(header) + 1, 0
    # Every finished line ends in a newline: what follows the last one is never whole.
    for line in lines[:-1]:
        entry = json.loads(line)
        if "check" not in entry:
            size = FLOAT32 * math.prod(_sketch_shape(entry, settings))
            if sketch_bytes + size > available:
                break
            sketch_bytes += size
        entries.append(entry)
        line_bytes += len(line) + 1
    return _Whole(settings, entries, line_bytes, sketch_bytes)


def _measurement(path: Path, whole: _Whole) -> Measurement:
    stored = np.empty(0, "<f4")
    if whole.sketch_bytes:
        size = whole.sketch_bytes // FLOAT32
        stored = np.memmap(sketch_path(path), "<f4", "r", shape=(size,))
    measurement, start = Measurement(whole.settings), 0
    for entry in whole.entries:
        if "check" in entry:
            measurement.checks[entry["check"]] = entry["value"]
            continue
        shape = _sketch_shape(entry, whole.settings)
        end = start + math.prod(shape)
        measurement.cells.append(_cell_from_json(entry, stored[start:end].reshape(shape)))
        start = end
    return measurement


def sketch_path(path: Path) -> Path:
    """Where the sketches of a measurement file lie."""
    return path.with_suffix(".sketches")


def cell_bytes(arms: int, parts: int, blocks: int, buckets: int) -> int:
    """About how many bytes a cell takes on the disk, in both files: exact for sketches, and some 20
    characters for each number in text."""
    numbers = 6 * parts * arms**2 + blocks * arms**2
    return DIGITS * numbers + 300 + FLOAT32 * blocks * arms * buckets


def settings_key(settings: dict[str, Any]) -> str:
    """16 hex digits naming the settings."""
    text = json.dumps(_nameless(settings), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _nameless(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the pictures' names, which no number depends on."""
    images = {
        image: {name: value for name, value in entry.items() if name != "name"}
        for image, entry in settings.get("images", {}).items()
    }
    return settings | {"images": images}


def differences(ours: Any, theirs: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Where plain JSON data differ, as (dotted name, ours, theirs); what one side lacks is None."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for key in sorted(ours.keys() | theirs.keys())
            for found in differences(ours.get(key), theirs.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if json.dumps(ours) == json.dumps(theirs) else [(where, ours, theirs)]


def told(found: list[tuple[str, Any, Any]], owner: str) -> str:
    """Differences in words: what is theirs, then what the owner has."""
    shown = [f"{where} = {theirs}, {owner} has {ours}" for where, ours, theirs in found[:TOLD]]
    more = [f"{len(found) - TOLD} more"] if len(found) > TOLD else []
    return "; ".join(shown + more)


def open_for_append(path: Path, settings: dict[str, Any]) -> Measurement:
    """Start a measurement file, or continue one: what is there and whole is returned, the rest cut
    off.

    Raises ValueError naming the differences when the file was made with other settings.
    """
    if not path.exists():
        measurement = Measurement(settings)
        measurement.save(path)
        return measurement
    with reading(path):
        whole = _read_whole(path)
    found = differences(_nameless(settings), _nameless(whole.settings))
    if found:
        raise ValueError(
            f"{path.name} was measured with {told(found, 'this run')}: "
            "use the same settings or another file name"
        )
    os.truncate(path, whole.line_bytes)
    if sketch_path(path).exists():
        os.truncate(sketch_path(path), whole.sketch_bytes)
    with reading(path):
        return _measurement(path, whole)


def append(path: Path, cell: Cell) -> None:
    """Add one finished cell to the file, its sketches first, and flush each to the disk."""
    if cell.sketches is not None:
        _append_bytes(sketch_path(path), _sketch_bytes(cell))
    _append_line(path, _cell_to_json(cell))


def append_check(path: Path, name: str, value: Any) -> None:
    """Add what was measured of the instrument itself, as plain JSON data."""
    _append_line(path, _check_to_json(name, value))


def _append_line(path: Path, data: dict[str, Any]) -> None:
    _append_bytes(path, json.dumps(data).encode() + b"\n")


def _append_bytes(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target and rename, so that a reader sees the old file or the new one."""
    _write_pieces(path, [data])


def _write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.writelines(pieces)
            file.flush()
            # Before the name is, so that a power cut leaves the one whole file or the other.
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


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
    data = {name: getattr(cell, name) for name in LINE}
    data |= {"gram": cell.gram.tolist(), "products": cell.products.tolist()}
    if cell.sketches is not None:
        data["block_products"] = cell.block_products.tolist()
        data["block_counts"] = cell.block_counts
    return data


def _sketch_bytes(cell: Cell) -> bytes:
    return cell.sketches.astype("<f4").tobytes()


def _sketch_shape(entry: dict[str, Any], settings: dict[str, Any]) -> tuple[int, int, int]:
    """[K, A, W] of the sketches that belong to a line."""
    return len(entry.get("block_counts", [])), len(entry["arms"]), settings.get("sketch", 0)


def _check_to_json(name: str, value: Any) -> dict[str, Any]:
    return {"check": name, "value": value}


def _cell_from_json(data: dict[str, Any], sketches: np.ndarray) -> Cell:
    sketched = "block_counts" in data
    return Cell(
        image=data["image"],
        bin=tuple(data["bin"]),
        arms=tuple(data["arms"]),
        gram=np.array(data["gram"], dtype=np.float64),
        products=np.array(data["products"], dtype=np.float64),
        counts=tuple(data["counts"]),
        grids=tuple(map(tuple, data["grids"])),
        losses=tuple(data["losses"]),
        sketches=sketches if sketched else None,
        block_products=np.array(data["block_products"], dtype=np.float64) if sketched else None,
        block_counts=tuple(data["block_counts"]) if sketched else None,
    )
