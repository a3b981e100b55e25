"""A gated training run on a ComfyUI model: checks, session, loop, file, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..demotion import adapter, arms, gate, grid, train
from . import families, memory, rotary, session, text

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
    """How to train: the loop's settings, and the adapter's shape. targets is a pattern, or empty
    for the family's own; algorithm is one of adapter.KINDS; compute and checkpointing are as
    `session.open_session` has them."""

    settings: train.Settings
    rank: int
    alpha: float
    targets: str
    algorithm: str = "LoRA"
    compute: str = "model"
    checkpointing: bool = False


@dataclass(frozen=True)
class Result:
    """A finished run: the LoRA, what happened, and the metadata and report that go with it."""

    weights: adapter.Weights
    history: train.History
    metadata: dict[str, str]
    report: str


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
    opened: gate.Gate,
    options: Options,
    folder: Path,
    progress: Callable[[int], Callable[[float], None]],
) -> Result:
    """Train a LoRA through a gate.

    folder keeps the state of an interrupted run, which the same call continues. progress is given
    the number of steps and returns what to call with the loss after each. Raises ValueError before
    the first step for what does not fit.
    """
    check(training_set, opened)
    rotary.check_unaligned(model)
    if any(rule.rotary for rule in opened.rules):
        rotary.check(model, [item.conditioning for item in training_set.items])
    # A step holds the adapter, its gradient and AdamW's two moments.
    dense = options.algorithm in adapter.DENSE
    need = memory.needed(model, training_set, options, copies=4, dense=dense)
    with session.open_session(model, options.compute, options.checkpointing, need) as live:
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, families.targets_of(live.family, options.targets))
        start = adapter.zero_weights(
            linears,
            targets,
            options.rank,
            options.alpha,
            options.settings.seed,
            options.algorithm,
        )
        pupils = [_pupil(live, training_set, item) for item in training_set.items]
        live.check_additions(pupils[0].native, pupils[0].context)
        trained = live.adapt(start)
        state = folder / f"{_key(live, training_set, opened, options, targets)}.pt"
        history = train.train(
            pupils,
            opened,
            options.settings,
            live.velocity,
            trained.parameters,
            state,
            progress(options.settings.steps),
        )
        weights = trained.weights()
        metadata = _metadata(live, training_set, opened, options)
        differences = _differences(live, opened, options)
    report = "\n".join(differences + [_report(training_set, opened, options, history)])
    return Result(weights, history, metadata, report)


def _differences(live: session.Session, opened: gate.Gate, options: Options) -> list[str]:
    """What a measured gate was measured on and this run is not."""
    here = {
        "model": live.fingerprint,
        "algorithm": options.algorithm,
        "dtype": live.environment["dtype"],
    }
    return [
        f"Note: the gate was measured on {name} {opened.basis[name]}, this run has {value}: "
        "its windows may not hold here."
        for name, value in here.items()
        if name in opened.basis and opened.basis[name] != value
    ]


def _pupil(live: session.Session, training_set: arms.TrainingSet, item: arms.Item) -> train.Pupil:
    native, native_weights = live.load_arm(training_set, item, arms.SRC)
    demoted, weights = {}, {None: native_weights}
    for arm in training_set.arms_of(item):
        if arm.kind == "demote" and arm.tier not in demoted:
            demoted[arm.tier], weights[arm.tier] = live.load_arm(training_set, item, arm)
    return train.Pupil(native, demoted, weights, item.conditioning, item.repeats)


def _key(
    live: session.Session,
    training_set: arms.TrainingSet,
    opened: gate.Gate,
    options: Options,
    targets: list[str],
) -> str:
    """Names the run by everything that a step depends on, so that only the same run is
    continued."""
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
        live.environment,
        training_set.codec.fingerprint,
        training_set.native_tier,
        pictures,
        opened.rules,
        options,
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
        "ss_optimizer": "AdamW",
        "ss_lr_scheduler": settings.schedule,
        "ss_steps": str(settings.steps),
        "ss_batch_size_per_device": str(settings.batch_size),
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
    training_set: arms.TrainingSet, opened: gate.Gate, options: Options, history: train.History
) -> str:
    settings = options.settings
    costs = {training_set.native_tier: _mean_tokens(training_set, arms.SRC)}
    for arm in training_set.arms:
        if arm.kind == "demote":
            costs[arm.tier] = _mean_tokens(training_set, arm)
    samples = settings.steps * settings.batch_size
    lines = [
        gate.describe(opened),
        "",
        f"{settings.steps} steps of {settings.batch_size}, rank {options.rank}, alpha "
        f"{options.alpha:g}, learning rate {settings.learning_rate:g} {settings.schedule}, sigma "
        f"density {settings.density.name}, seed {settings.seed}.",
        f"Loss: {_tenth(history.losses, first=True):.4f} over the first tenth of the steps, "
        f"{_tenth(history.losses, first=False):.4f} over the last.",
    ]
    if opened.rules:
        share = sum(gate.probability(opened, settings.density))
        predicted = gate.predicted_saving(opened, settings.density, costs)
        lines += [
            f"Demoted samples: {sum(history.demoted)} of {samples} "
            f"({sum(history.demoted) / samples:.1%}; "
            f"{share:.1%} expected for pictures on every route).",
            f"Tokens saved: {history.saving:.1%} ({predicted:.1%} expected).",
        ]
        lines += _step_times(history, settings.batch_size)
    else:
        lines.append("The gate is empty: every step trained native.")
    return "\n".join(lines)


def _mean_tokens(training_set: arms.TrainingSet, arm: arms.Arm) -> float:
    counts = [
        grid.token_count(training_set.grid_of(item, arm), training_set.patch)
        for item in training_set.items
        if training_set.grid_of(item, arm) is not None
    ]
    return sum(counts) / len(counts)


def _tenth(losses: list[float], first: bool) -> float:
    count = max(1, len(losses) // 10)
    piece = losses[:count] if first else losses[-count:]
    return sum(piece) / count


def _step_times(history: train.History, batch_size: int) -> list[str]:
    native = [second for second, count in zip(history.seconds, history.demoted) if count == 0]
    demoted = [
        second for second, count in zip(history.seconds, history.demoted) if count == batch_size
    ]
    if not native or not demoted:
        return []
    return [
        f"Mean step: {sum(native) / len(native):.3f} s native, {sum(demoted) / len(demoted):.3f} s "
        f"demoted."
    ]
