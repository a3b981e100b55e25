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
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from . import rotary, verdict
from .arms import Arm
from .gap_map import GapMap, arm_title, is_route
from .grid import check_route
from .measure import read_json, reading, write_atomically

FORMAT = "demotion-gate"
VERSION = 1
SPANS = "always, early:q, late:q or spread:q with q in (0, 1]"
STEPS = 1000


class Density(Protocol):
    """Density of sigma in training."""

    def cdf(self, sigma: float) -> float: ...


@dataclass(frozen=True)
class Rule:
    """Train on the demoted latent when sigma lies in the window and the span is open.

    route   (native tier, target tier), pixels
    window  lo <= sigma < hi
    span    which steps of a run: "always"; "early:q" and "late:q", the first and the last fraction
            q of the steps; "spread:q", a fraction q spread evenly over the run
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
            raise ValueError(f"sigma window {low:g} to {high:g} is empty or leaves 0 to 1: "
                             "give a lower and a higher sigma between 0 and 1")
        parse_span(self.span)
        if self.rotary is not None:
            rotary.check_mode(self.rotary)

    def __str__(self) -> str:
        span = "" if self.span == "always" else f", {self.span}"
        rotary = f", rotary {self.rotary}" if self.rotary else ""
        return (f"{self.route[0]} -> {self.route[1]} for sigma {self.window[0]:g} to "
                f"{self.window[1]:g}{span}{rotary}")


@dataclass(frozen=True)
class Gate:
    """Ordered rules, and where they come from.

    measured     whether a gap map stands behind the windows
    margin       distance that counted as safe; None by hand
    source       hash of the gap map, or "by hand"
    native_tier  tier that every route starts from
    basis        what the map was measured on: model, adapter, noise, precision; empty by hand
    notes        what the reader should know: what is undecided, and what would decide it
    """

    rules: tuple[Rule, ...]
    measured: bool
    margin: float | None
    source: str
    native_tier: int
    basis: dict[str, str] = field(default_factory=dict)
    notes: str = ""

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
            rules = tuple(Rule(tuple(rule["route"]), tuple(rule["window"]), rule["span"],
                               rule["rotary"]) for rule in data["rules"])
            fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
            return cls(**fields | {"rules": rules})


def from_gap_map(gap_map: GapMap) -> Gate:
    """The gate of a map: one rule per run of adjacent safe bins of a route, cheaper tiers first.

    A bin that is safe on a plain demoted grid is demoted plainly: a rotary alignment serves the
    bins that are safe with it alone. The endpoint sigma = 1 is no window: training does not draw
    it. Empty when nothing is safe; the notes say which bins are open and what would decide them.
    """
    routes = sorted(filter(is_route, gap_map.arms),
                    key=lambda arm: (Arm.parse(arm).tier, Arm.parse(arm).rotary is not None))
    rules, taken = [], set()
    for arm in routes:
        tier, mode = Arm.parse(arm).tier, Arm.parse(arm).rotary
        bins = [gap.bin for gap in gap_map.of(arm)
                if gap.verdict == verdict.SAFE and gap.bin[0] < gap.bin[1]
                and (tier, gap.bin) not in taken]
        taken.update((tier, edges) for edges in bins)
        rules += [Rule((gap_map.native_tier, tier), window, rotary=mode)
                  for window in _windows(bins)]
    return Gate(rules=tuple(rules), measured=True, margin=gap_map.margin, source=gap_map.hash,
                native_tier=gap_map.native_tier, basis=_basis(gap_map.settings),
                notes=_notes(gap_map, routes))


def by_hand(native_tier: int, target_tier: int, window: tuple[float, float],
            span: str = "always", rotary: str | None = None) -> Gate:
    """A gate of one rule that nothing was measured for. Raises ValueError as Rule does."""
    return Gate(rules=(Rule((native_tier, target_tier), window, span, rotary),), measured=False,
                margin=None, source="by hand", native_tier=native_tier,
                notes="Not measured: nothing says that this window is safe on this model.")


def decide(gate: Gate, sigma: float, on_route: Collection[int], step: int,
           steps: int) -> Rule | None:
    """The rule that a sample trains under, or None for its native latent.

    on_route  target tiers that the sample has a demoted latent for
    step      0-based step of a run of `steps` steps
    """
    for rule in gate.rules:
        low, high = rule.window
        if low <= sigma < high and rule.route[1] in on_route and span_open(rule.span, step, steps):
            return rule
    return None


def span_open(span: str, step: int, steps: int) -> bool:
    """Whether a span holds a 0-based step of a run of `steps` steps, in exact fractions."""
    kind, fraction = parse_span(span)
    if kind == "early":
        return step < fraction * steps
    if kind == "late":
        return step >= (1 - fraction) * steps
    return math.floor((step + 1) * fraction) > math.floor(step * fraction)


def parse_span(span: str) -> tuple[str, Fraction]:
    """Kind and fraction q of a span; "always" is the whole run.

    Raises ValueError when it cannot be read.
    """
    if span == "always":
        return "early", Fraction(1)
    kind, _, text = span.partition(":")
    try:
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if kind not in ("early", "late", "spread") or not 0 < fraction <= 1:
        raise ValueError(f"span '{span}' cannot be read: use {SPANS}")
    return kind, fraction


def probability(gate: Gate, density: Density, steps: int = STEPS) -> list[float]:
    """P(rule) [R]: share of a run's samples that each rule takes, for pictures on every route.

    Between two neighbouring window edges only the step decides, so this is a sum, not an estimate.
    """
    tiers = {rule.route[1] for rule in gate.rules}
    edges = sorted({edge for rule in gate.rules for edge in rule.window})
    shares = dict.fromkeys(range(len(gate.rules)), 0.0)
    for low, high in pairwise(edges):
        mass = (density.cdf(high) - density.cdf(low)) / steps
        for step in range(steps):
            rule = decide(gate, (low + high) / 2, tiers, step, steps)
            if rule is not None:
                shares[gate.rules.index(rule)] += mass
    return list(shares.values())


def predicted_saving(gate: Gate, density: Density, costs: Mapping[int, float],
                     steps: int = STEPS) -> float:
    """Share of the training time that the gate saves, for pictures that are on every route.

    costs  cost of a step at each tier, the native one included, in any unit: mean token counts, if
           cost is taken as linear in tokens, or measured seconds

    Raises ValueError when a tier of the gate has no cost.
    """
    missing = sorted({gate.native_tier, *(rule.route[1] for rule in gate.rules)} - costs.keys())
    if missing:
        raise ValueError(f"no cost is given for tier {missing[0]}: "
                         "give the tokens or the seconds of a step there")
    return sum(share * (1 - costs[rule.route[1]] / costs[gate.native_tier])
               for rule, share in zip(gate.rules, probability(gate, density, steps), strict=True))


def describe(gate: Gate) -> str:
    """The gate in words: its rules in order, what they rest on, and the notes."""
    if gate.measured:
        head = f"Gate from gap map {gate.source}, safe at margin {gate.margin:g}"
    else:
        head = f"Gate: {gate.source}, not measured"
    rules = [f"  {number}. {rule}" for number, rule in enumerate(gate.rules, 1)]
    body = rules or ["  no rule: every step trains native"]
    return "\n".join([head, *body, gate.notes]).rstrip()


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
    return {"model": settings["model"]["fingerprint"], "adapter": settings["adapter"]["kind"],
            "algorithm": settings["adapter"].get("algorithm", "LoRA"),
            "dtype": settings["environment"]["dtype"]}


def _notes(gap_map: GapMap, routes: Sequence[str]) -> str:
    relative = [f"Distances are relative to {gap_map.control}."] if gap_map.control else []
    lines = [f"{arm_title(arm, gap_map.native_tier)}, sigma {gap.bin[0]:g} to {gap.bin[1]:g}: "
             f"{gap.verdict} at margin {gap_map.margin:g}; {gap.decide}."
             for arm in routes for gap in gap_map.of(arm) if gap.decide]
    return "\n".join(relative + lines)
