"""A gated training run on a ComfyUI model: checks, session, loop, file, report."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ..demotion import adapter, arms, draws, gate, gate_cost, grid, states, train
from . import families, memory, rotary, sampling, session, text

# How kohya's trainer names an algorithm in a file: its own LoRA, and LyCORIS for the others.
NETWORKS = {
    "LoRA": {"ss_network_module": "networks.lora"},
    "DoRA": {
        "ss_network_module": "lycoris.kohya",
        "ss_network_args": '{"algo": "lora", "dora_wd": "True", "wd_on_output": "True"}',
    },
    "LoHa": {"ss_network_module": "lycoris.kohya", "ss_network_args": '{"algo": "loha"}'},
    "LoKr": {
        "ss_network_module": "lycoris.kohya",
        "ss_network_args": '{"algo": "lokr", "factor": "-1"}',
    },
}


@dataclass(frozen=True)
class Options:
    """How to train: the loop's settings, and the adapter's shape.

    targets                 a pattern, or empty for the family's own
    algorithm               one of adapter.KINDS
    compute, checkpointing  as `session.open_session` has them
    deterministic           whether only kernels that give the same bits in every run are used
    held_out                pictures that are not trained on but give the validation loss
    save_every, keep        steps between states that a run can go on from, and how many are kept
    fresh                   whether to start again where there are such states
    sampling, sample_every  what to sample on the way, from before the first step on
    """

    settings: train.Settings
    rank: int
    alpha: float
    targets: str
    algorithm: str = "LoRA"
    compute: str = "model"
    checkpointing: bool = False
    deterministic: bool = False
    held_out: int = 0
    save_every: int = 0
    keep: int = 2
    fresh: bool = False
    sampling: sampling.Sampling | None = None
    sample_every: int = 0


@dataclass(frozen=True)
class Result:
    """A finished run: the LoRA, what happened, and the metadata and report that go with it."""

    weights: adapter.Weights
    history: train.History
    metadata: dict[str, str]
    report: str


@dataclass(frozen=True)
class Plan:
    """What a run is to do: steps, of which so many were done before; the share of the tokens that
    the gate should save over all of them; latent cells a token; and the folder of its states, which
    the run has for itself however often it goes on."""

    steps: int
    done: int
    saving: float
    cells: int
    folder: Path


class Watch:
    """What is told of a run while it lasts. Each may raise to stop it."""

    def start(self, plan: Plan) -> None:
        """The run begins, or goes on."""

    def step(self, history: train.History) -> None:
        """A step was done, or none yet."""

    def lora(self, step: int, weights: adapter.Weights, metadata: dict[str, str]) -> None:
        """The LoRA after these steps, wherever a state is saved before the end."""

    def picture(self, step: int, pixels: np.ndarray) -> None:
        """A sample after these steps, uint8 [H, W, 3]."""


def steps_of(epochs: float, training_set: arms.TrainingSet, held_out: int, samples: int) -> int:
    """Steps of so many samples in which every picture is shown its repeats that many times."""
    shown = sum(item.repeats for item in split(training_set, held_out)[0])
    return max(1, math.ceil(epochs * shown / samples))


def split(training_set: arms.TrainingSet, held_out: int) -> tuple[list[arms.Item], list[arms.Item]]:
    """Items to train on and items held out, which are those of the first hashes: the same whatever
    their order.

    Raises ValueError when none is left to train on.
    """
    hashes = sorted({item.image for item in training_set.items})
    if held_out >= len(hashes):
        raise ValueError(
            f"held_out is {held_out} of {len(hashes)} different pictures, so none is left to train "
            "on: hold out fewer"
        )
    apart = set(hashes[:held_out])
    kept = [item for item in training_set.items if item.image not in apart]
    return kept, [item for item in training_set.items if item.image in apart]


def forecast(
    training_set: arms.TrainingSet, opened: gate.Gate, options: Options
) -> gate_cost.Forecast:
    """What a gate should do to a run, on the pictures that are trained on."""
    items = tuple(split(training_set, options.held_out)[0])
    pictures = gate_cost.pictures_of(replace(training_set, items=items), opened)
    settings = options.settings
    return gate_cost.forecast(opened, settings.density, pictures, settings.course)


def check(training_set: arms.TrainingSet, opened: gate.Gate) -> None:
    """Raise ValueError when a gate asks for what a set does not have."""
    encoded = {arm.tier for arm in training_set.arms if arm.kind == "demote"}
    for rule in opened.rules:
        if rule.route[0] != training_set.native_tier:
            raise ValueError(
                f"the gate's route {rule.route[0]} -> {rule.route[1]} does not start at the set's "
                f"native tier {training_set.native_tier}: use a gate made for this tier"
            )
        if rule.route[1] not in encoded:
            raise ValueError(
                f"the gate demotes to {rule.route[1]}, but the training set was not demoted to it: "
                f"add Demote Latents with target tier {rule.route[1]}"
            )


def run(
    model,
    training_set: arms.TrainingSet,
    opened: gate.Gate | None,
    options: Options,
    folder: Path,
    watch: Watch,
    team: train.Team = train.ALONE,
) -> Result:
    """Train a LoRA, through a gate if there is one.

    folder keeps the states of runs, and the same call goes on from its newest; more steps go on
    from the end of a finished run. Raises ValueError before the first step for what does not fit.
    """
    settings = options.settings
    opened = opened or gate.Gate((), False, None, "none", training_set.native_tier)
    check(training_set, opened)
    items, held_out = split(training_set, options.held_out)
    if settings.caption_dropout and training_set.empty is None:
        raise ValueError(
            "caption_dropout needs an empty text, and the set has ready conditioning only: connect "
            "empty_conditioning to the training set, or set caption_dropout to 0"
        )
    if options.sampling:
        sampling.check(options.sampling, training_set)
    rotary.check_unaligned(model)
    if any(rule.rotary for rule in opened.rules):
        rotary.check(model, [item.conditioning for item in training_set.items])
    # The adapter, its gradient, what the optimiser keeps, and the moving average.
    copies = 2 + train.OPTIMIZERS[settings.optimizer].copies + (settings.ema_decay > 0)
    dense = options.algorithm in adapter.DENSE
    need = memory.needed(model, training_set, options, copies, dense, settings.batch_size)
    with (
        _deterministic(options.deterministic),
        session.open_session(model, options.compute, options.checkpointing, need) as live,
    ):
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, families.targets_of(live.family, options.targets))
        start = adapter.zero_weights(
            linears, targets, options.rank, options.alpha, settings.seed, options.algorithm
        )
        pupils = [_pupil(live, training_set, item) for item in items]
        live.check_additions(pupils[0].native.to(live.device), pupils[0].context)
        trained = live.adapt(start)
        metadata = _metadata(live, training_set, opened, options)
        key = _key(live, training_set, opened, options, targets)
        kept = states.States(folder / key, options.keep)
        if options.fresh and team.rank == 0:
            kept.clear()
        # Nobody looks for a state before it was cleared.
        team.add([torch.zeros((), device=live.device)])
        done = kept.newest(settings.steps)
        expected = forecast(training_set, opened, options) if opened.rules else None
        saving = expected.saving if expected else 0.0
        watch.start(Plan(settings.steps, done, saving, training_set.patch**2, kept.folder))

        average = None
        if settings.ema_decay:
            average = [parameter.detach().clone() for parameter in trained.parameters]

        def weights() -> adapter.Weights:
            with train.exchanged(trained.parameters, average):
                return trained.weights()

        def look(history: train.History) -> None:
            step, last = len(history.losses), len(history.losses) == settings.steps
            watch.step(history)
            if team.rank:
                return
            if options.save_every and step and step % options.save_every == 0 and not last:
                watch.lora(step, weights(), metadata)
            if options.sampling and (step % options.sample_every == 0 or last):
                with train.exchanged(trained.parameters, average):
                    shown = sampling.picture(live, training_set, options.sampling, settings.seed)
                watch.picture(step, shown)

        if not done:
            look(train.History())
        history = train.train(
            pupils,
            opened,
            settings,
            live.velocity,
            trained.parameters,
            kept,
            look,
            options.save_every,
            [_pupil(live, training_set, item) for item in held_out],
            average,
            team,
            live.environment,
        )
        trained_weights = weights()
        differences = _differences(live, opened, options, len(targets))
    report = "\n".join(
        differences + [_report(training_set, opened, options, history, done, expected)]
    )
    return Result(trained_weights, history, metadata, report)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Kernels that give the same bits in every run, or an error where there is none."""
    if not wanted:
        yield
        return
    # Read by cuBLAS when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _differences(
    live: session.Session, opened: gate.Gate, options: Options, modules: int
) -> list[str]:
    """What a measured gate was measured on and this run is not."""
    here = {
        "model": live.fingerprint,
        "algorithm": options.algorithm,
        "rank": str(options.rank),
        "modules": str(modules),
        "loss": draws.LOSS,
        "dtype": live.environment["dtype"],
    }
    return [
        f"Note: the gate was measured on {name} {opened.basis[name]}, this run has {value}: "
        "its windows may not hold here."
        for name, value in here.items()
        if name in opened.basis and opened.basis[name] != value
    ]


def _pupil(live: session.Session, training_set: arms.TrainingSet, item: arms.Item) -> train.Pupil:
    """A picture's latents and loss weights, which wait outside the device for their turn."""
    latents, weights = {}, {}
    for arm in [arms.SRC, *training_set.arms_of(item)]:
        if (arm == arms.SRC or arm.kind == "demote") and arm.tier not in latents:
            latent, mask = live.load_arm(training_set, item, arm)
            latents[arm.tier], weights[arm.tier] = (
                latent.cpu(),
                mask if mask is None else mask.cpu(),
            )
    return train.Pupil(
        native=latents.pop(None),
        demoted=latents,
        weights=weights,
        context=item.conditioning,
        repeats=item.repeats,
        empty=training_set.empty,
        image=item.image,
        tokens=grid.token_count(item.native, training_set.patch),
    )


def _key(
    live: session.Session,
    training_set: arms.TrainingSet,
    opened: gate.Gate,
    options: Options,
    targets: list[str],
) -> str:
    """Names the run by what was chosen for it but how many steps there will be, so that the same
    run is continued, and so is one of more steps; also where kernels or threads are others, after
    an update, say, which the report then tells."""
    pictures = [
        (
            item.image,
            item.repeats,
            item.mask and item.mask.stem,
            text.conditioning_hash(item.conditioning),
        )
        for item in training_set.items
    ]
    named_by = (
        live.fingerprint,
        live.environment["dtype"],
        training_set.codec.fingerprint,
        training_set.native_tier,
        pictures,
        text.conditioning_hash(training_set.empty),
        opened.rules,
        replace(options.settings, steps=1, validate_every=0),
        (options.rank, options.alpha, options.algorithm, options.held_out, options.deterministic),
        targets,
    )
    return hashlib.blake2b(repr(named_by).encode(), digest_size=8).hexdigest()


def _metadata(
    live: session.Session, training_set: arms.TrainingSet, opened: gate.Gate, options: Options
) -> dict[str, str]:
    settings = options.settings
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{live.family.name}/lora",
        "modelspec.implementation": "ComfyUI-Demotion",
        "modelspec.resolution": f"{training_set.native_tier}x{training_set.native_tier}",
        "ss_base_model_version": live.family.name,
        **NETWORKS[options.algorithm],
        "ss_network_dim": str(options.rank),
        "ss_network_alpha": f"{options.alpha:g}",
        "ss_learning_rate": f"{settings.learning_rate:g}",
        "ss_optimizer": settings.optimizer,
        "ss_lr_scheduler": settings.schedule,
        "ss_max_train_steps": str(settings.steps),
        "ss_batch_size_per_device": str(settings.batch_size),
        "ss_gradient_accumulation_steps": str(settings.accumulation),
        "ss_caption_dropout_rate": f"{settings.caption_dropout:g}",
        "ss_max_grad_norm": f"{settings.max_norm:g}",
        "ss_seed": str(settings.seed),
        "ss_num_train_images": str(sum(item.repeats for item in training_set.items)),
        "ss_resolution": str((training_set.native_tier, training_set.native_tier)),
        "demotion_base_fingerprint": live.fingerprint,
        "demotion_guidance": ", ".join(
            sorted({str(text.guidance(item.conditioning)) for item in training_set.items})
        ),
        "demotion_gate": json.dumps(
            {
                "measured": opened.measured,
                "margin": opened.margin,
                "source": opened.source,
                "rules": [str(rule) for rule in opened.rules],
            }
        ),
    }


def _report(
    training_set: arms.TrainingSet,
    opened: gate.Gate,
    options: Options,
    history: train.History,
    done: int,
    expected: gate_cost.Forecast | None,
) -> str:
    settings = options.settings
    samples = settings.steps * settings.samples
    batches = f" x {settings.accumulation}" if settings.accumulation > 1 else ""
    lines = [
        gate.describe(opened),
        "",
        f"{settings.steps} steps of {settings.batch_size}{batches}, {settings.optimizer}, rank "
        f"{options.rank}, alpha {options.alpha:g}, learning rate {settings.learning_rate:g} "
        f"{settings.schedule}, sigma density {settings.density.name}, seed {settings.seed}.",
        f"Loss: {_tenth(history.losses, first=True):.4f} over the first tenth of the steps, "
        f"{_tenth(history.losses, first=False):.4f} over the last.",
    ]
    if done:
        lines.append(f"Taken up after step {done}.")
    if len(history.plans) > 1:
        plans = ", ".join(f"{plan} from step {step + 1}" for step, plan in history.plans)
        lines.append(
            f"The run was planned for {plans} steps: schedules and spans are laid over a plan, so "
            "that one run of all steps would differ if it has any."
        )
    for (_, before), (step, here) in pairwise(history.environments):
        changed = (
            f"{name} {here[name]} (before: {before.get(name)})"
            for name in here
            if here[name] != before.get(name)
        )
        lines.append(
            f"From step {step + 1} on the run had {', '.join(changed)}, so that it is not bit for "
            "bit what it would have been uninterrupted."
        )
    if history.validation:
        (_, first), (_, last) = history.validation[0], history.validation[-1]
        lines.append(
            f"Validation loss on {options.held_out} held-out pictures: {first:.4f} before, "
            f"{last:.4f} after step {history.validation[-1][0]}."
        )
    cells = training_set.patch**2
    lines.append(f"Tokens processed: {sum(history.cells) // cells:,}.")
    if expected:
        lines += [
            f"Demoted samples: {sum(history.demoted)} of {samples} "
            f"({sum(history.demoted) / samples:.1%}; {expected.shares.sum():.1%} expected).",
            f"Tokens saved: {history.saving:.1%} ({expected.saving:.1%} expected).",
            *_time_saved(history, settings.samples),
        ]
    else:
        lines.append("The gate is empty: every step trained native.")
    return "\n".join(lines)


def _tenth(losses: list[float], first: bool) -> float:
    count = max(1, len(losses) // 10)
    piece = losses[:count] if first else losses[-count:]
    return sum(piece) / count


def _time_saved(history: train.History, samples: int) -> list[str]:
    """Mean step times where all samples had one grid, and the saving that these predict beside that
    of the whole run. The first step pays for warm-up and is left out."""
    steps = list(zip(history.seconds, history.tiers))[1:]
    alike: dict[int | None, list[float]] = {}
    for seconds, tiers in steps:
        if not tiers or (len(tiers) == samples and len(set(tiers)) == 1):
            alike.setdefault(tiers[0] if tiers else None, []).append(seconds)
    means = {tier: sum(found) / len(found) for tier, found in alike.items()}
    native, demoted = means.pop(None, None), [tier for _, tiers in steps for tier in tiers]
    if not native or not set(demoted) <= means.keys():
        return []
    spared = sum(1 - means[tier] / native for tier in demoted) / (samples * len(steps))
    realised = 1 - sum(seconds for seconds, _ in steps) / len(steps) / native
    times = ", ".join(f"{mean:.3f} s at {tier}" for tier, mean in sorted(means.items()))
    return [
        f"Mean step: {native:.3f} s native, {times}. Time saved: {realised:.1%} "
        f"({spared:.1%} from these)."
    ]
