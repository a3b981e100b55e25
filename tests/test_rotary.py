"""Rotary alignment as numbers: thresholds, shares, factors, and arms that carry a mode."""

from __future__ import annotations

import nets
import numpy as np
import pytest
import synthetic
import torch
from hypothesis import given
from hypothesis import strategies as st

from demotion import arms, gap_map, gate, plots, probe, rotary, states, train

FREQUENCIES = 10000.0 ** -torch.linspace(0, 54 / 56, 28, dtype=torch.float64)


def factors(scale, edge, mode, sigma, frequencies=FREQUENCIES):
    kept = rotary.kept_share(frequencies, edge, mode, sigma)
    return rotary.frequency_factors(kept, scale)


def test_the_gate_on_sigma_has_the_published_values():
    for sigma, expected in ((0.21, 0.20), (0.34, 0.48), (0.46, 0.71), (0.59, 0.88), (1.0, 1.0)):
        assert rotary.mu(sigma) == pytest.approx(expected, abs=0.005)
    assert rotary.mu(rotary.SIGMA_C) == 0.5 and rotary.mu(0.0) == 0.0


def test_interpolation_scales_every_band():
    assert (factors(1.5, 48, "pi", 0.7) == 1.5).all()


def test_a_scale_of_one_is_exactly_one_where_a_band_is_whole():
    for mode in rotary.MODES:
        kept = rotary.kept_share(FREQUENCIES, 48, mode, 0.7)
        whole = (kept == 0) | (kept == 1)
        assert whole.any() and (rotary.frequency_factors(kept, 1.0)[whole] == 1).all()


def test_bands_follow_their_turns_over_the_demoted_edge():
    edge = 48
    turns = torch.tensor([0.2, 1.0, 2.5, 4.0, 9.0], dtype=torch.float64)
    found = factors(1.5, edge, "yarn", 0.3, turns * 2 * torch.pi / edge)
    torch.testing.assert_close(found, torch.tensor([1.5, 1.5, 1.25, 1.0, 1.0]).double())


def test_the_gated_thresholds_are_those_of_the_bands_times_mu():
    sigma, edge = 0.46, 48
    gated = factors(1.5, edge, "gated_yarn", sigma)
    torch.testing.assert_close(gated, factors(1.5, edge / rotary.mu(sigma), "yarn", sigma))
    assert not torch.equal(gated, factors(1.5, edge, "yarn", sigma))
    assert torch.equal(factors(1.5, edge, "gated_yarn", 1.0), factors(1.5, edge, "yarn", 1.0))


def test_without_noise_every_band_keeps_its_frequency_exactly():
    for sigma in (0.0, 1e-6):
        assert (factors(1.5, 48, "gated_yarn", sigma) == 1).all()


@given(st.floats(1, 4), st.integers(1, 256), st.sampled_from(rotary.MODES), st.floats(0, 1))
def test_factors_lie_between_one_and_the_scale_and_fall_with_frequency(scale, edge, mode, sigma):
    found = factors(scale, edge, mode, sigma)
    assert found.min() >= 1 - 1e-12 and found.max() <= scale + 1e-12
    assert (found.diff() >= -1e-12).all()  # the frequencies descend


def test_an_unknown_mode_is_refused_wherever_it_is_named():
    for make in (
        lambda: rotary.Alignment("ntk", (32, 32)),
        lambda: gate.by_hand(256, 192, (0.5, 1.0), rotary="ntk"),
    ):
        with pytest.raises(ValueError, match="'ntk' is unknown: use pi, yarn, gated_yarn or none"):
            make()


def test_an_aligned_arm_is_its_name_and_shares_the_plain_arms_noise():
    arm = arms.Arm.parse("demote:192+gated_yarn")
    assert arm == arms.Arm("demote", 192, "gated_yarn") and str(arm) == "demote:192+gated_yarn"
    assert arm.plain == arms.Arm("demote", 192)
    for shared in (True, False):
        plain, aligned = (
            probe.arm_noise(
                0, "image", (0.4, 0.6), 0, name, torch.Size((1, 4, 8, 8)), (6, 6), shared
            )
            for name in ("demote:6", "demote:6+yarn")
        )
        assert torch.equal(plain, aligned)


class Aligned(nets.TinyFlow):
    """Scales its velocity under an alignment, and keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, z, sigmas, contexts, rotary=None):
        self.seen.append((z, *sigmas, rotary))
        velocity = super().forward(z, sigmas, contexts)
        return velocity if rotary is None else velocity * z.square()


def test_an_aligned_arm_differs_from_its_plain_one_in_the_forward_alone():
    plain = nets.subject(1)
    latents = {**plain.latents, "demote:6+yarn": plain.latents["demote:6"]}
    subject = probe.Subject(plain.image, latents, dict.fromkeys(latents))
    model = Aligned()
    parts = {"all": list(model.parameters())}
    cell = probe.measure_cell(subject, (0.4, 0.6), 2, 0, True, model, parts, lambda: None)
    calls = dict(zip(latents, model.seen))
    (z, sigma, none), (same_z, same_sigma, alignment) = calls["demote:6"], calls["demote:6+yarn"]
    assert torch.equal(z, same_z) and sigma == same_sigma and none is None
    assert alignment == rotary.Alignment("yarn", (8, 8))
    gram, _ = cell.pooled()
    at = cell.arms.index
    assert gram[at("demote:6"), at("demote:6")] != gram[at("demote:6+yarn"), at("demote:6+yarn")]
    without = probe.measure_cell(plain, (0.4, 0.6), 2, 0, True, model, parts, lambda: None)
    np.testing.assert_allclose(gram[:4, :4], without.pooled()[0], rtol=1e-12)


def test_the_trainer_aligns_the_samples_of_a_rule_that_asks_for_it(tmp_path):
    def run(rule_rotary):
        model = Aligned()
        opened = gate.by_hand(256, 192, (0.5, 1.0), rotary=rule_rotary)
        settings = train.Settings(steps=12, learning_rate=1e-2)
        train.train(
            nets.pupils(),
            opened,
            settings,
            model,
            list(model.parameters()),
            states.States(tmp_path / f"{rule_rotary}", keep=1),
            lambda _: None,
        )
        return model

    model = run("pi")
    assert {sigma >= 0.5 for _, sigma, _ in model.seen} == {True, False}
    for z, sigma, alignment in model.seen:
        assert alignment == (rotary.Alignment("pi", (8, 8)) if sigma >= 0.5 else None)
        assert (z.shape[-1] == 6) == (sigma >= 0.5)
    assert not torch.equal(model.first.weight, run(None).first.weight)


WORLD = synthetic.World(
    {
        "demote:192+yarn": [0.01, 0.01, 0.3, 0.01],
        "demote:192": [0.3, 0.01, 0.3, 0.3],
        "demote:192+pi": [0.01, 0.3, 0.3, 0.01],
        "demote:224+pi": [0.3, 0.3, 0.01, 0.01],
    },
    spread=0.004,
    noise=0.5,
)
MAP = gap_map.gap_map(synthetic.measure(WORLD, parts=1))


def test_aligned_arms_are_routes_of_their_own_in_the_map_and_its_band():
    assert all(map(gap_map.is_route, MAP.arms)) and MAP.arms == list(WORLD.distances)
    assert len({gap.q_safe for gap in MAP.gaps}) == 1
    text = gap_map.summary(MAP)
    assert "256 -> 192 yarn " in text and "256 -> 192 " in text
    assert len(plots.png(plots.gap_map_figure(MAP))) > 10_000


def test_a_gate_aligns_only_the_bins_that_are_not_safe_without():
    """In a tier the plain arm first, then the aligned ones in the order of the map."""
    made = gate.from_gap_map(MAP)
    found = [(rule.route[1], rule.rotary, rule.window) for rule in made.rules]
    assert found == [
        (192, None, (0.25, 0.5)),
        (192, "yarn", (0.0, 0.25)),
        (192, "yarn", (0.75, 1.0)),
        (224, "pi", (0.5, 1.0)),
    ]
    assert made.measured and "rotary yarn" in gate.describe(made)


def test_a_gate_keeps_its_alignments_on_disk(tmp_path):
    made = gate.from_gap_map(MAP)
    made.save(tmp_path / "gate.json")
    assert gate.Gate.load(tmp_path / "gate.json") == made
