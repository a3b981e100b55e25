"""How alike the weight changes Delta W of LoRAs are: cosine and length, in float64.

Everything is a sum over modules of the Frobenius products <dW1, dW2>, ||dW1||^2 and ||dW2||^2, so
that a block, a kind of module and the whole adapter are read from the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .adapter import Factors, Weights
from .measure import read_json, reading, write_atomically

FORMAT = "demotion-lora-comparison"
VERSION = 1
# What each of the others is to the first: the one asked about, and two references.
FIRST, SECOND, TWIN, OTHER_SEED = "first", "second", "twin", "other seed"
# A block ends with the first number of a name that is a part of its own.
BLOCK = re.compile(r"(.*?[._]\d+)[._](.+)")


@dataclass(frozen=True)
class Overlap:
    """Products of two weight changes over some modules: dot = <dW1, dW2>, first = ||dW1||^2,
    second = ||dW2||^2 (Frobenius). A module that an adapter lacks has dW = 0."""

    dot: float
    first: float
    second: float

    @property
    def cosine(self) -> float:
        """NaN where either change is 0."""
        length = math.sqrt(self.first) * math.sqrt(self.second)
        return self.dot / length if length else math.nan

    @property
    def norm_ratio(self) -> float:
        """||dW2|| / ||dW1||; NaN where dW1 is 0."""
        return math.sqrt(self.second / self.first) if self.first else math.nan


@dataclass(frozen=True)
class Comparison:
    """LoRAs beside a first one.

    loras     role -> name, kind, rank, fingerprint and modules of the file. Roles are FIRST,
              SECOND and, where given, TWIN (the same training run again) and OTHER_SEED
    overlaps  role -> module -> its overlap with the first, over the modules that any of the LoRAs
              has; for every role but FIRST
    """

    loras: dict[str, dict[str, Any]]
    overlaps: dict[str, dict[str, Overlap]]

    def whole(self, role: str) -> Overlap:
        """Over all modules."""
        return total(self.overlaps[role].values())

    def blocks(self, role: str) -> dict[str, Overlap]:
        """By block, as "double_blocks.0", in natural order."""
        return _grouped(self.overlaps[role], block_of)

    def parts(self, role: str) -> dict[str, Overlap]:
        """By what a module is in its block, as "img_attn.qkv"."""
        return _grouped(self.overlaps[role], part_of)

    def lacking(self, role: str, other: str) -> list[str]:
        """Modules of another LoRA that this one does not have."""
        return sorted(set(self.loras[other]["modules"]) - set(self.loras[role]["modules"]))

    def save(self, path: str | Path) -> None:
        """Write the comparison as JSON, atomically."""
        data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        write_atomically(Path(path), (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read a comparison. Raises ValueError when the file is none, damaged or of a later
        version."""
        with reading(path) as file:
            data = read_json(file, FORMAT, VERSION)
            overlaps = {
                role: {module: Overlap(**overlap) for module, overlap in found.items()}
                for role, found in data["overlaps"].items()
            }
            return cls(data["loras"], overlaps)


def compare(
    names: Mapping[str, str],
    weights: Mapping[str, Weights],
    base: Callable[[str], torch.Tensor],
    tick: Callable[[], object],
) -> Comparison:
    """Compare each LoRA with the one whose role is FIRST.

    names    role -> what messages and tables call the file
    weights  role -> adapter; modules are told apart by name
    base     module -> weight [out, in] that it changes; asked where a DoRA is
    tick     called after each module of each pair

    Two LoRAs are compared in rank space; other kinds by Delta W itself, a module at a time. The
    Delta W of a DoRA is the whole change of the weight, magnitude included.
    Raises ValueError for adapters of different weights, and for one that changes nothing or is not
    finite.
    """
    _check_shapes(names, weights)
    first, modules = weights[FIRST].modules, modules_of(weights.values())
    overlaps = {role: {} for role in weights if role != FIRST}
    for role, found in overlaps.items():
        for name in modules:
            other = weights[role].modules.get(name)
            found[name] = _overlap(first.get(name), other, partial(base, name))
            tick()
        whole = total(found.values())
        _check_square(names[FIRST], whole.first)
        _check_square(names[role], whole.second)
    loras = {
        role: {
            "name": names[role],
            "kind": held.kind,
            "rank": held.rank,
            "fingerprint": held.fingerprint,
            "modules": sorted(held.modules),
        }
        for role, held in weights.items()
    }
    return Comparison(loras, overlaps)


def _check_shapes(names: Mapping[str, str], weights: Mapping[str, Weights]) -> None:
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for role, held in weights.items():
        for module, factors in held.modules.items():
            name, shape = known.setdefault(module, (names[role], factors.shape))
            if factors.shape != shape:
                here, there = ("x".join(map(str, found)) for found in (factors.shape, shape))
                raise ValueError(
                    f"{module} is {there} in {name} and {here} in {names[role]}: choose LoRAs of "
                    "one model"
                )


def _check_square(name: str, square: float) -> None:
    if not 0 < square < math.inf:
        raise ValueError(
            f"{name} changes nothing or is not finite (||Delta W||^2 = {square:g}): choose a LoRA "
            "that was trained"
        )


def modules_of(weights: Iterable[Weights]) -> list[str]:
    """Names of the modules that any of several adapters has."""
    return sorted(set().union(*(held.modules for held in weights)))


def total(overlaps: Iterable[Overlap]) -> Overlap:
    """Overlap over the modules of all of these."""
    return Overlap(*map(sum, zip(*map(dataclasses.astuple, overlaps))))


def block_of(module: str) -> str:
    """Block of a module: "double_blocks.0.img_attn.qkv" -> "double_blocks.0". What is in no
    numbered block is one of its own."""
    found = BLOCK.fullmatch(module)
    return found[1] if found else module


def part_of(module: str) -> str:
    """What a module is in its block: "double_blocks.0.img_attn.qkv" -> "img_attn.qkv"."""
    found = BLOCK.fullmatch(module)
    return found[2] if found else module


def delta(factors: Factors, base: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Change of the weight [out, in], float64; for DoRA dora_scale (W + Delta W)/||W|| - W, with
    the norm of each row of W, as ComfyUI applies it."""
    tensors = {name: tensor.double() for name, tensor in factors.tensors.items()}
    change = Factors(tensors, factors.alpha).delta()
    if factors.kind != "DoRA":
        return change
    weight = base().double()
    rows = torch.linalg.norm(weight, dim=1, keepdim=True)
    return tensors["dora_scale"] / rows * (weight + change) - weight


def _overlap(
    first: Factors | None, second: Factors | None, base: Callable[[], torch.Tensor]
) -> Overlap:
    if first is None or second is None:
        alone = first or second
        square = _overlap(alone, alone, base).first if alone else 0.0
        return Overlap(0.0, square if first else 0.0, square if second else 0.0)
    if first.kind == second.kind == "LoRA":
        one, two, product = _products(first), _products(second), _rank_product
    else:
        one, two, product = delta(first, base), delta(second, base), _dense_product
    return Overlap(product(one, two), product(one, one), product(two, two))


def _products(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """scale B [out, rank] and A [rank, in] of a LoRA, float64."""
    up, down = factors.tensors["lora_B.weight"], factors.tensors["lora_A.weight"]
    return factors.scale * up.double(), down.double()


def _rank_product(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """<B1 A1, B2 A2> = trace((B2' B1)(A1 A2')): nothing of the weight's size is formed."""
    (up_1, down_1), (up_2, down_2) = first, second
    return float(((up_2.T @ up_1) * (down_2 @ down_1.T)).sum())


def _dense_product(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.vdot(first.flatten(), second.flatten()))


def _grouped(overlaps: Mapping[str, Overlap], group_of: Callable[[str], str]) -> dict[str, Overlap]:
    groups: dict[str, list[Overlap]] = {}
    for module in sorted(overlaps, key=_natural):
        groups.setdefault(group_of(module), []).append(overlaps[module])
    return {name: total(groups[name]) for name in sorted(groups, key=_natural)}


def _natural(name: str) -> list[str | int]:
    """Sorts "blocks.2" before "blocks.10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def summary(comparison: Comparison) -> str:
    """The comparison as a plain text table."""
    first = comparison.loras[FIRST]
    names = {role: comparison.loras[role]["name"] for role in comparison.overlaps}
    width = max(map(len, names.values()))
    lines = [
        f"Delta W against {first['name']} ({described(first)}), float64",
        "",
        f"{'':10}  {'file':{width}}  {'cosine':>8}  {'norm ratio':>10}",
    ]
    for role, name in names.items():
        whole = comparison.whole(role)
        lines.append(
            f"{role:10}  {name:{width}}  {whole.cosine:8.4f}  {whole.norm_ratio:10.4f}"
            f"  {described(comparison.loras[role])}"
        )
    for title, grouped in (("block", comparison.blocks), ("part", comparison.parts)):
        lines += ["", *_rows(title, {role: grouped(role) for role in names})]
    return "\n".join([*lines, *_lacking(comparison)])


def described(lora: Mapping[str, Any]) -> str:
    """Kind, rank and size of a LoRA in words."""
    rank = "" if lora["rank"] is None else f", rank {lora['rank']}"
    return f"{lora['kind']}{rank}, {len(lora['modules'])} modules"


def _rows(title: str, columns: Mapping[str, Mapping[str, Overlap]]) -> list[str]:
    """Cosine of each role, and norm ratio of the second, by group; - where an adapter has
    nothing."""
    values = {}
    for role, groups in columns.items():
        values[role] = [overlap.cosine for overlap in groups.values()]
        if role == SECOND:
            values["norm ratio"] = [overlap.norm_ratio for overlap in groups.values()]
    width = max(map(len, [title, *columns[SECOND]]))
    lines = [f"{title:{width}}  " + "  ".join(f"{column:>10}" for column in values)]
    for group, *row in zip(columns[SECOND], *values.values()):
        shown = ("-" if math.isnan(value) else f"{value:.4f}" for value in row)
        lines.append(f"{group:{width}}  " + "  ".join(f"{value:>10}" for value in shown))
    return lines


def _lacking(comparison: Comparison) -> list[str]:
    """Modules that only one of two LoRAs has, in words."""
    lines = []
    for role in comparison.overlaps:
        for owner, other in ((FIRST, role), (role, FIRST)):
            only = comparison.lacking(other, owner)
            if only:
                having, missing = (comparison.loras[side]["name"] for side in (owner, other))
                more = f" and {len(only) - 1} more modules" * (len(only) > 1)
                lines.append(f"Only {having} has {only[0]}{more}, counted as 0 in {missing}.")
    return ["", *lines] if lines else []
