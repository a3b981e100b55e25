"""The gate: which rule decides, in which steps, and what it saves."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import gate as gates
from demotion import verdict
from demotion.draws import SigmaDensity
from demotion.gap_map import GapMap, gap_map
from demotion.gate import Gate, Rule

TIERS = (240, 224, 192, 128)
WORLD = synthetic.World({"demote:224": [0.3, 0.1, 0.01, 0.01],
                         "demote:192": [0.4, 0.05, 0.3, 0.01]}, spread=0.004, noise=0.5)


@cache
def measured_map() -> GapMap:
    return gap_map(synthetic.measure(WORLD, parts=1))


def with_verdicts(verdicts: dict[str, list[str]], bins: list[tuple[float, float]]) -> GapMap:
    template = measured_map().gaps[0]
    gaps = tuple(replace(template, arm=arm, bin=edges, verdict=word, decide="")
                 for arm, words in verdicts.items()
                 for edges, word in zip(bins, words, strict=True))
    return replace(measured_map(), gaps=gaps)


def hand_gate(*rules: Rule) -> Gate:
    return Gate(rules, measured=False, margin=None, source="by hand", native_tier=256)


def all_open(gate: Gate, sigma: float) -> Rule | None:
    return gates.decide(gate, sigma, TIERS, 0, 10)


edges = st.floats(0, 1).map(lambda edge: round(edge, 3))
windows = st.tuples(edges, edges).filter(lambda pair: pair[0] != pair[1]).map(
    lambda pair: (min(pair), max(pair)))
spans = st.sampled_from(["always", "early:0.3", "late:0.7", "spread:0.25", "spread:1/3"])
rules = st.builds(lambda tier, window, span: Rule((256, tier), window, span),
                  st.sampled_from(TIERS), windows, spans)
a_gate = st.lists(rules, max_size=4).map(lambda items: hand_gate(*items))


def test_safe_bins_that_touch_make_one_window_and_cheaper_tiers_come_first() -> None:
    gate = gates.from_gap_map(measured_map())
    assert [(rule.route, rule.window) for rule in gate.rules] == [
        ((256, 192), (0.75, 1.0)), ((256, 224), (0.5, 1.0))]
    assert gate.measured and gate.margin == 0.05 and gate.source == measured_map().hash


def test_a_window_never_spans_a_gap_between_bins() -> None:
    gappy = with_verdicts({"demote:224": ["safe"] * 3}, [(0.1, 0.2), (0.2, 0.3), (0.4, 0.5)])
    gate = gates.from_gap_map(gappy)
    assert [rule.window for rule in gate.rules] == [(0.1, 0.3), (0.4, 0.5)]
    assert all_open(gate, 0.35) is None


@given(words=st.lists(st.sampled_from(["safe", "unsafe", "undecided", "no signal"]),
                      min_size=8, max_size=8))
@settings(deadline=None)
def test_a_measured_gate_opens_exactly_on_the_safe_bins(words: list[str]) -> None:
    bins = [(index / 8, (index + 1) / 8) for index in range(8)]
    gate = gates.from_gap_map(with_verdicts({"demote:224": words}, bins))
    for (low, high), word in zip(bins, words, strict=True):
        for sigma in (low, (low + high) / 2):
            assert (all_open(gate, sigma) is not None) == (word == verdict.SAFE)


def test_diagnostic_arms_open_nothing() -> None:
    gate = gates.from_gap_map(with_verdicts({"repromote:192": ["safe"], "null": ["safe"]},
                                            [(0.0, 1.0)]))
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
        None, second, first, second, None]
    assert gates.decide(gate, 0.7, {224}, 0, 10) is second
    assert gates.decide(gate, 0.7, set(), 0, 10) is None


@pytest.mark.parametrize("span, opened", [
    ("always", range(10)), ("early:0.3", range(3)), ("late:0.3", range(7, 10)),
    ("late:0.7", range(3, 10)), ("spread:0.3", [3, 6, 9]), ("spread:1", range(10)),
    ("early:1", range(10)),
])
def test_spans_open_the_steps_they_name(span: str, opened) -> None:
    assert [step for step in range(10) if gates.span_open(span, step, 10)] == list(opened)


@given(percent=st.integers(1, 100), steps=st.integers(1, 400))
@settings(deadline=None, max_examples=50)
def test_spans_are_exact_fractions(percent: int, steps: int) -> None:
    text = f"{percent / 100}"
    count = {kind: sum(gates.span_open(f"{kind}:{text}", step, steps) for step in range(steps))
             for kind in ("early", "late", "spread")}
    assert count["spread"] == percent * steps // 100
    assert count["early"] == -(-percent * steps // 100)
    assert count["late"] == percent * steps // 100


@pytest.mark.parametrize("span", ["", "sometimes", "early", "early:0", "late:1.5", "spread:-0.5",
                                  "early:x", "always:0.5", "late:1/0"])
def test_a_span_that_cannot_be_read_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="always, early:q"):
        Rule((256, 192), (0.0, 1.0), span)


@pytest.mark.parametrize("route, sentence", [((256, 256), "does not go down"),
                                             ((192, 256), "does not go down"),
                                             ((256, 248), "above 0.94")])
def test_a_route_that_goes_up_or_saves_nothing_is_refused(route: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Rule(route, (0.0, 1.0))


@pytest.mark.parametrize("window", [(-0.1, 0.5), (0.5, 1.1), (0.5, 0.5), (0.6, 0.5),
                                    (float("nan"), 0.5)])
def test_an_impossible_window_is_refused(window: tuple) -> None:
    with pytest.raises(ValueError, match="sigma window"):
        Rule((256, 192), window)


@given(gate=a_gate, seed=st.integers(0, 100))
@settings(deadline=None, max_examples=15)
def test_probability_equals_brute_force(gate: Gate, seed: int) -> None:
    density, steps, count = SigmaDensity("logit_normal", mean=0.3, std=0.9), 30, 2500
    rng = np.random.default_rng(seed)
    hits = dict.fromkeys(gate.rules, 0)
    for u in rng.random(count):
        rule = gates.decide(gate, density.quantile(u), TIERS, int(rng.integers(steps)), steps)
        if rule is not None:
            hits[rule] += 1
    shares = gates.probability(gate, density, steps)
    assert len(shares) == len(gate.rules)
    for rule in set(gate.rules):
        share = sum(share for other, share in zip(gate.rules, shares, strict=True) if other == rule)
        assert abs(hits[rule] / count - share) < 5 * np.sqrt(max(share, 1 / count) / count)


def test_predicted_saving_weighs_shares_by_cost() -> None:
    gate = hand_gate(Rule((256, 192), (0.6, 0.9)), Rule((256, 224), (0.5, 1.0), "late:0.5"))
    uniform = SigmaDensity("uniform")
    assert gates.probability(gate, uniform) == pytest.approx([0.3, 0.1])
    saving = gates.predicted_saving(gate, uniform, {256: 256, 224: 196, 192: 144})
    assert saving == pytest.approx(0.3 * (1 - 144 / 256) + 0.1 * (1 - 196 / 256))
    with pytest.raises(ValueError, match="tier 192"):
        gates.predicted_saving(gate, uniform, {256: 1.0, 224: 0.8})


def test_an_empty_gate_saves_nothing() -> None:
    assert gates.probability(hand_gate(), SigmaDensity()) == []
    assert gates.predicted_saving(hand_gate(), SigmaDensity(), {256: 1.0}) == 0


@given(gate=a_gate)
@settings(deadline=None, max_examples=20)
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
