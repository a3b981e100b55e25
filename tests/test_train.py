"""The training loop on a toy model."""

from __future__ import annotations

import copy

import nets
import pytest
import torch

from demotion import draws, gate, train

CLOSED = gate.Gate((), measured=False, margin=None, source="none", native_tier=256)
OPEN = gate.by_hand(256, 192, (0.0, 1.0))
HALF = gate.by_hand(256, 192, (0.5, 1.0))


def run(tmp_path, opened=CLOSED, tick=lambda loss: None, name="state.pt", pupils=None, **changes):
    model = nets.TinyFlow()
    settings = train.Settings(**{"steps": 12, "learning_rate": 1e-2, "batch_size": 2} | changes)
    parameters = list(model.parameters())
    history = train.train(
        pupils or nets.pupils(), opened, settings, model, parameters, tmp_path / name, tick
    )
    return [parameter.detach().clone() for parameter in parameters], history


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second))


def test_two_runs_are_bit_identical_and_a_seed_changes_them(tmp_path):
    assert same(run(tmp_path)[0], run(tmp_path)[0])
    assert not same(run(tmp_path)[0], run(tmp_path, seed=1)[0])


def test_a_gate_that_never_opens_is_bit_identical_to_none(tmp_path):
    elsewhere = gate.by_hand(256, 128, (0.0, 1.0))
    assert same(run(tmp_path)[0], run(tmp_path, elsewhere)[0])


def test_an_open_gate_demotes_every_sample_and_saves_its_tokens(tmp_path):
    trained, history = run(tmp_path, OPEN)
    assert history.demoted == [2] * 12
    assert history.saving == pytest.approx(1 - 36 / 64)
    assert not same(trained, run(tmp_path)[0])


def test_a_mixed_batch_demotes_sample_by_sample(tmp_path):
    _, history = run(tmp_path, HALF, steps=40)
    assert 1 in history.demoted
    assert 0.2 < sum(history.demoted) / 80 < 0.8


def test_a_batch_is_the_mean_of_its_samples(tmp_path):
    """One SGD-like check: gradients of a batch equal the mean of the samples' gradients."""
    pupils, model = nets.pupils(), nets.TinyFlow()
    settings = train.Settings(steps=1, learning_rate=0.0, batch_size=3, max_norm=1e9)
    seen = []

    def spy(z, sigma, context):
        seen.append((z.clone(), sigma))
        return model(z, sigma, context)

    history = train.train(
        pupils, HALF, settings, spy, list(model.parameters()), tmp_path / "s", lambda _: None
    )
    singles = []
    for sample, (z, sigma) in enumerate(seen):
        fresh = draws.stream("train noise", 0, 0, sample)
        noise = draws.standard_normal(fresh, (1, 4, 8, 8))
        noise = draws.carry_noise(noise, tuple(z.shape[-2:]), draws.stream("unused"))
        latent = (z - sigma * noise) / (1 - sigma)
        singles.append(draws.velocity_loss(model(z, sigma), latent, noise).item())
    assert history.losses[0] == pytest.approx(sum(singles) / 3, rel=1e-4)


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path):
    whole, history = run(tmp_path, HALF)

    def stop(loss):
        stop.steps += 1
        if stop.steps == 5:
            raise KeyboardInterrupt

    stop.steps = 0
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, HALF, tick=stop, name="stopped.pt")
    assert (tmp_path / "stopped.pt").exists()
    ticks = []
    resumed, again = run(tmp_path, HALF, tick=ticks.append, name="stopped.pt")
    assert same(whole, resumed)
    assert again.losses == history.losses and len(ticks) == 7
    assert not (tmp_path / "stopped.pt").exists()


def test_an_epoch_shows_every_picture_as_often_as_its_repeats(tmp_path):
    order = train._Order([1, 2, 3], seed=0)
    shown = [order[n] for n in range(12)]
    assert sorted(shown[:6]) == sorted(shown[6:]) == [0, 1, 1, 2, 2, 2]
    assert shown[:6] != shown[6:]


def test_gates_change_only_what_they_demote(tmp_path):
    """With one seed the native steps of a gated run see the same noise, sigma and picture."""

    def spy(opened):
        model, seen = nets.TinyFlow(), []
        settings = train.Settings(steps=8, learning_rate=0.0)
        train.train(
            nets.pupils(),
            opened,
            settings,
            lambda z, sigma, c: seen.append((z.clone(), sigma)) or model(z, sigma, c),
            list(model.parameters()),
            tmp_path / "s",
            lambda _: None,
        )
        return seen

    for (z, sigma), (gated, gated_sigma) in zip(spy(CLOSED), spy(HALF)):
        assert sigma == gated_sigma
        assert (gated.shape[-1] == 6) == (sigma >= 0.5)
        if sigma < 0.5:
            assert torch.equal(z, gated)


def test_loss_falls_where_there_is_something_to_learn(tmp_path):
    """One constant picture: the noise, and so the velocity, can be read off z."""
    constant = train.Pupil(torch.full((1, 4, 8, 8), 1.5), {}, {None: None})
    _, history = run(tmp_path, pupils=[constant], steps=300)
    assert sum(history.losses[-50:]) < 0.5 * sum(history.losses[:50])


def test_learning_rate_warms_up_and_comes_down():
    settings = train.Settings(steps=100, learning_rate=1.0, schedule="cosine", warmup_steps=10)
    assert settings.rate(0) == pytest.approx(0.1) and settings.rate(9) == 1.0
    assert settings.rate(55) == pytest.approx(0.5) and settings.rate(99) < 0.01


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    pupils = nets.pupils()
    pupils = [
        train.Pupil(copy.deepcopy(p.native).fill_(float("nan")), {}, {None: None}) for p in pupils
    ]
    with pytest.raises(ValueError, match="not finite at step 1"):
        run(tmp_path, pupils=pupils)
