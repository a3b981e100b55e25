"""Two real processes that train the ten-line model together, over gloo, beside one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import conftest  # noqa: F401 - names the pack's rooms where this runs as a program
import nets
import pytest
import test_train
import torch

import run
from demotion import states, train

STOP = 5
# Sums of float32 in another order, carried through the steps of a run.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
OPTIONS = {
    "batch_size": 4,
    "accumulation": 2,
    "schedule": "cosine",
    "warmup_steps": 3,
    "ema_decay": 0.9,
    "caption_dropout": 0.3,
    "validate_every": 4,
}


def trained(folder: Path, team: train.Team, stop: int | None = None) -> dict:
    """What one process of a team ends with; the first is stopped after so many steps."""

    def tick(history: train.History) -> None:
        if team.rank == 0 and len(history.losses) == stop:
            sys.exit(3)

    model = test_train.Spy()
    held_out = nets.pupils(1)
    weights, history, average = test_train.run(
        folder, test_train.HALF, tick, model=model, team=team, held_out=held_out, **OPTIONS
    )
    seen = [(z, sigma) for z, sigma, _ in model.seen]
    return {"weights": weights, "average": average, "history": vars(history), "seen": seen}


def worker(task: str, folder: Path) -> None:
    """A process of a team: trains a run to its end and leaves another one, or takes that up."""
    sys.argv[1:] = ["--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from pack.host import team

    party = team.join()
    if task == "begin":
        result = trained(folder / "whole", party)
        torch.save(result, folder / f"whole_{party.rank}.pt")
        trained(folder / "stopped", party, STOP)
    else:
        torch.save(trained(folder / "stopped", party), folder / f"resumed_{party.rank}.pt")


@pytest.fixture(scope="module")
def made(comfy, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """What one process and two come to; what two do that were stopped, and one that goes on."""
    folder = tmp_path_factory.mktemp("team")
    command = [sys.executable, __file__, comfy.__path__[0], str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "HOME", folder)
        with pytest.raises(SystemExit) as stopped:
            run.together([*command, "begin"], 2)
        kept = states.States(folder / "stopped", 2).steps()
        shutil.copytree(folder / "stopped", folder / "taken over")
        run.together([*command, "resume"], 2)

    def results(name: str) -> list[dict]:
        return [torch.load(folder / f"{name}_{rank}.pt") for rank in (0, 1)]

    yield SimpleNamespace(
        one=trained(folder / "one", train.ALONE),
        two=results("whole"),
        code=stopped.value.code,
        kept=kept,
        resumed=results("resumed"),
        taken_over=trained(folder / "taken over", train.ALONE),
    )


def in_order(seen):
    return sorted(seen, key=lambda entry: entry[1])


def test_two_processes_are_shown_the_stream_of_one(made):
    """The same sigmas, noised latents and so pictures, tiers and noise, each shown once more to
    each process in validation."""
    steps, samples = 12, 8
    alone, halves = made.one["seen"], [found["seen"] for found in made.two]
    validation = len(alone) - steps * samples
    half = steps * samples // 2
    assert validation > 0 and [len(seen) for seen in halves] == [half + validation] * 2
    together = in_order(halves[0] + halves[1])
    sigmas = {sigma for _, sigma in alone}
    assert sigmas == {sigma for _, sigma in together} and len(sigmas) == steps * samples + 8
    shown = {sigma: z for z, sigma in alone}
    assert all(torch.equal(z, shown[sigma]) for z, sigma in together)
    assert {z.shape[-1] for z, _ in together} == {6, 8}


def test_two_processes_end_with_the_weights_of_one(made):
    for name in ("weights", "average"):
        for one, first, second in zip(made.one[name], *(found[name] for found in made.two)):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, one, **CLOSE)
    one, (first, second) = made.one["history"], [found["history"] for found in made.two]
    assert one["tiers"] == first["tiers"] == second["tiers"]
    assert any(0 < len(tiers) < 8 for tiers in one["tiers"])
    assert first["losses"] == second["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for step, loss in one["validation"]:
        assert dict(first["validation"])[step] == pytest.approx(loss, rel=1e-5)


def test_two_processes_stopped_on_the_first_go_on_to_the_same_bits(made):
    assert made.code == 3 and made.kept == [STOP]
    for resumed, whole in zip(made.resumed, made.two):
        assert test_train.same(resumed["weights"], whole["weights"])
        assert test_train.same(resumed["average"], whole["average"])
        assert resumed["history"]["losses"] == whole["history"]["losses"]


def test_one_process_goes_on_from_the_state_of_two(made):
    assert made.taken_over["history"]["losses"][:STOP] == made.two[0]["history"]["losses"][:STOP]
    for one, whole in zip(made.taken_over["weights"], made.one["weights"]):
        torch.testing.assert_close(one, whole, **CLOSE)


def test_a_process_that_fails_is_named_with_what_it_said(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "HOME", tmp_path)
    code = "import os, sys; sys.exit('no memory' if os.environ['RANK'] == '1' else 0)"
    with pytest.raises(run.Stop, match="ended with code 1.*process_1.log.*\nno memory"):
        run.together([sys.executable, "-c", code], 2)


def test_processes_of_several_machines_are_refused(comfy, monkeypatch):
    from pack.host import team

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="4 processes, 2 of them on this machine"):
        team.join()


if __name__ == "__main__":
    path, place, chosen = sys.argv[1:]
    sys.path.insert(0, str(Path(path).parent))
    worker(chosen, Path(place))
