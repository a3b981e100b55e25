"""The training loop on a toy model."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nets
import pytest
import torch

from demotion import draws, gate, states, train

CLOSED = gate.Gate((), measured=False, margin=None, source="none", native_tier=256)
OPEN = gate.by_hand(256, 192, (0.0, 1.0))
HALF = gate.by_hand(256, 192, (0.5, 1.0))
LATE = gate.by_hand(256, 192, (0.0, 1.0), span="late:0.25 by mass")


def run(folder, opened=CLOSED, tick=lambda history: None, pupils=None, model=None, **changes):
    """Trained parameters, history, average."""
    model = model or nets.TinyFlow()
    own = {"save_every", "held_out", "team"} & changes.keys()
    others = {name: changes.pop(name) for name in own}
    settings = train.Settings(**{"steps": 12, "learning_rate": 1e-2, "batch_size": 2} | changes)
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters] if settings.ema_decay else None
    history = train.train(
        pupils or nets.pupils(),
        opened,
        settings,
        model,
        parameters,
        states.States(folder, keep=2),
        tick,
        average=average,
        **others,
    )
    return [parameter.detach().clone() for parameter in parameters], history, average


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Spy(nets.TinyFlow):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, z, sigmas, contexts=()):
        self.seen += zip(z.clone().split(1), sigmas, contexts)
        return super().forward(z, sigmas, contexts)


class Sums:
    """A model's accumulated gradients, whenever one changes."""

    def __init__(self, model) -> None:
        self.model, self.seen = model, {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda tensor, name=name: self.seen.update({name: tensor.grad.clone()})
            )

    def last(self):
        return [self.seen[name] for name, _ in self.model.named_parameters()]


def stop_after(steps):
    def tick(history):
        if len(history.losses) == steps:
            raise KeyboardInterrupt

    return tick


def test_two_runs_are_bit_identical_and_a_seed_changes_them(tmp_path):
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert same(run(first)[0], run(second)[0])
    assert not same(run(first)[0], run(other, seed=1)[0])


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_a_closed_gate_is_bit_identical_to_none(tmp_path, optimizer):
    elsewhere = gate.by_hand(256, 128, (0.0, 1.0))
    never = gate.by_hand(256, 192, (0.0, 1.0), span="late:0.001")
    plain = run(tmp_path / "a", optimizer=optimizer)[0]
    assert same(plain, run(tmp_path / "b", elsewhere, optimizer=optimizer)[0])
    assert same(plain, run(tmp_path / "c", never, optimizer=optimizer)[0])


def test_an_open_gate_demotes_every_sample_and_saves_its_tokens(tmp_path):
    trained, history, _ = run(tmp_path / "a", OPEN)
    assert history.tiers == [[192, 192]] * 12 and history.demoted == [2] * 12
    assert history.saving == pytest.approx(1 - 36 / 64)
    assert not same(trained, run(tmp_path / "b")[0])


def test_a_mixed_batch_demotes_sample_by_sample(tmp_path):
    _, history, _ = run(tmp_path, HALF, steps=40)
    assert 1 in history.demoted
    assert 0.2 < sum(history.demoted) / 80 < 0.8


def test_a_late_span_by_mass_demotes_under_the_last_of_the_learning_rates_sum(tmp_path):
    settings = {"steps": 40, "schedule": "cosine", "warmup_steps": 8}
    _, history, _ = run(tmp_path, LATE, **settings)
    rates = [train.Settings(learning_rate=1e-2, **settings).rate(step) for step in range(40)]
    before = [sum(rates[:step]) / sum(rates) for step in range(40)]
    assert history.demoted == [2 * (mass >= 0.75) for mass in before]
    assert sum(map(bool, history.demoted)) > 10  # more than a quarter of the steps


def test_a_step_is_the_mean_of_its_samples_however_they_are_batched(tmp_path):
    """Six samples of two grids: as one batch, in batches, and one by one."""
    settings = {"steps": 1, "max_norm": 1e9}
    shapes = [(6, 1), (3, 2), (2, 3), (1, 6)]
    found = []
    for size, accumulation in shapes:
        model = nets.TinyFlow()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        sums = Sums(model)
        _, history, _ = run(
            tmp_path / f"{size}",
            HALF,
            model=model,
            batch_size=size,
            accumulation=accumulation,
            **settings,
        )
        found.append((history.losses[0], sums.last(), history.demoted))
        assert not same(before, list(model.parameters()))
    assert len({tuple(entry[2]) for entry in found}) == 1 and 0 < found[0][2][0] < 6
    for loss, gradients, _ in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for own, first in zip(gradients, found[0][1]):
            assert torch.allclose(own, first, rtol=1e-5, atol=1e-7)


def test_the_loss_is_that_of_the_named_streams(tmp_path):
    model = Spy()
    _, history, _ = run(tmp_path, HALF, model=model, steps=1, learning_rate=1e-30, batch_size=3)
    order = train.Order([pupil.repeats for pupil in nets.pupils()], 0)
    singles = []
    for index in range(3):
        pupil = nets.pupils()[order[index]]
        sigma = 1 - draws.stream("train sigma", 0, 0, index).random()
        latent = pupil.demoted[192] if sigma >= 0.5 else pupil.native
        noise = draws.standard_normal(draws.stream("train noise", 0, 0, index), (1, 4, 8, 8))
        noise = draws.carry_noise(noise, tuple(latent.shape[-2:]), draws.stream("unused"))
        z = draws.noised(latent, noise, sigma)
        assert any(level == sigma and torch.equal(shown, z) for shown, level, _ in model.seen)
        singles.append(draws.velocity_loss(model(z, [sigma]), latent, noise).item())
    assert history.losses[0] == pytest.approx(sum(singles) / 3, rel=1e-5)


def test_gates_change_only_what_they_demote(tmp_path):
    """With one seed the native steps of a gated run see the same noise, sigma and picture."""
    seen = []
    for name, opened in (("closed", CLOSED), ("half", HALF)):
        model = Spy()
        run(tmp_path / name, opened, model=model, steps=8, learning_rate=1e-30, batch_size=1)
        seen.append(model.seen)
    for (z, sigma, _), (gated, gated_sigma, _) in zip(*seen, strict=True):
        assert sigma == gated_sigma
        assert (gated.shape[-1] == 6) == (sigma >= 0.5)
        if sigma < 0.5:
            assert torch.equal(z, gated)


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path, optimizer):
    options = {"optimizer": optimizer, "ema_decay": 0.9, "caption_dropout": 0.3}
    options |= {"schedule": "cosine", "held_out": nets.pupils(1), "validate_every": 4}
    whole, history, average = run(tmp_path / "whole", HALF, **options)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", HALF, stop_after(5), **options)
    assert states.States(tmp_path / "stopped", 2).steps() == [5]
    ticks = []
    resumed, again, its_average = run(tmp_path / "stopped", HALF, ticks.append, **options)
    assert same(whole, resumed) and same(average, its_average)
    assert again.losses == history.losses and len(ticks) == 7
    assert again.validation == history.validation
    assert [step for step, _ in history.validation] == [0, 4, 8, 12]


def test_more_steps_go_on_from_the_end_of_a_finished_run(tmp_path):
    run(tmp_path / "short", HALF, steps=5)
    ticks = []
    longer, _, _ = run(tmp_path / "short", HALF, ticks.append)
    assert len(ticks) == 7 and same(longer, run(tmp_path / "whole", HALF)[0])
    assert run(tmp_path / "short", HALF, pytest.fail)[1].losses  # nothing is left to do


def test_the_last_states_are_kept_while_a_run_lasts_and_one_after_it(tmp_path):
    seen = []
    run(
        tmp_path,
        tick=lambda _: seen.append(states.States(tmp_path, 2).steps()),
        save_every=3,
    )
    assert seen[-1] == [6, 9] and states.States(tmp_path, 2).steps() == [12]
    assert not list(tmp_path.glob("*.part"))


WORKER = """
import sys, signal, os
sys.path[:0] = {path!r}
import conftest, test_train
from pathlib import Path
def tick(history):
    print(len(history.losses), flush=True)
test_train.run(Path(sys.argv[1]), test_train.HALF, tick, steps=400, save_every=7, ema_decay=.99)
"""


def worker(folder):
    code = WORKER.format(path=[str(Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)


def test_a_killed_run_loses_at_most_the_steps_since_its_last_state_and_ends_the_same(tmp_path):
    settings = {"steps": 400, "ema_decay": 0.99}
    whole, history, average = run(tmp_path / "whole", HALF, **settings)
    for steps in (1, 31, 200):
        process = worker(tmp_path / "killed")
        start = None
        for line in process.stdout:
            start = start or int(line)
            if int(line) >= steps:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = states.States(tmp_path / "killed", 2).steps()
        assert not kept or kept[-1] >= int(line) - 7
    resumed, again, its_average = run(tmp_path / "killed", HALF, save_every=7, **settings)
    assert same(whole, resumed) and same(average, its_average)
    assert again.losses == history.losses


def test_a_disk_that_fills_up_leaves_the_last_state_whole(tmp_path):
    """A limit on the size of files, as a full disk gives: nothing more can be written."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, HALF, stop_after(4))
    before = states.States(tmp_path, 2).path(4).read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(OSError, match="state of step 6 cannot.*free space.*state of step 4 is"):
            run(tmp_path, HALF, save_every=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["step_0000004.pt"]
    assert states.States(tmp_path, 2).path(4).read_bytes() == before
    assert same(run(tmp_path, HALF)[0], run(tmp_path / "whole", HALF)[0])


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_state(tmp_path):
    pupils = nets.pupils()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tick=stop_after(5))
    bad = [replace(pupil, native=pupil.native * float("nan")) for pupil in pupils]
    with pytest.raises(train.Diverged, match="not finite at step 6.*state is that of step 5"):
        run(tmp_path, pupils=bad)
    assert states.States(tmp_path, 2).steps() == [5]


def test_a_run_that_explodes_is_stopped(tmp_path):
    with pytest.raises(train.Diverged, match="grown 10-fold.*no state was kept"):
        run(tmp_path, steps=400, learning_rate=100.0, warmup_steps=200, max_norm=1e9)
    assert not states.States(tmp_path, 2).steps()


def test_an_epoch_shows_every_picture_as_often_as_its_repeats():
    order = train.Order([1, 2, 3], seed=0)
    shown = [order[n] for n in range(12)]
    assert sorted(shown[:6]) == sorted(shown[6:]) == [0, 1, 1, 2, 2, 2]
    assert shown[:6] != shown[6:]


def test_captions_are_dropped_as_often_as_asked_and_nothing_else_changes(tmp_path):
    pupils = [replace(pupil, context="caption", empty="empty") for pupil in nets.pupils()]
    seen = []
    for rate in (0.0, 0.25):
        model = Spy()
        run(
            tmp_path / f"{rate}",
            model=model,
            pupils=pupils,
            steps=200,
            learning_rate=1e-30,
            caption_dropout=rate,
        )
        seen.append(sorted(model.seen, key=lambda entry: entry[1]))
    contexts = [[context for _, _, context in run] for run in seen]
    assert set(contexts[0]) == {"caption"}
    assert 0.18 < contexts[1].count("empty") / 400 < 0.32
    for (z, sigma, _), (other, level, _) in zip(*seen, strict=True):
        assert sigma == level and torch.equal(z, other)


def test_two_processes_are_shown_what_one_would_be(tmp_path):
    """Each half of a team trains its own samples; together they are those of one process."""
    alone, halves = Spy(), [Spy(), Spy()]
    run(tmp_path / "one", HALF, model=alone, steps=3, learning_rate=1e-30, batch_size=4)
    for rank, model in enumerate(halves):
        run(
            tmp_path / f"{rank}",
            HALF,
            model=model,
            steps=3,
            learning_rate=1e-30,
            batch_size=4,
            team=train.Team(rank, 2),
        )

    def in_order(seen):
        return sorted(seen, key=lambda entry: entry[1])

    together = in_order(halves[0].seen + halves[1].seen)
    for (z, sigma, _), (other, level, _) in zip(in_order(alone.seen), together, strict=True):
        assert sigma == level and torch.equal(z, other)


def test_a_batch_that_a_team_cannot_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 samples a step cannot be shared by 2 processes"):
        run(tmp_path, batch_size=3, team=train.Team(0, 2))


def test_validation_is_the_same_number_in_every_run_with_the_same_weights(tmp_path):
    held_out = [replace(pupil, image=f"{n}") for n, pupil in enumerate(nets.pupils(2))]
    options = {"held_out": held_out, "validate_every": 6, "learning_rate": 1e-30}
    histories = [
        run(tmp_path / f"{seed}", seed=seed, weight_decay=0.0, **options)[1] for seed in (0, 1)
    ]
    assert histories[0].validation == histories[1].validation
    assert len({loss for _, loss in histories[0].validation}) == 1
    assert histories[0].losses != histories[1].losses


def test_loss_and_validation_fall_where_there_is_something_to_learn(tmp_path):
    """One constant picture: the noise, and so the velocity, can be read off z."""
    constant = train.Pupil(torch.full((1, 4, 8, 8), 1.5), {}, {None: None})
    for optimizer, rate in (("AdamW", 1e-2), ("Adafactor", 1e-2), ("Prodigy", 1.0)):
        _, history, _ = run(
            tmp_path / optimizer,
            pupils=[constant],
            steps=300,
            optimizer=optimizer,
            learning_rate=rate,
            held_out=[constant],
            validate_every=300,
        )
        assert sum(history.losses[-50:]) < 0.5 * sum(history.losses[:50]), optimizer
        assert history.validation[-1][1] < 0.5 * history.validation[0][1], optimizer


def test_the_moving_average_follows_its_recurrence(tmp_path):
    model, seen = nets.TinyFlow(), []
    first = [parameter.detach().clone() for parameter in model.parameters()]
    _, _, average = run(
        tmp_path,
        model=model,
        tick=lambda _: seen.append(
            [parameter.detach().clone() for parameter in model.parameters()]
        ),
        ema_decay=0.5,
    )
    expected = first
    for step, values in enumerate(seen):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, values)]
    for found, value in zip(average, expected, strict=True):
        assert torch.allclose(found, value, atol=1e-7)


def test_learning_rate_warms_up_and_comes_down():
    settings = train.Settings(steps=110, learning_rate=1.0, schedule="cosine", warmup_steps=10)
    assert settings.rate(0) == pytest.approx(0.1) and settings.rate(9) == 1.0
    assert settings.rate(60) == pytest.approx(0.5) and settings.rate(109) < 0.01
    linear = replace(settings, schedule="linear")
    assert linear.rate(60) == pytest.approx(0.5) and linear.rate(109) == pytest.approx(0.01)
