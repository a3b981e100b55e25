"""A probe of a training set on a ComfyUI model: settings, file, session, cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..demotion import adapter, arms, draws, measure, probe
from . import families, lora_file, memory, rotary, session, text

# Draws on which a precision below float32 is compared with it.
PRECISION_DRAWS = 4


@dataclass(frozen=True)
class Options:
    """What a probe measures. lora names an adapter file; without one a fresh adapter of this rank
    is drawn. compute and checkpointing are as `session.open_session` has them."""

    bins: tuple[draws.Bin, ...]
    draws: int
    seed: int
    shared_noise: bool
    rank: int
    targets: str
    lora: Path | None
    compute: str = "model"
    checkpointing: bool = False


def run(
    model,
    training_set: arms.TrainingSet,
    options: Options,
    folder: Path,
    progress: Callable[[int], Callable[[], None]],
) -> tuple[measure.Measurement, Path]:
    """Measure every (image, bin) cell that the folder does not hold yet.

    progress is given the number of gradients to take and returns what to call after each. Raises
    ValueError, before the first gradient, for a model, adapter or bins that do not fit.
    """
    low, high = families.sigma_range(model.model)
    for sigma_bin in options.bins:
        if sigma_bin[0] < low or sigma_bin[1] > high:
            raise ValueError(
                f"bin {sigma_bin[0]:g}-{sigma_bin[1]:g} leaves the model's sigma range "
                f"{low:g}-{high:.5g}: choose bins inside it"
            )
    rotary.check_unaligned(model)
    if any(arm.rotary for arm in training_set.arms):
        rotary.check(model, [item.conditioning for item in training_set.items])
    given, unused = None, []
    if options.lora is not None:
        given, unused = lora_file.read(options.lora, model.model)
    copies = 3 * (2 + len(training_set.arms)) + 2
    dense = given is not None and any(kind in given.kind for kind in adapter.DENSE)
    need = memory.needed(model, training_set, options, copies, dense)
    with session.open_session(model, options.compute, options.checkpointing, need) as live:
        weights = given or _fresh_weights(live, options)
        settings = _settings(live, training_set, options, weights, unused)
        path = folder / f"{measure.settings_key(settings)}.jsonl"
        measurement = measure.open_for_append(path, settings)
        _measure_cells(live, training_set, options, weights, measurement, path, progress)
    dtype = settings["environment"]["dtype"]
    if dtype != "float32" and "precision" not in measurement.checks:
        cosines = _precision(model, training_set, options, weights, need)
        measurement.checks["precision"] = {"dtype": dtype, "cosines": cosines}
        measure.append_check(path, "precision", measurement.checks["precision"])
    return measurement, path


def _measure_cells(
    live: session.Session,
    training_set: arms.TrainingSet,
    options: Options,
    weights: adapter.Weights,
    measurement: measure.Measurement,
    path: Path,
    progress: Callable[[int], Callable[[], None]],
) -> None:
    """Measure what a measurement lacks, appending to it and to its file."""
    items = {item.image: item for item in training_set.items}
    done = {(cell.image, cell.bin) for cell in measurement.cells}
    todo = [
        (item, sigma_bin)
        for item in items.values()
        for sigma_bin in options.bins
        if (item.image, sigma_bin) not in done
    ]
    tick = progress(sum(options.draws * len(_arms_of(training_set, item)) for item, _ in todo))
    if not todo:
        return
    first = training_set.items[0]
    live.check_additions(live.load_arm(training_set, first, arms.SRC)[0], first.conditioning)
    parts = live.adapt(weights).parts
    subject = None
    for item, sigma_bin in todo:
        if subject is None or subject.image != item.image:
            subject = _subject(live, training_set, item)
        cell = probe.measure_cell(
            subject,
            sigma_bin,
            options.draws,
            options.seed,
            options.shared_noise,
            live.velocity,
            parts,
            tick,
        )
        measure.append(path, cell)
        measurement.cells.append(cell)


def _precision(
    model,
    training_set: arms.TrainingSet,
    options: Options,
    weights: adapter.Weights,
    need: float,
) -> list[float]:
    """Cosines between this precision's and float32's gradients of the native arm: one draw of each
    of the first few pictures, in bins spread over those measured."""
    items = training_set.items[:PRECISION_DRAWS]
    bins = [options.bins[index * len(options.bins) // len(items)] for index in range(len(items))]
    found = []
    for compute in (options.compute, "fp32"):
        with session.open_session(model, compute, options.checkpointing, need) as live:
            latent, _ = live.load_arm(training_set, items[0], arms.SRC)
            live.check_additions(latent, items[0].conditioning)
            parameters = live.adapt(weights).parameters
            size = sum(parameter.numel() for parameter in parameters)
            rows = torch.empty(len(items), size, device=parameters[0].device)
            for row, item, sigma_bin in zip(rows, items, bins):
                probe.draw_gradient(
                    _subject(live, training_set, item),
                    str(arms.SRC),
                    sigma_bin,
                    0,
                    options.seed,
                    options.shared_noise,
                    live.velocity,
                    parameters,
                    row,
                )
            found.append(rows.cpu().double())
    return torch.nn.functional.cosine_similarity(*found, dim=1).tolist()


def _fresh_weights(live: session.Session, options: Options) -> adapter.Weights:
    linears = families.linears(live.network)
    targets = adapter.match_targets(linears, families.targets_of(live.family, options.targets))
    return adapter.probe_weights(linears, targets, options.rank, options.seed)


def _arms_of(training_set: arms.TrainingSet, item: arms.Item) -> list[arms.Arm]:
    return [arms.SRC, arms.NULL, *(arm for arm in training_set.arms_of(item) if arm != arms.SRC)]


def _subject(
    live: session.Session, training_set: arms.TrainingSet, item: arms.Item
) -> probe.Subject:
    latents, weights = {}, {}
    for arm in _arms_of(training_set, item):
        latents[str(arm)], weights[str(arm)] = live.load_arm(training_set, item, arm)
    return probe.Subject(item.image, latents, weights, item.conditioning)


def _settings(
    live: session.Session,
    training_set: arms.TrainingSet,
    options: Options,
    weights: adapter.Weights,
    unused: list[str],
) -> dict[str, Any]:
    all_arms = [arms.SRC, arms.NULL, *(arm for arm in training_set.arms if arm != arms.SRC)]
    return {
        "protocol": probe.PROTOCOL,
        "arms": [str(arm) for arm in all_arms],
        "bins": [list(sigma_bin) for sigma_bin in options.bins],
        "draws": options.draws,
        "seed": options.seed,
        "noise": "shared" if options.shared_noise else "independent",
        "parts": weights.parts,
        "native_tier": training_set.native_tier,
        "vae_factor": training_set.vae_factor,
        "patch": training_set.patch,
        "vae": training_set.codec.fingerprint,
        "model": {"family": live.family.name, "fingerprint": live.fingerprint},
        "adapter": {
            "kind": "fresh" if options.lora is None else options.lora.name,
            "modules": len(weights.modules),
            "fingerprint": weights.fingerprint,
            "rank": weights.rank,
            "algorithm": weights.kind,
            "unused_keys": len(unused),
        },
        "images": {item.image: _image_settings(training_set, item) for item in training_set.items},
        "environment": live.environment,
    }


def _image_settings(training_set: arms.TrainingSet, item: arms.Item) -> dict[str, Any]:
    return {
        "name": item.name,
        "size": list(item.size),
        "mask": item.mask.stem if item.mask else None,
        "conditioning": text.conditioning_hash(item.conditioning),
        "guidance": text.guidance(item.conditioning),
        "grids": {
            str(arm): list(training_set.grid_of(item, arm)) for arm in training_set.arms_of(item)
        },
    }
