"""A study: what a gate saves, and how near to native training it stays.

The same set is trained with the same settings under several arms: natively, natively again (what
ordinary kernels alone change), natively from another seed (what the seed changes), through the
gate, through it in the last half of the run only, and always demoted.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from .gate import BY_MASS, Gate, by_hand
from .measure import read_json, reading, write_atomically
from .train import History

FORMAT = "demotion-study"
VERSION = 1
NATIVE, TWIN, OTHER_SEED = "native", "twin", "other seed"
LATE = "late:0.5"
TIMES = (
    "Times: the arms ran one after another in this order; a step counts with the median of its "
    "arm's steps that were demoted alike, the first left out. Times of arms that ran under other "
    "load do not compare."
)


@dataclass(frozen=True)
class Arm:
    """A training run of a study. gate is None where all samples train native."""

    name: str
    gate: Gate | None = None
    other_seed: bool = False

    @property
    def stem(self) -> str:
        """The name as one of a file."""
        return re.sub(r"[^\w.]+", "_", self.name)


def arms(gate: Gate) -> list[Arm]:
    """The runs of a study of a gate, native first. Raises ValueError for a gate without rules."""
    if not gate.rules:
        raise ValueError("the gate has no rule, so there is nothing to study: use one that demotes")
    late = [
        Arm(
            f"gated, {span}",
            replace(gate, rules=tuple(replace(rule, span=span) for rule in gate.rules)),
        )
        for span in (LATE, LATE + BY_MASS)
    ]
    always = [
        Arm(
            f"always {rule.route[1]}" + (f" {rule.rotary}" if rule.rotary else ""),
            by_hand(*rule.route, (0.0, 1.0), rotary=rule.rotary),
        )
        for rule in {(rule.route, rule.rotary): rule for rule in gate.rules}.values()
    ]
    references = [Arm(NATIVE), Arm(TWIN), Arm(OTHER_SEED, other_seed=True)]
    return [*references, Arm("gated", gate), *late, *always]


@dataclass(frozen=True)
class Row:
    """What one arm came to.

    seconds     of a step, as `step_seconds` has it
    predicted   share of native training's tokens that the gate should spare on this set
    saved       share of them that it spared
    cosine      of Delta W with that of the native arm
    validation  loss on the held-out pictures before the first step and after the last, if any
    """

    arm: str
    rules: list[str]
    seconds: float
    predicted: float
    saved: float
    cosine: float
    validation: tuple[float, float] | None


@dataclass(frozen=True)
class Study:
    """The rows, the native one first, and in words what is the same in all of them."""

    rows: list[Row]
    setting: str

    def time_saved(self, row: Row) -> float:
        """Share of the native arm's time per step."""
        return 1 - row.seconds / self.rows[0].seconds

    def save(self, path: str | Path) -> None:
        """Write the study as JSON, atomically."""
        data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        write_atomically(Path(path), (json.dumps(data, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a study. Raises ValueError when the file is none, damaged or of a later version."""
        with reading(path) as file:
            data = read_json(file, FORMAT, VERSION)
            rows = [
                Row(**row | {"validation": row["validation"] and tuple(row["validation"])})
                for row in data["rows"]
            ]
            return cls(rows, data["setting"])


def row(arm: Arm, history: History, predicted: float, cosine: float) -> Row:
    """The row of a finished run."""
    losses = [loss for _, loss in history.validation]
    return Row(
        arm=arm.name,
        rules=[str(rule) for rule in arm.gate.rules] if arm.gate else [],
        seconds=step_seconds(history),
        predicted=predicted,
        saved=history.saving,
        cosine=cosine,
        validation=(losses[0], losses[-1]) if losses else None,
    )


def step_seconds(history: History) -> float:
    """Mean time of a step, each step counted with the median of those that were demoted alike, so
    that a stall counts little. The first step pays for warm-up and is left out."""
    alike: dict[tuple[int, ...], list[float]] = {}
    for seconds, tiers in list(zip(history.seconds, history.tiers))[1:]:
        alike.setdefault(tuple(sorted(tiers)), []).append(seconds)
    counted = [(len(found), median(found)) for found in alike.values()]
    return sum(count * typical for count, typical in counted) / sum(count for count, _ in counted)


def table(study: Study) -> str:
    """The study as Markdown."""
    lines = [
        "| arm | time per step | time saved | saving predicted from tokens | tokens saved "
        "| Delta-W cosine to native | validation loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in study.rows:
        validation = "{:.4f} -> {:.4f}".format(*found.validation) if found.validation else "-"
        lines.append(
            f"| {found.arm} | {found.seconds:.4f} s | {study.time_saved(found):.1%} "
            f"| {found.predicted:.1%} | {found.saved:.1%} | {found.cosine:.4f} | {validation} |"
        )
    rules = [f"{found.arm}: {'; '.join(found.rules)}." for found in study.rows if found.rules]
    return "\n".join([*lines, "", *rules, "", study.setting, "", TIMES, ""])
