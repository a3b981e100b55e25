"""Cost of a gate, told before a run: which share of the samples each rule takes, and what that
saves, for the pictures of a set and the steps of a course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from . import grid
from .arms import Arm, TrainingSet
from .draws import SigmaDensity
from .gate import Course, Gate, decide, describe, span_open

# Cells of sigma, beside those that the edges of windows cut: fine enough to draw a density with.
CELLS = 800


@dataclass(frozen=True)
class Picture:
    """A picture as the cost sees it.

    tokens  tier -> tokens of a step there, for the native tier and those it is on route to
    """

    tokens: Mapping[int, int]
    repeats: int = 1


@dataclass(frozen=True)
class Forecast:
    """What a gate does to a run, in the mean.

    edges     [C + 1] cells of sigma; no window begins or ends inside one
    mass      [C, 1 + R] share of the run's samples in a cell: native, and by rule
    on_route  [R] share of the pictures, repeats counted, that are on the rule's route
    saving    share of native training's tokens that the gate spares
    native    share of the steps whose samples are all native
    demoted   share of the steps whose samples are all demoted
    """

    edges: np.ndarray
    mass: np.ndarray
    on_route: np.ndarray
    saving: float
    native: float
    demoted: float

    @property
    def shares(self) -> np.ndarray:
        """P(rule) [R]: share of the run's samples that each rule takes."""
        return self.mass.sum(0)[1:]


def pictures_of(training_set: TrainingSet, gate: Gate) -> list[Picture]:
    """The pictures of a set on the routes of a gate, encoded there or not.

    Raises ValueError for a gate of another native tier.
    """
    if gate.native_tier != training_set.native_tier:
        raise ValueError(
            f"the gate starts at tier {gate.native_tier}, and the set's native tier is "
            f"{training_set.native_tier}: use a gate made for this tier"
        )
    arms = {gate.native_tier: Arm("src")}
    arms |= {rule.route[1]: Arm("demote", rule.route[1]) for rule in gate.rules}
    pictures = []
    for item in training_set.items:
        grids = {tier: training_set.grid_of(item, arm) for tier, arm in arms.items()}
        tokens = {
            tier: grid.token_count(cells, training_set.patch)
            for tier, cells in grids.items()
            if cells is not None
        }
        pictures.append(Picture(tokens, item.repeats))
    return pictures


def forecast(
    gate: Gate,
    density: SigmaDensity,
    pictures: Sequence[Picture],
    course: Course,
    batch_size: int = 1,
) -> Forecast:
    """What a gate does to a run on these pictures.

    Each sample's sigma has the density at its picture's native tokens. A step's cost is taken as
    linear in tokens, and the pictures of a batch as drawn independently.
    """
    rules = gate.rules
    windows = [edge for rule in rules for edge in rule.window]
    # Rounded, so that an edge such as 0.3 is the same number in both.
    edges = np.unique([*np.linspace(0, 1, CELLS + 1).round(6), *windows])
    middles = (edges[1:] + edges[:-1]) / 2
    kinds = _step_kinds(gate, course)

    @cache
    def drawn(density: SigmaDensity) -> np.ndarray:
        """Share of the samples in each cell [C]."""
        return np.diff([density.cdf(edge) for edge in edges])

    @cache
    def taken(tiers: frozenset[int]) -> np.ndarray:
        """Which rule takes a cell, or none, one-hot [kinds of steps, C, 1 + R]."""
        first_wins = (None, *rules)
        chosen = [
            [first_wins.index(decide(gate, sigma, tiers, step, course)) for sigma in middles]
            for step in kinds
        ]
        return np.eye(len(first_wins))[chosen]

    mass = np.zeros((len(kinds), len(edges) - 1, 1 + len(rules)))
    on_route, spent, native_tokens = np.zeros(len(rules)), 0.0, 0.0
    weights = np.array([picture.repeats for picture in pictures], dtype=float)
    shares = np.array(list(kinds.values())) / course.steps
    for picture, weight in zip(pictures, weights / weights.sum(), strict=True):
        native = picture.tokens[gate.native_tier]
        part = weight * taken(frozenset(picture.tokens)) * drawn(density.at(native))[:, None]
        costs = [native, *(picture.tokens.get(rule.route[1], 0) for rule in rules)]
        mass += part
        on_route += weight * np.array([rule.route[1] in picture.tokens for rule in rules])
        spent += shares @ part.sum(1) @ costs
        native_tokens += weight * native
    of_kind = mass[:, :, 0].sum(1)
    return Forecast(
        edges=edges,
        mass=np.tensordot(shares, mass, 1),
        on_route=on_route,
        saving=1 - spent / native_tokens,
        native=shares @ of_kind**batch_size,
        demoted=shares @ (1 - of_kind) ** batch_size,
    )


def report(
    gate: Gate, density: SigmaDensity, found: Forecast, course: Course, batch_size: int
) -> str:
    """The gate in words, then what it does to a run."""
    lines = [
        describe(gate),
        "",
        f"Expected over {course.steps} steps of {batch_size} and all pictures of the set, sigma "
        f"{density}:",
    ]
    lines += [
        f"Rule {number} takes {share:.1%} of the samples; {on_route:.1%} of the pictures are on "
        "its route."
        for number, (share, on_route) in enumerate(zip(found.shares, found.on_route), 1)
    ]
    lines.append(f"Native: {1 - found.shares.sum():.1%} of the samples.")
    if batch_size > 1:
        lines.append(
            f"Steps of {batch_size}: {found.native:.1%} all native, {found.demoted:.1%} all "
            f"demoted, {1 - found.native - found.demoted:.1%} mixed and split by grid."
        )
    lines.append(
        f"Tokens saved: {found.saving:.1%}. Time saved is the same if a step's cost is linear in "
        "its picture tokens: attention saves more, text tokens and the optimizer save nothing."
    )
    return "\n".join(lines)


def _step_kinds(gate: Gate, course: Course) -> dict[int, int]:
    """Steps that differ in the rules that they open: the first of each kind, and how many there
    are."""
    first: dict[tuple[bool, ...], int] = {}
    counts: dict[int, int] = {}
    for step in range(course.steps):
        opened = tuple(span_open(rule.span, step, course) for rule in gate.rules)
        kind = first.setdefault(opened, step)
        counts[kind] = counts.get(kind, 0) + 1
    return counts
