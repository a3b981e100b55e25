"""The cost of a gate, told before a run, against closed forms and against drawn runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import arms, draws, gate_cost
from demotion import gate as gates
from demotion.gate import Course, Gate, Rule
from demotion.gate_cost import Picture

UNIFORM = draws.SigmaDensity()
LOGIT_NORMAL = draws.SigmaDensity("logit_normal", 0.3, 0.9)
DYNAMIC = draws.SigmaDensity("dynamic_shift")
SQUARE = Picture({256: 256, 224: 196, 192: 144})
# Off the route to 224; three times an epoch.
WIDE = Picture({256: 240, 192: 135}, repeats=3)


def hand_gate(*rules: Rule) -> Gate:
    return Gate(rules, measured=False, margin=None, source="by hand", native_tier=256)


TWO_ROUTES = hand_gate(
    Rule((256, 192), (0.7, 0.9), "late:0.5 by mass"), Rule((256, 224), (0.5, 1.0), "spread:0.5")
)
RISING = Course(300, list(range(300)))


def test_shares_and_saving_are_what_can_be_worked_out_by_hand() -> None:
    gate = hand_gate(Rule((256, 192), (0.7, 0.9)), Rule((256, 224), (0.5, 1.0), "late:0.4"))
    found = gate_cost.forecast(gate, UNIFORM, [SQUARE, WIDE], Course(10))
    assert found.shares == pytest.approx([0.2, 0.25 * 0.3 * 0.4])
    assert found.on_route == pytest.approx([1.0, 0.25])
    native = (256 + 3 * 240) / 4
    spared = (0.2 * (256 - 144) + 0.3 * 0.4 * (256 - 196) + 3 * 0.2 * (240 - 135)) / 4
    assert found.saving == pytest.approx(spared / native)


windows = st.tuples(st.integers(0, 9), st.integers(1, 10)).map(
    lambda pair: (pair[0] / 10, min(sum(pair), 10) / 10)
)
spans = st.sampled_from(["always", "early:0.3", "late:0.7", "spread:1/3", "late:0.5 by mass"])
rules = st.builds(
    lambda tier, window, span: Rule((256, tier), window, span),
    st.sampled_from([224, 192]),
    windows,
    spans,
)


@given(rules=st.lists(rules, max_size=4), seed=st.integers(0, 100), rising=st.booleans())
@settings(max_examples=15)
def test_shares_are_those_of_samples_drawn_one_by_one(
    rules: list[Rule], seed: int, rising: bool
) -> None:
    gate, steps, count = hand_gate(*rules), 30, 2500
    course = Course(steps, list(range(steps)) if rising else None)
    found = gate_cost.forecast(gate, LOGIT_NORMAL, [SQUARE], course)
    rng = np.random.default_rng(seed)
    hits = np.zeros(len(rules))
    for u in rng.random(count):
        sigma, step = LOGIT_NORMAL.quantile(u), int(rng.integers(steps))
        rule = gates.decide(gate, sigma, SQUARE.tokens, step, course)
        if rule is not None:
            hits[rules.index(rule)] += 1
    error = 5 * np.sqrt(np.maximum(found.shares, 1 / count) / count)
    assert (abs(hits / count - found.shares) < error).all()


@pytest.mark.parametrize("density", [LOGIT_NORMAL, DYNAMIC], ids=str)
def test_a_drawn_run_is_as_told(density: draws.SigmaDensity) -> None:
    """Samples drawn one by one as the trainer draws them; five standard errors."""
    pictures, batch, runs = [SQUARE, WIDE], 3, 10
    found = gate_cost.forecast(TWO_ROUTES, density, pictures, RISING, batch)
    rng, steps = np.random.default_rng(0), RISING.steps * runs
    taken, tokens, natives = np.zeros(2), [], []
    for step in range(steps):
        demoted = 0
        for _ in range(batch):
            picture = pictures[int(rng.random() < 0.75)]
            sigma = density.at(picture.tokens[256]).quantile(rng.random())
            rule = gates.decide(TWO_ROUTES, sigma, picture.tokens, step % RISING.steps, RISING)
            if rule:
                taken[TWO_ROUTES.rules.index(rule)] += 1
                demoted += 1
            native = picture.tokens[256]
            tokens.append((picture.tokens[rule.route[1]] if rule else native, native))
        natives.append((demoted == 0, demoted == batch))
    error = 5 * 0.5 / np.sqrt(steps * batch)
    assert taken / (steps * batch) == pytest.approx(found.shares, abs=error)
    spent, native = np.sum(tokens, axis=0)
    assert 1 - spent / native == pytest.approx(found.saving, abs=error)
    assert np.mean(natives, axis=0) == pytest.approx(
        [found.native, found.demoted], abs=5 * 0.5 / np.sqrt(steps)
    )


def test_a_step_of_one_sample_is_never_mixed() -> None:
    found = gate_cost.forecast(TWO_ROUTES, UNIFORM, [SQUARE], Course(10), batch_size=1)
    assert found.native + found.demoted == pytest.approx(1)
    assert found.native == pytest.approx(1 - found.shares.sum())


@pytest.mark.parametrize("density", [LOGIT_NORMAL, DYNAMIC], ids=str)
def test_the_mass_in_each_cell_is_that_of_each_pictures_own_density(density) -> None:
    found = gate_cost.forecast(TWO_ROUTES, density, [SQUARE, WIDE], RISING)
    assert {0.5, 0.7, 0.9, 1.0} <= {*found.edges} and np.diff(found.edges).min() > 1e-6
    of_tokens = {
        tokens: np.diff([density.at(tokens).cdf(edge) for edge in found.edges])
        for tokens in (256, 240)
    }
    assert found.mass.sum(1) == pytest.approx(
        (of_tokens[256] + 3 * of_tokens[240]) / 4, rel=1e-9, abs=1e-15
    )


def test_an_empty_gate_costs_what_native_training_does() -> None:
    found = gate_cost.forecast(hand_gate(), LOGIT_NORMAL, [SQUARE, WIDE], RISING, batch_size=4)
    assert (found.saving, found.native, found.demoted) == pytest.approx((0, 1, 0))
    assert "every step trains native" in gate_cost.report(
        hand_gate(), LOGIT_NORMAL, found, Course(10), 4
    )


def a_set(*grids: tuple[int, int]) -> arms.TrainingSet:
    items = tuple(
        arms.Item(
            image=str(number),
            name=f"picture {number}",
            picture=Path(),
            mask=None,
            size=(8 * native[0], 8 * native[1]),
            native=native,
            caption="",
            repeats=number,
        )
        for number, native in enumerate(grids, 1)
    )
    return arms.TrainingSet(items, 256, 8, 2, None, Path())


def test_pictures_of_a_set_have_the_tokens_of_their_grids_where_they_are_on_route() -> None:
    # A square, and a picture too small for the tier, which is on no route.
    found = gate_cost.pictures_of(a_set((32, 32), (20, 20)), TWO_ROUTES)
    assert found == [Picture({256: 256, 192: 144, 224: 196}, 1), Picture({256: 100}, 2)]


def test_a_gate_of_another_native_tier_is_refused() -> None:
    other = replace(a_set((32, 32)), native_tier=320)
    with pytest.raises(ValueError, match="starts at tier 256, and the set's native tier is 320"):
        gate_cost.pictures_of(other, TWO_ROUTES)


def test_the_report_names_each_rule_the_density_and_what_saving_means() -> None:
    found = gate_cost.forecast(TWO_ROUTES, DYNAMIC, [SQUARE, WIDE], RISING, 4)
    text = gate_cost.report(TWO_ROUTES, DYNAMIC, found, RISING, 4)
    for part in (
        "not measured",
        "Rules 1 and 2 overlap for sigma 0.7 to 0.9",
        "300 steps of 4",
        "shifted by the tokens of each picture",
        f"Rule 1 takes {found.shares[0]:.1%} of the samples; 100.0% of the pictures",
        f"Rule 2 takes {found.shares[1]:.1%} of the samples; 25.0% of the pictures",
        f"Tokens saved: {found.saving:.1%}",
        "linear in its picture tokens",
        f"{found.native:.1%} all native",
    ):
        assert part in text
