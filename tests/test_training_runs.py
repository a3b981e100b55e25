"""Whole training runs on a real model class: what is kept, shown and refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_runs import FLUX, TIER, toy  # noqa: F401

from demotion import gate, states, train

pytestmark = FLUX
OPEN = gate.by_hand(TIER, 48, (0.3, 1.0))


class Seen:
    """What a run tells while it lasts; stops it after some steps."""

    def __init__(self, stop=None):
        self.stop, self.starts, self.steps, self.loras, self.pictures = stop, [], [], {}, {}

    def start(self, plan):
        self.starts.append((plan.steps, plan.done))
        self.plan = plan

    def step(self, history):
        self.steps.append(len(history.losses))
        if len(history.losses) == self.stop:
            raise KeyboardInterrupt

    def lora(self, step, weights, metadata):
        self.loras[step] = weights.fingerprint

    def picture(self, step, pixels):
        self.pictures[step] = pixels


@pytest.fixture
def runs(toy, tmp_path):  # noqa: F811
    """Runs with changes to settings and options in a folder of their own: what is seen, result."""
    from pack.host import training

    model, training_set, _ = toy

    def run(name, seen=None, the_set=training_set, opened=OPEN, **changes):
        own = train.Settings.__dataclass_fields__.keys() & changes.keys()
        settings = {"steps": 6, "learning_rate": 1e-2} | {key: changes.pop(key) for key in own}
        chosen = training.Options(train.Settings(**settings), 2, 2.0, "", **changes)
        seen = seen or Seen()
        with torch.inference_mode():
            return seen, training.run(model, the_set, opened, chosen, tmp_path / name, seen)

    return run


def kept(folder):
    (run,) = folder.iterdir()
    return states.States(run, 1).steps()


def sampled(toy):  # noqa: F811
    from pack.host import sampling

    return sampling.Sampling(toy[1].items[0].conditioning, steps=3, cfg=1.0)


def test_a_closed_gate_is_bit_identical_to_training_without_one(runs):
    """No rule; a span that never opens; a window that no sample of the run falls into."""
    empty = gate.Gate((), measured=False, margin=None, source="none", native_tier=TIER)
    never = gate.by_hand(TIER, 48, (0.0, 1.0), span="late:0.01")
    narrow = gate.by_hand(TIER, 48, (0.5, 0.5001))
    without = runs("without", opened=empty)[1]
    for name, opened in (("never", never), ("narrow", narrow)):
        closed = runs(name, opened=opened)[1]
        assert closed.weights.fingerprint == without.weights.fingerprint
        assert sum(closed.history.demoted) == 0
    assert runs("open")[1].weights.fingerprint != without.weights.fingerprint


def test_pictures_and_saves_on_the_way_change_no_bit(toy, runs):  # noqa: F811
    _, plain = runs("plain")
    seen, watched = runs("watched", sampling=sampled(toy), sample_every=2, save_every=2)
    assert watched.weights.fingerprint == plain.weights.fingerprint
    assert watched.history.losses == plain.history.losses
    assert sorted(seen.pictures) == [0, 2, 4, 6] and sorted(seen.loras) == [2, 4]
    assert seen.steps == list(range(7))


def test_a_sample_is_what_comfyui_makes_of_the_lora_so_far(toy, runs, tmp_path, comfy):  # noqa: F811
    """The picture after the last step, against ComfyUI's sampler on the model with the file."""
    import comfy.sample
    import comfy.sd

    seen, result = runs("run", sampling=sampled(toy), sample_every=100)
    model, training_set, _ = toy
    path = tmp_path / "lora.safetensors"
    result.weights.save(path, {})
    with torch.inference_mode():
        patched, _ = comfy.sd.load_lora_for_models(
            model, None, comfy.utils.load_torch_file(str(path)), 1.0, 0.0
        )
        pictures = []
        for one in (model, patched):
            latent = torch.zeros(1, *training_set.latent(training_set.items[0], arms_src()).shape)
            conditioning = training_set.items[0].conditioning
            noise = comfy.sample.prepare_noise(latent, 0)
            out = comfy.sample.sample(
                one, noise, 3, 1.0, "euler", "simple", conditioning, conditioning, latent, seed=0
            )
            pictures.append(training_set.codec.decode(out[0]).astype(int))
    assert np.abs(seen.pictures[0] - pictures[0]).max() <= 1
    assert np.abs(seen.pictures[6] - pictures[1]).max() <= 1
    assert np.abs(pictures[0] - pictures[1]).max() > 10


def arms_src():
    from demotion import arms

    return arms.SRC


def test_a_cancelled_run_goes_on_to_the_same_lora(runs, tmp_path):
    _, whole = runs("whole", ema_decay=0.9)
    with pytest.raises(KeyboardInterrupt):
        runs("stopped", Seen(stop=4), ema_decay=0.9)
    assert kept(tmp_path / "stopped") == [4]
    seen, resumed = runs("stopped", ema_decay=0.9)
    assert seen.starts == [(6, 4)] and seen.steps == [5, 6]
    assert resumed.weights.fingerprint == whole.weights.fingerprint
    assert "Taken up after step 4." in resumed.report
    assert whole.weights.fingerprint != runs("raw")[1].weights.fingerprint


def test_a_run_goes_on_where_the_threads_are_others_and_says_so(runs, tmp_path):
    """As after an update of torch, or from several processes to one."""
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        runs("run", Seen(stop=4))
    torch.set_num_threads(threads + 1)
    try:
        seen, resumed = runs("run")
    finally:
        torch.set_num_threads(threads)
    assert seen.starts == [(6, 4)]
    said = f"From step 5 on the run had threads {threads + 1} (before: {threads}), so that it is"
    assert said in resumed.report
    assert "not bit for bit" not in runs("whole")[1].report


def test_a_run_says_at_its_start_what_its_gate_should_save(runs):
    seen, _ = runs("open")
    assert seen.plan.saving == pytest.approx(0.7 * (1 - 48**2 / TIER**2))
    assert runs("native", opened=None)[0].plan.saving == 0


def test_more_steps_go_on_and_a_fresh_run_starts_again(runs, tmp_path):
    runs("run")
    seen, longer = runs("run", steps=9)
    assert seen.starts == [(9, 6)] and "planned for 6 from step 1, 9 from step 7" in longer.report
    assert longer.weights.fingerprint == runs("whole", steps=9)[1].weights.fingerprint
    again, _ = runs("run", steps=9)
    assert again.steps == []  # nothing was left to do
    fresh, result = runs("run", steps=9, fresh=True)
    assert fresh.starts == [(9, 0)]
    assert result.weights.fingerprint == longer.weights.fingerprint


def test_another_run_is_not_taken_up(runs, toy, tmp_path):  # noqa: F811
    _, training_set, _ = toy
    other = replace(training_set, empty=training_set.items[0].conditioning)
    runs("run")
    changes = [
        {"seed": 1},
        {"learning_rate": 2e-2},
        {"optimizer": "Adafactor"},
        {"accumulation": 2},
        {"held_out": 1},
        {"algorithm": "LoHa"},
        {"deterministic": True},
        {"opened": gate.by_hand(TIER, 48, (0.4, 1.0))},
        {"the_set": other},
    ]
    for change in changes:
        assert runs("run", **change)[0].starts == [(6, 0)], change
    for change in ({"save_every": 3}, {"keep": 5}, {"validate_every": 2}):
        assert runs("run", **change)[0].starts == [(6, 6)], change


def test_a_deterministic_run_again_is_bit_identical_and_leaves_torch_as_it_was(runs, tmp_path):
    assert not torch.are_deterministic_algorithms_enabled()
    _, first = runs("run", deterministic=True)
    shutil.rmtree(tmp_path / "run")
    _, second = runs("run", deterministic=True)
    assert first.weights.fingerprint == second.weights.fingerprint
    assert not torch.are_deterministic_algorithms_enabled()


def test_held_out_pictures_are_not_trained_on_but_validate(runs, toy):  # noqa: F811
    from pack.host import training

    _, training_set, _ = toy
    items, apart = training.split(training_set, 1)
    assert {item.image for item in items} | {item.image for item in apart} == {
        item.image for item in training_set.items
    }
    turned = replace(training_set, items=training_set.items[::-1])
    assert training.split(turned, 1)[1] == apart
    _, result = runs("run", held_out=1, validate_every=3, max_norm=1.0)
    assert [step for step, _ in result.history.validation] == [0, 3, 6]
    assert "Validation loss on 1 held-out pictures" in result.report


def test_epochs_count_repeats(toy):  # noqa: F811
    from pack.host import training

    _, training_set, _ = toy
    items = [replace(item, repeats=3) for item in training_set.items]
    training_set = replace(training_set, items=tuple(items))
    assert training.steps_of(2, training_set, 0, samples=4) == 3
    assert training.steps_of(2, training_set, 1, samples=4) == 2


def test_what_cannot_be_done_is_refused_before_the_first_step(runs, toy):  # noqa: F811
    class Unstarted(Seen):
        def start(self, plan):
            pytest.fail("the run began")

    guided = replace(sampled(toy), cfg=4.0)
    _, training_set, _ = toy
    without = replace(training_set, empty=None)
    for change, words in (
        ({"caption_dropout": 0.1}, "caption_dropout needs an empty text.*connect"),
        ({"held_out": 2}, "held_out is 2 of 2 different pictures.*hold out fewer"),
        ({"sampling": guided, "sample_every": 1}, "sample_cfg is 4, which needs an empty text"),
        ({"opened": gate.by_hand(TIER, 32, (0.3, 1.0))}, "was not demoted to it: add Demote"),
        ({"opened": gate.by_hand(96, 48, (0.3, 1.0))}, "does not start at the set's native tier"),
    ):
        with pytest.raises(ValueError, match=words):
            runs("run", Unstarted(), without, **change)
