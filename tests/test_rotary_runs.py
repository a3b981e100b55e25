"""Probe and trainer with rotary alignment, on real model classes with the VAEs that fit them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_runs import TIER, counting, options, toy  # noqa: F401

from demotion import arms, gate, train

ALIGNED = arms.Arm("demote", 48, "yarn")


@pytest.fixture
def aligned_set(toy):  # noqa: F811
    _, training_set, _ = toy
    codec = training_set.codec
    # The latents of the plain arm are there: an alignment encodes nothing.
    without = replace(training_set, codec=Unused(codec.fingerprint))
    return replace(arms.add_arm(without, ALIGNED, lambda: None), codec=codec)


class Unused:
    def __init__(self, fingerprint):
        self.fingerprint = fingerprint


def test_an_aligned_arm_is_measured_beside_its_plain_one(toy, aligned_set, tmp_path):  # noqa: F811
    from pack.host import probing

    model, _, _ = toy
    with torch.inference_mode():
        measured, _ = probing.run(model, aligned_set, options(), tmp_path, counting([], []))
    for cell in measured.cells:
        plain, aligned = cell.arms.index("demote:48"), cell.arms.index("demote:48+yarn")
        assert cell.grids[plain] == cell.grids[aligned]
        gram = cell.gram.sum(0).sum((0, 2))
        assert np.isfinite(gram).all()
        assert abs(gram[plain, plain] / gram[aligned, aligned] - 1) > 1e-4


def test_a_rule_with_an_alignment_trains_another_lora(toy, tmp_path):  # noqa: F811
    from pack.host import training

    model, training_set, _ = toy
    settings = train.Settings(steps=3, learning_rate=1e-3)

    def trained(rotary):
        opened = gate.by_hand(TIER, 48, (0.0, 1.0), rotary=rotary)
        chosen = training.Options(settings, 2, 2.0, "")
        with torch.inference_mode():
            return training.run(
                model, training_set, opened, chosen, tmp_path, training.Watch()
            )

    plain, aligned = trained(None), trained("pi")
    assert "rotary pi" in aligned.report and "rotary" not in plain.report
    assert "rotary pi" in aligned.metadata["demotion_gate"]
    if type(model.model).__name__ != "Anima":  # no two loads of its toy are the same model
        assert plain.weights.fingerprint != aligned.weights.fingerprint
        shutil.rmtree(tmp_path)
        assert plain.weights.fingerprint == trained(None).weights.fingerprint


def test_alignment_is_refused_before_time_is_spent(toy, aligned_set, tmp_path, monkeypatch):  # noqa: F811
    from pack.host import probing, rotary, training

    model, training_set, _ = toy
    opened = gate.by_hand(TIER, 48, (0.0, 1.0), rotary="pi")
    chosen = training.Options(train.Settings(steps=1, learning_rate=1e-3), 2, 2.0, "")

    class Unstarted(training.Watch):
        def start(self, plan):
            pytest.fail("the run began")

    def probe(model, the_set):
        probing.run(model, the_set, options(), tmp_path, pytest.fail)

    def learn(model):
        training.run(model, training_set, opened, chosen, tmp_path, Unstarted())

    node_made = rotary.align_model(model, "pi", (64, 64))
    for attempt in (lambda: probe(node_made, training_set), lambda: learn(node_made)):
        with pytest.raises(ValueError, match="connect the model before it"):
            attempt()
    monkeypatch.setattr(rotary, "DOORS", {})
    for attempt in (lambda: probe(model, aligned_set), lambda: learn(model)):
        with pytest.raises(ValueError, match="cannot be offered for a"):
            attempt()
