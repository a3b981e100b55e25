"""Gate: at which noise levels, on which routes and in which steps a sample is trained on its
demoted latent.

A gate is an ordered list of rules; the first that matches a sample decides. It comes from a gap
map, whose safe bins become windows, or from the user's hand, and then says that nothing was
measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

from . import draws, rotary, verdict
from .arms import Arm
from .gap_map import GapMap, arm_title, is_route
from .grid import check_route
from .measure import read_json, reading, write_atomically

FORMAT = "demotion-gate"
VERSION = 1
SPANS = "always, early:q, late:q or spread:q with q in (0, 1], and ' by mass' after q if so meant"
BY_MASS = " by mass"


@dataclass(frozen=True)
class Course:
    """The steps of a run, which the spans of a gate are laid over.

    steps  how many
    rates  learning rate of each step [steps], in any unit; None when it is constant

    Raises ValueError for a run without steps, for rates that are not one a step, and for rates
    whose sum, the mass of the run, is 0.
    """

    steps: int
    rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a run of {self.steps} steps has no spans: give at least 1 step")
        if self.rates is None:
            return
        if len(self.rates) != self.steps:
            raise ValueError(
                f"{len(self.rates)} learning rates are given for {self.steps} steps: give one a "
                "step"
            )
        if not (min(self.rates) >= 0 and sum(self.rates) > 0):
            raise ValueError(
                "the learning rates are negative somewhere or 0 everywhere: give rates that train"
            )

    def before(self, step: int, by_mass: bool = False) -> Fraction:
        """How much of the run lies before a 0-based step, of `steps` in all: in steps, or by mass
        in steps of the mean learning rate; exact.

        Raises ValueError for a step that the run does not have.
        """
        if not 0 <= step < self.steps:
            raise ValueError(
                f"step {step} is not one of a run of {self.steps}: count steps from 0, and make "
                "the course as long as the run"
            )
        if not by_mass or self.rates is None:
            return Fraction(step)
        return self._mass[step] * self.steps / self._mass[-1]

    @cached_property
    def _mass(self) -> list[Fraction]:
        """Sum of the rates before each step, and of all."""
        return list(accumulate(map(Fraction, self.rates), initial=Fraction(0)))


@dataclass(frozen=True)
class Rule:
    """Train on the demoted latent when sigma lies in the window and the span is open.

    route   (native tier, target tier), pixels
    window  lo <= sigma < hi
    span    which steps of a run: "always"; "early:q" and "late:q", the first and the last fraction
            q of the steps, or of their learning rates' sum with " by mass" after q; "spread:q", a
            fraction q of the steps, evenly spread, and so of the mass
    rotary  mode of the rotary alignment of the demoted step, or None

    Raises ValueError for a route that goes up or saves nothing, a window that is empty or leaves
    [0, 1], a span that cannot be read, and an unknown rotary mode.
    """

    route: tuple[int, int]
    window: tuple[float, float]
    span: str = "always"
    rotary: str | None = None

    def __post_init__(self) -> None:
        check_route(*self.route)
        low, high = self.window
        if not 0 <= low < high <= 1:
            raise ValueError(
                f"sigma window {low:g} to {high:g} is empty or leaves 0 to 1: "
                "give a lower and a higher sigma between 0 and 1"
            )
        parse_span(self.span)
        if self.rotary is not None:
            rotary.check_mode(self.rotary)

    def __str__(self) -> str:
        span = "" if self.span == "always" else f", {self.span}"
        rotary = f", rotary {self.rotary}" if self.rotary else ""
        return (
            f"{self.route[0]} -> {self.route[1]} for sigma {self.window[0]:g} to "
            f"{self.window[1]:g}{span}{rotary}"
        )


@dataclass(frozen=True)
class Gate:
    """Ordered rules, and where they come from.

    measured     whether a gap map stands behind the windows
    margin       distance that counted as safe; None by hand
    source       hash of the gap map, or "by hand"
    native_tier  tier that every route starts from
    basis        what the map was measured on, by name: "model", "adapter", "algorithm", "rank" and
                 "modules" of the adapter, "loss", "dtype"; empty by hand
    notes        what the reader should know: what is undecided, and what would decide it

    Raises ValueError for a rule that starts at another tier.
    """

    rules: tuple[Rule, ...]
    measured: bool
    margin: float | None
    source: str
    native_tier: int
    basis: dict[str, str] = field(default_factory=dict)
    notes: str = ""

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule.route[0] != self.native_tier:
                raise ValueError(
                    f"rule '{rule}' starts at tier {rule.route[0]}, and the gate at "
                    f"{self.native_tier}: give all rules one native tier"
                )

    def save(self, path: str | Path) -> None:
        """Write the gate as JSON, atomically."""
        data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        write_atomically(Path(path), (json.dumps(data, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Gate:
        """Read a gate.

        Raises ValueError when the file is none, is damaged, or is of a later version, and for an
        impossible rule.
        """
        with reading(path) as file:
            data = read_json(file, FORMAT, VERSION)
            rules = tuple(
                Rule(tuple(rule["route"]), tuple(rule["window"]), rule["span"], rule["rotary"])
                for rule in data["rules"]
            )
            fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
            return cls(**fields | {"rules": rules})


def from_gap_map(gap_map: GapMap) -> Gate:
    """The gate of a map: one rule per run of adjacent safe bins of a route, cheaper tiers first.

    A bin that is safe on a plain demoted grid is demoted plainly: a rotary alignment serves the
    bins that are safe with it alone. The endpoint sigma = 1 is no window: training does not draw
    it. Empty when nothing is safe; the notes say which bins are open and what would decide them.
    """
    routes = sorted(
        filter(is_route, gap_map.arms),
        key=lambda arm: (Arm.parse(arm).tier, Arm.parse(arm).rotary is not None),
    )
    rules, taken = [], set()
    for arm in routes:
        tier, mode = Arm.parse(arm).tier, Arm.parse(arm).rotary
        bins = [
            gap.bin
            for gap in gap_map.of(arm)
            if gap.verdict == verdict.SAFE
            and gap.bin[0] < gap.bin[1]
            and (tier, gap.bin) not in taken
        ]
        taken.update((tier, edges) for edges in bins)
        rules += [
            Rule((gap_map.native_tier, tier), window, rotary=mode) for window in _windows(bins)
        ]
    return Gate(
        rules=tuple(rules),
        measured=True,
        margin=gap_map.margin,
        source=gap_map.hash,
        native_tier=gap_map.native_tier,
        basis=_basis(gap_map.settings),
        notes=_notes(gap_map, routes),
    )


def by_hand(
    native_tier: int,
    target_tier: int,
    window: tuple[float, float],
    span: str = "always",
    rotary: str | None = None,
    after: Gate | None = None,
) -> Gate:
    """A gate of one rule that nothing was measured for, or the gate `after` with it as last rule,
    which then is not measured as a whole.

    Raises ValueError as Rule does, and for a rule of another native tier than the gate's.
    """
    before = after or Gate((), False, None, "by hand", native_tier)
    rules = (*before.rules, Rule((native_tier, target_tier), window, span, rotary))
    note = f"Rule {len(rules)} was set by hand: nothing says that it is safe on this model."
    return replace(
        before,
        rules=rules,
        measured=False,
        margin=None,
        source=f"gap map {before.source} and by hand" if before.measured else before.source,
        notes=f"{before.notes}\n{note}".strip(),
    )


def decide(
    gate: Gate, sigma: float, on_route: Collection[int], step: int, course: Course
) -> Rule | None:
    """The rule that a sample trains under, or None for its native latent.

    on_route  target tiers that the sample has a demoted latent for
    step      0-based step of the course
    """
    for rule in gate.rules:
        low, high = rule.window
        if low <= sigma < high and rule.route[1] in on_route and span_open(rule.span, step, course):
            return rule
    return None


def span_open(span: str, step: int, course: Course) -> bool:
    """Whether a span holds a 0-based step of a course, in exact fractions."""
    kind, fraction, by_mass = parse_span(span)
    before = course.before(step, by_mass)
    if kind == "early":
        return before < fraction * course.steps
    if kind == "late":
        return before >= (1 - fraction) * course.steps
    return math.floor((before + 1) * fraction) > math.floor(before * fraction)


@cache
def parse_span(span: str) -> tuple[str, Fraction, bool]:
    """Kind and fraction q of a span, and whether it goes by mass; "always" is the whole run.

    Evenly spread steps carry an even share of the mass, so that "spread" goes by steps in any case.
    Raises ValueError for a span that cannot be read.
    """
    if span == "always":
        return "early", Fraction(1), False
    kind, _, text = span.partition(":")
    try:
        fraction = Fraction(text.removesuffix(BY_MASS))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if kind not in ("early", "late", "spread") or not 0 < fraction <= 1:
        raise ValueError(f"span '{span}' cannot be read: use {SPANS}")
    return kind, fraction, text.endswith(BY_MASS) and kind != "spread"


def findings(gate: Gate) -> list[str]:
    """What a reader of the rules may overlook, in sentences: rules that can never apply or hardly,
    and pairs that compete for a sample."""
    found, dead = [], set()
    for number, rule in enumerate(gate.rules, 1):
        before = gate.rules[: number - 1]
        if _takes_all([other for other in before if other.route == rule.route], rule):
            dead.add(rule)
            found.append(f"Rule {number} never applies: rules before it take all that it would.")
        elif _takes_all(before, rule):
            found.append(f"Rule {number} is left with pictures off the routes of rules before it.")
    for (first, one), (second, other) in combinations(enumerate(gate.rules, 1), 2):
        low, high = max(one.window[0], other.window[0]), min(one.window[1], other.window[1])
        same = (one.route, one.rotary) == (other.route, other.rotary)
        if low < high and not (same or {one, other} & dead or _apart(one.span, other.span)):
            found.append(
                f"Rules {first} and {second} overlap for sigma {low:g} to {high:g}: where both fit "
                f"a sample, rule {first} wins."
            )
    return found


def describe(gate: Gate) -> str:
    """The gate in words: its rules in order, what they rest on, the notes and the findings."""
    if gate.measured:
        head = f"Gate from gap map {gate.source}, safe at margin {gate.margin:g}"
    else:
        head = f"Gate: {gate.source}, not measured"
    rules = [f"  {number}. {rule}" for number, rule in enumerate(gate.rules, 1)]
    body = rules or ["  no rule: every step trains native"]
    return "\n".join([head, *body, gate.notes, *findings(gate)]).rstrip()


def _takes_all(earlier: Sequence[Rule], rule: Rule) -> bool:
    """Whether earlier rules leave a rule nothing of the pictures on all their routes, whatever the
    learning rates."""
    wider = [other.window for other in earlier if _within(rule.span, other.span)]
    inside = (edge for window in wider for edge in window if rule.window[0] < edge < rule.window[1])
    return all(
        any(window[0] <= low and high <= window[1] for window in wider)
        for low, high in pairwise(sorted({*rule.window, *inside}))
    )


def _within(span: str, other: str) -> bool:
    """Whether every step of a span is one of the other's, whatever the learning rates."""
    kind, fraction, by_mass = parse_span(span)
    other_kind, other_fraction, other_by_mass = parse_span(other)
    if other_fraction == 1:
        return True
    if (kind, by_mass) != (other_kind, other_by_mass):
        return False
    return fraction == other_fraction if kind == "spread" else fraction <= other_fraction


def _apart(span: str, other: str) -> bool:
    """Whether two spans share no step, whatever the learning rates."""
    kind, fraction, by_mass = parse_span(span)
    other_kind, other_fraction, other_by_mass = parse_span(other)
    meet = {kind, other_kind} != {"early", "late"} or by_mass != other_by_mass
    return not meet and fraction + other_fraction <= 1


def _windows(bins: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Maximal runs of bins that share an edge, from bins in ascending order."""
    window = None
    for low, high in bins:
        if window and math.isclose(window[1], low, abs_tol=1e-9):
            window = (window[0], high)
            continue
        if window:
            yield window
        window = (low, high)
    if window:
        yield window


def _basis(settings: Mapping[str, Any]) -> dict[str, str]:
    adapter = settings["adapter"]
    counts = {name: adapter.get(name) for name in ("rank", "modules")}
    return {
        "model": settings["model"]["fingerprint"],
        "adapter": adapter["kind"],
        "algorithm": adapter.get("algorithm", "LoRA"),
        **{name: str(count) for name, count in counts.items() if count is not None},
        "loss": draws.LOSS,
        "dtype": settings["environment"]["dtype"],
    }


def _notes(gap_map: GapMap, routes: Sequence[str]) -> str:
    relative = [f"Distances are relative to {gap_map.control}."] if gap_map.control else []
    lines = [
        f"{arm_title(arm, gap_map.native_tier)}, sigma {gap.bin[0]:g} to {gap.bin[1]:g}: "
        f"{gap.verdict} at margin {gap_map.margin:g}; {gap.decide}."
        for arm in routes
        for gap in gap_map.of(arm)
        if gap.decide
    ]
    return "\n".join(relative + lines)
