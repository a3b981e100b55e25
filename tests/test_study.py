"""The arms of a study, its rows, table and figure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demotion import gate, plots, study, train

GATE = gate.by_hand(256, 192, (0.65, 0.95), after=gate.by_hand(256, 224, (0.5, 1.0)))


def history(seconds, tiers, validation=()):
    """A run of these times, of samples of 16 cells that are 9 where demoted."""
    return train.History(
        losses=[1.0] * len(seconds),
        tiers=tiers,
        cells=[16 - 7 * bool(demoted) for demoted in tiers],
        native_cells=[16] * len(seconds),
        seconds=seconds,
        validation=list(validation),
    )


@pytest.fixture(scope="module")
def made() -> study.Study:
    found = {"native": 1.0, "twin": 0.98, "other seed": 0.1}
    rows = []
    for index, arm in enumerate(study.arms(GATE)):
        took = history([9.0] + [1.0 - 0.1 * index] * 4, [[]] * 5, [(0, 1.5), (5, 1.25)])
        took.cells, took.native_cells = [100 - 3 * index], [100]
        rows.append(study.row(arm, took, index / 20, found.get(arm.name, 0.5)))
    return study.Study(rows, "A setting.")


def test_a_study_has_its_references_first_and_every_route_always_demoted():
    arms = study.arms(GATE)
    assert [arm.name for arm in arms] == [
        "native",
        "twin",
        "other seed",
        "gated",
        "gated, late:0.5",
        "gated, late:0.5 by mass",
        "always 224",
        "always 192",
    ]
    assert [arm.gate for arm in arms[:3]] == [None] * 3
    assert [arm.other_seed for arm in arms] == [arm.name == "other seed" for arm in arms]
    assert arms[3].gate == GATE
    assert len({arm.stem for arm in arms}) == len(arms)
    assert all(arm.stem.replace(".", "").replace("_", "").isalnum() for arm in arms)


def test_late_arms_have_the_rules_of_the_gate_in_the_last_half():
    for arm, span in zip(study.arms(GATE)[4:6], ("late:0.5", "late:0.5 by mass")):
        assert arm.gate.rules == tuple(replace(rule, span=span) for rule in GATE.rules)
        steps = [gate.decide(arm.gate, 0.8, {192, 224}, n, gate.Course(10)) for n in range(10)]
        assert [rule is not None for rule in steps] == [False] * 5 + [True] * 5


def test_an_always_arm_demotes_every_sigma_with_the_routes_own_alignment():
    rules = (*GATE.rules, replace(GATE.rules[0], window=(0.1, 0.2), rotary="yarn"))
    always = study.arms(replace(GATE, rules=rules))[6:]
    assert [arm.name for arm in always] == ["always 224", "always 192", "always 224 yarn"]
    for arm, rotary in zip(always, (None, None, "yarn")):
        (rule,) = arm.gate.rules
        assert rule.window == (0.0, 1.0) and rule.span == "always" and rule.rotary == rotary
        assert not arm.gate.measured


def test_a_gate_without_rules_is_nothing_to_study():
    with pytest.raises(ValueError, match="no rule, so there is nothing to study"):
        study.arms(replace(GATE, rules=()))


@given(
    costs=st.tuples(*[st.floats(0.01, 100.0)] * 3),
    kinds=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_a_steps_time_is_the_mean_over_the_steps_whatever_their_order(
    costs: tuple[float, ...], kinds: list[int], order: random.Random
) -> None:
    tiers = [[192] * kind for kind in kinds]
    steps = list(zip([costs[kind] for kind in kinds], tiers))
    order.shuffle(steps)
    seconds, tiers = map(list, zip((1e6, []), *steps))
    expected = sum(seconds[1:]) / len(kinds)
    assert study.step_seconds(history(seconds, tiers)) == pytest.approx(expected)


def test_a_stall_does_not_count_and_nor_does_the_first_step():
    native, demoted = [1.0, 1.0, 100.0], [0.5, 0.5, 70.0]
    took = history([50.0, *native, *demoted], [[], [], [], [], [192], [192], [192]])
    assert study.step_seconds(took) == 0.75


def test_a_row_says_what_the_history_holds():
    arm = study.arms(GATE)[3]
    losses = [(0, 1.5), (2, 1.4), (4, 1.25)]
    found = study.row(arm, history([1.0] * 4, [[], [224], [192], []], losses), 0.2, 0.7)
    assert found.saved == pytest.approx(14 / 64)
    assert found.validation == (1.5, 1.25) and found.predicted == 0.2 and found.cosine == 0.7
    assert found.rules == [str(rule) for rule in GATE.rules]
    assert study.row(arm, history([1.0] * 4, [[]] * 4), 0.2, 0.7).validation is None


def test_a_study_is_read_as_it_was_written_and_a_strange_file_refused(made, tmp_path):
    made.save(tmp_path / "study.json")
    assert study.Study.load(tmp_path / "study.json") == made
    (tmp_path / "other.json").write_text('{"format": "demotion-gate", "version": 1}')
    with pytest.raises(ValueError, match="other.json"):
        study.Study.load(tmp_path / "other.json")


def test_the_table_has_a_row_an_arm_with_its_saving_relative_to_native(made):
    lines = study.table(made).splitlines()
    assert len({line.count("|") for line in lines[:10]}) == 1
    for line, index, row in zip(lines[2:], range(8), made.rows):
        assert line.startswith(f"| {row.arm} | {1 - 0.1 * index:.4f} s | {10 * index:.1f}% |")
        saved = f"| {5 * index:.1f}% | {3 * index:.1f}% | {row.cosine:.4f} |"
        assert f"{saved} 1.5000 -> 1.2500 |" in line
    assert "A setting." in lines and study.TIMES in lines
    assert any(line.startswith("gated, late:0.5 by mass: 256 -> 224") for line in lines)


@pytest.mark.parametrize("theme", plots.THEMES)
def test_the_figure_shows_realised_and_predicted_saving_and_the_references(made, theme):
    figure = plots.study_figure(made, theme)
    (axes,) = figure.axes
    across = [line.get_ydata()[0] for line in axes.lines[:2]]
    assert across == [0.98, 0.1]
    alone = [line for line in axes.lines if len(line.get_xdata()) == 1]
    shown = {(round(line.get_xdata()[0], 6), line.get_fillstyle()) for line in alone}
    expected = {(3.0 * index, "full") for index in range(3, 8)}
    expected |= {(5.0 * index, "none") for index in range(3, 8)}
    assert shown == expected
    text = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "twin: cosine 0.980" in text and "gated: 9.0 %, cosine 0.500" in text
    assert plots.png(figure) == plots.png(plots.study_figure(made, theme))
