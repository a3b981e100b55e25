"""The gate: which rule decides, in which steps, and what it saves."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache

import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import gate as gates
from demotion import verdict
from demotion.gap_map import GapMap, gap_map
from demotion.gate import Course, Gate, Rule
from demotion.train import Settings

TIERS = (240, 224, 192, 128)
WORLD = synthetic.World(
    {"demote:224": [0.3, 0.1, 0.01, 0.01], "demote:192": [0.4, 0.05, 0.3, 0.01]},
    spread=0.004,
    noise=0.5,
)


@cache
def measured_map() -> GapMap:
    return gap_map(synthetic.measure(WORLD, parts=1))


def with_verdicts(verdicts: dict[str, list[str]], bins: list[tuple[float, float]]) -> GapMap:
    template = measured_map().gaps[0]
    gaps = tuple(
        replace(template, arm=arm, bin=edges, verdict=word, decide="")
        for arm, words in verdicts.items()
        for edges, word in zip(bins, words, strict=True)
    )
    return replace(measured_map(), gaps=gaps)


def hand_gate(*rules: Rule) -> Gate:
    return Gate(rules, measured=False, margin=None, source="by hand", native_tier=256)


def all_open(gate: Gate, sigma: float) -> Rule | None:
    return gates.decide(gate, sigma, TIERS, 0, Course(10))


edges = st.floats(0, 1).map(lambda edge: round(edge, 3))
windows = (
    st.tuples(edges, edges)
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: (min(pair), max(pair)))
)
spans = st.sampled_from(
    [
        "always",
        "early:0.3",
        "late:0.7",
        "spread:0.25",
        "spread:1/3",
        "early:0.3 by mass",
        "late:0.7 by mass",
    ]
)
courses = (
    st.lists(st.floats(0, 1), min_size=1, max_size=40)
    .filter(any)
    .map(lambda rates: Course(len(rates), rates))
)
rules = st.builds(
    lambda tier, window, span: Rule((256, tier), window, span),
    st.sampled_from(TIERS),
    windows,
    spans,
)
a_gate = st.lists(rules, max_size=4).map(lambda items: hand_gate(*items))


def test_safe_bins_that_touch_make_one_window_and_cheaper_tiers_come_first() -> None:
    gate = gates.from_gap_map(measured_map())
    assert [(rule.route, rule.window) for rule in gate.rules] == [
        ((256, 192), (0.75, 1.0)),
        ((256, 224), (0.5, 1.0)),
    ]
    assert gate.measured and gate.margin == 0.05 and gate.source == measured_map().hash


def test_a_window_never_spans_a_gap_between_bins() -> None:
    gappy = with_verdicts({"demote:224": ["safe"] * 3}, [(0.1, 0.2), (0.2, 0.3), (0.4, 0.5)])
    gate = gates.from_gap_map(gappy)
    assert [rule.window for rule in gate.rules] == [(0.1, 0.3), (0.4, 0.5)]
    assert all_open(gate, 0.35) is None


@given(
    words=st.lists(
        st.sampled_from(["safe", "unsafe", "undecided", "no signal"]), min_size=8, max_size=8
    )
)
def test_a_measured_gate_opens_exactly_on_the_safe_bins(words: list[str]) -> None:
    bins = [(index / 8, (index + 1) / 8) for index in range(8)]
    gate = gates.from_gap_map(with_verdicts({"demote:224": words}, bins))
    for (low, high), word in zip(bins, words, strict=True):
        for sigma in (low, (low + high) / 2):
            assert (all_open(gate, sigma) is not None) == (word == verdict.SAFE)


def test_diagnostic_arms_open_nothing() -> None:
    gate = gates.from_gap_map(
        with_verdicts({"repromote:192": ["safe"], "null": ["safe"]}, [(0.0, 1.0)])
    )
    assert not gate.rules


def test_nothing_safe_gives_an_empty_gate_that_says_what_would_decide() -> None:
    world = replace(WORLD, distances={"demote:224": [0.3, 0.07, 0.035, 0.3]}, noise=1.5)
    gate = gates.from_gap_map(gap_map(synthetic.measure(world, parts=1)))
    text = gates.describe(gate)
    assert not gate.rules and "every step trains native" in text
    assert "undecided at margin 0.05" in text and ("images (now 12)" in text or "side" in text)
    assert all_open(gate, 0.6) is None


def test_a_gate_of_a_relative_map_says_so() -> None:
    relative = replace(measured_map(), control="reenc")
    assert "relative to reenc" in gates.describe(gates.from_gap_map(relative))


def test_a_gate_by_hand_says_that_nothing_was_measured() -> None:
    gate = gates.by_hand(256, 192, (0.5, 0.9), "late:0.5")
    assert not gate.measured and gate.margin is None
    assert "not measured" in gates.describe(gate)
    assert "256 -> 192 for sigma 0.5 to 0.9, late:0.5" in gates.describe(gate)


def test_the_first_match_wins_and_the_upper_edge_is_outside() -> None:
    first, second = Rule((256, 192), (0.6, 0.9)), Rule((256, 224), (0.5, 1.0))
    gate = hand_gate(first, second)
    assert [all_open(gate, sigma) for sigma in (0.49, 0.5, 0.6, 0.9, 1.0)] == [
        None,
        second,
        first,
        second,
        None,
    ]
    assert gates.decide(gate, 0.7, {224}, 0, Course(10)) is second
    assert gates.decide(gate, 0.7, set(), 0, Course(10)) is None


def opened_steps(span: str, course: Course) -> list[int]:
    return [step for step in range(course.steps) if gates.span_open(span, step, course)]


@pytest.mark.parametrize(
    "span, opened",
    [
        ("always", range(10)),
        ("early:0.3", range(3)),
        ("late:0.3", range(7, 10)),
        ("late:0.7", range(3, 10)),
        ("spread:0.3", [3, 6, 9]),
        ("spread:1", range(10)),
        ("early:1", range(10)),
    ],
)
def test_spans_open_the_steps_they_name(span: str, opened) -> None:
    assert opened_steps(span, Course(10)) == list(opened)


@given(percent=st.integers(1, 100), steps=st.integers(1, 400))
@settings(max_examples=50)
def test_spans_are_exact_fractions(percent: int, steps: int) -> None:
    text = f"{percent / 100}"
    count = {
        kind: len(opened_steps(f"{kind}:{text}", Course(steps)))
        for kind in ("early", "late", "spread")
    }
    assert count["spread"] == percent * steps // 100
    assert count["early"] == -(-percent * steps // 100)
    assert count["late"] == percent * steps // 100


@given(
    percent=st.integers(1, 100),
    steps=st.integers(1, 100),
    kind=st.sampled_from(["early", "late", "spread"]),
    rate=st.floats(1e-12, 1e3),
)
@settings(max_examples=50)
def test_at_a_constant_rate_mass_is_steps(percent: int, steps: int, kind: str, rate: float) -> None:
    span, constant = f"{kind}:{percent / 100}", Course(steps, [rate] * steps)
    for course in (constant, Course(steps)):
        assert opened_steps(f"{span} by mass", course) == opened_steps(span, Course(steps))


@given(percent=st.integers(1, 99), course=courses)
@settings(max_examples=100)
def test_by_mass_a_span_holds_its_share_of_the_mass_up_to_a_step(percent: int, course) -> None:
    total, largest = sum(course.rates), max(course.rates)
    early = opened_steps(f"early:{percent / 100} by mass", course)
    mass = sum(course.rates[step] for step in early)
    assert -1e-9 <= mass - percent / 100 * total <= largest + 1e-9
    # The rest of the run is the late span of the rest of the mass, to the step.
    late = opened_steps(f"late:{(100 - percent) / 100} by mass", course)
    assert early + late == list(range(course.steps))


def test_the_last_half_of_the_steps_of_a_cosine_carries_a_fifth_of_the_mass() -> None:
    course = Settings(2000, 1e-4, schedule="cosine", warmup_steps=200).course
    shares = {
        span: sum(course.rates[step] for step in opened_steps(span, course)) / sum(course.rates)
        for span in ("late:0.5", "late:0.5 by mass", "spread:0.5", "spread:0.5 by mass")
    }
    # Integral of (1 + cos(pi t)) over the rest of the cosine, (0.5 - 0.1)/0.9 < t < 1.
    begun = 4 / 9
    expected = 0.9 * ((1 - begun) - math.sin(math.pi * begun) / math.pi)
    assert shares["late:0.5"] == pytest.approx(expected, abs=0.001)
    assert 0.2 < expected < 0.22
    assert shares["late:0.5 by mass"] == pytest.approx(0.5, abs=0.001)
    # Evenly spread steps carry an even share of the mass.
    assert shares["spread:0.5"] == shares["spread:0.5 by mass"] == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize(
    "steps, rates, sentence",
    [
        (0, None, "at least 1 step"),
        (3, [1.0, 1.0], "2 learning rates are given for 3 steps"),
        (2, [0.0, 0.0], "0 everywhere"),
        (2, [1.0, -1.0], "negative somewhere"),
        (2, [1.0, float("nan")], "negative somewhere"),
    ],
)
def test_a_course_that_trains_nothing_is_refused(steps: int, rates, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Course(steps, rates)


@pytest.mark.parametrize("span", ["always", "late:0.5", "early:0.5 by mass", "spread:0.5"])
@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_that_the_run_does_not_have_is_refused(span: str, step: int) -> None:
    with pytest.raises(ValueError, match="is not one of a run of 10"):
        gates.span_open(span, step, Course(10, [1.0] * 10))


@pytest.mark.parametrize(
    "span",
    [
        "",
        "sometimes",
        "early",
        "early:0",
        "late:1.5",
        "spread:-0.5",
        "early:x",
        "always:0.5",
        "late:1/0",
        "always by mass",
        "late:0.5 by steps",
        "late:0.5 by mass by mass",
    ],
)
def test_a_span_that_cannot_be_read_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="always, early:q"):
        Rule((256, 192), (0.0, 1.0), span)


@pytest.mark.parametrize(
    "route, sentence",
    [
        ((256, 256), "does not go down"),
        ((192, 256), "does not go down"),
        ((256, 248), "above 0.94"),
    ],
)
def test_a_route_that_goes_up_or_saves_nothing_is_refused(route: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Rule(route, (0.0, 1.0))


@pytest.mark.parametrize(
    "window", [(-0.1, 0.5), (0.5, 1.1), (0.5, 0.5), (0.6, 0.5), (float("nan"), 0.5)]
)
def test_an_impossible_window_is_refused(window: tuple) -> None:
    with pytest.raises(ValueError, match="sigma window"):
        Rule((256, 192), window)


@given(gate=a_gate)
@settings(max_examples=20)
def test_saving_and_loading_changes_nothing(tmp_path_factory, gate: Gate) -> None:
    path = tmp_path_factory.mktemp("gate") / "gate.json"
    gate.save(path)
    assert Gate.load(path) == gate


def test_other_files_later_versions_and_impossible_rules_are_refused(tmp_path) -> None:
    path = tmp_path / "gate.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a demotion-gate file"):
        Gate.load(path)
    gates.by_hand(256, 192, (0.5, 0.9)).save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(ValueError, match="update the pack"):
        Gate.load(path)
    data["rules"][0]["route"] = [192, 256]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="does not go down"):
        Gate.load(path)


def test_a_rule_of_another_native_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="starts at tier 320, and the gate at 256"):
        hand_gate(Rule((256, 192), (0.5, 1.0)), Rule((320, 192), (0.2, 0.5)))
    with pytest.raises(ValueError, match="one native tier"):
        gates.by_hand(320, 192, (0.2, 0.5), after=gates.by_hand(256, 192, (0.5, 1.0)))


def test_a_rule_by_hand_goes_behind_those_of_a_gate_which_is_then_not_measured() -> None:
    measured = gates.from_gap_map(measured_map())
    gate = gates.by_hand(256, 128, (0.9, 1.0), "late:0.5 by mass", after=measured)
    assert gate.rules == (*measured.rules, Rule((256, 128), (0.9, 1.0), "late:0.5 by mass"))
    assert not gate.measured and gate.margin is None and gate.basis == measured.basis
    again = gates.by_hand(256, 128, (0.1, 0.2), after=gate)
    assert gate.source == again.source == f"gap map {measured.source} and by hand"
    text = gates.describe(again)
    assert text.splitlines()[0] == f"Gate: {gate.source}, not measured"
    assert [f"Rule {number} was set by hand" in text for number in range(1, 6)] == [
        False,
        False,
        True,
        True,
        False,
    ]


FINDINGS = {
    "a rule that an earlier one of its route holds is dead": (
        [Rule((256, 192), (0.5, 1.0)), Rule((256, 192), (0.6, 0.9), "late:0.5", "pi")],
        ["Rule 2 never applies: rules before it take all that it would."],
    ),
    "several rules together take all": (
        [Rule((256, 192), (0.5, 0.7)), Rule((256, 192), (0.7, 1.0)), Rule((256, 192), (0.6, 0.9))],
        ["Rule 3 never applies: rules before it take all that it would."],
    ),
    "a gap between them leaves something": (
        [Rule((256, 192), (0.5, 0.7)), Rule((256, 192), (0.8, 1.0)), Rule((256, 192), (0.6, 0.9))],
        [],
    ),
    "a wider span takes all, a narrower one does not": (
        [
            Rule((256, 192), (0.5, 1.0), "late:0.3"),
            Rule((256, 192), (0.5, 1.0), "late:0.2"),
            Rule((256, 192), (0.5, 1.0), "late:0.4"),
            Rule((256, 192), (0.5, 1.0), "late:0.1 by mass"),
            Rule((256, 192), (0.5, 1.0), "spread:0.2"),
        ],
        ["Rule 2 never applies: rules before it take all that it would."],
    ),
    "another route leaves the pictures off it": (
        [Rule((256, 128), (0.5, 1.0)), Rule((256, 192), (0.6, 1.0))],
        [
            "Rule 2 is left with pictures off the routes of rules before it.",
            "Rules 1 and 2 overlap for sigma 0.6 to 1: where both fit a sample, rule 1 wins.",
        ],
    ),
    "windows of two routes that overlap": (
        [Rule((256, 128), (0.7, 1.0)), Rule((256, 192), (0.5, 0.8))],
        ["Rules 1 and 2 overlap for sigma 0.7 to 0.8: where both fit a sample, rule 1 wins."],
    ),
    "windows that touch": ([Rule((256, 128), (0.7, 1.0)), Rule((256, 192), (0.5, 0.7))], []),
    "spans that share no step": (
        [Rule((256, 128), (0.5, 1.0), "early:0.4"), Rule((256, 192), (0.5, 1.0), "late:0.6")],
        [],
    ),
    "spans that share a step": (
        [Rule((256, 128), (0.5, 1.0), "early:0.5"), Rule((256, 192), (0.5, 1.0), "late:0.6")],
        ["Rules 1 and 2 overlap for sigma 0.5 to 1: where both fit a sample, rule 1 wins."],
    ),
    "shares of steps and of mass that may meet": (
        [
            Rule((256, 128), (0.5, 1.0), "early:0.4"),
            Rule((256, 192), (0.5, 1.0), "late:0.6 by mass"),
        ],
        ["Rules 1 and 2 overlap for sigma 0.5 to 1: where both fit a sample, rule 1 wins."],
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_rules_that_overlap_or_never_apply_are_named(name: str) -> None:
    rules, expected = FINDINGS[name]
    gate = hand_gate(*rules)
    assert gates.findings(gate) == expected
    assert gates.describe(gate).endswith("\n".join(expected))


coarse_rules = st.builds(
    lambda tier, low, width, span: Rule((256, tier), (low / 4, min(low + width, 4) / 4), span),
    st.sampled_from([192, 128]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(
        ["always", "early:0.3", "early:0.6", "late:0.4", "late:0.6", "late:0.6 by mass"]
    ),
)


@given(rules=st.lists(coarse_rules, max_size=4, unique=True), course=courses)
@settings(max_examples=150)
def test_what_findings_say_holds_at_every_learning_rate(rules: list[Rule], course: Course) -> None:
    gate = hand_gate(*rules)
    found = gates.findings(gate)
    named = {
        word: {
            rule
            for number, rule in enumerate(rules, 1)
            if f"Rule {number} {word}" in " ".join(found)
        }
        for word in ("never", "is left")
    }
    for step, sigma in itertools.product(range(course.steps), (0.125, 0.375, 0.625, 0.875)):
        for tiers in ({192}, {128}, {192, 128}):
            assert gates.decide(gate, sigma, tiers, step, course) not in named["never"]
        assert gates.decide(gate, sigma, {192, 128}, step, course) not in named["is left"]
        fits = {
            rule.route
            for rule in rules
            if gates.decide(hand_gate(rule), sigma, {192, 128}, step, course)
        }
        assert found or len(fits) <= 1


def test_the_basis_of_a_measured_gate_names_its_adapter_and_loss() -> None:
    adapter = {"kind": "fresh", "algorithm": "LoRA", "rank": 16, "modules": 40}
    settings = measured_map().settings | {"adapter": adapter}
    basis = gates.from_gap_map(replace(measured_map(), settings=settings)).basis
    assert basis == {
        "model": "synthetic",
        "adapter": "fresh",
        "algorithm": "LoRA",
        "rank": "16",
        "modules": "40",
        "loss": "velocity MSE",
        "dtype": "float64",
    }
    # Maps of published rows have no adapter at hand.
    assert "rank" not in gates.from_gap_map(measured_map()).basis
