"""A probe of a training set on a ComfyUI model: settings, file, session, cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..demotion import (
    adapter,
    arms,
    draws,
    gap_map,
    measure,
    probe,
    sketch,
    verdict,
    words,
)
from . import families, lora_file, memory, rotary, session, text, velocity

# Draws on which a precision below float32 is compared with it.
PRECISION_DRAWS = 4


@dataclass(frozen=True)
class Options:
    """What a probe measures.

    lora                    adapter file; without one a fresh adapter of this rank is drawn
    compute, checkpointing  as `session.open_session` has them
    sketch                  buckets of each count-sketch, 0 for none
    looks                   how often the map is looked at, 1 to 4: after each look no more pictures
                            go to bins in which every route is decided at the margin
    diagnostics             whether null and the arms that are no routes are measured too
    one_route               whether the first route of the set is the only one measured
    micro_batch             draws that share a forward; their mean counts as one draw
    """

    bins: tuple[draws.Bin, ...]
    draws: int
    seed: int
    shared_noise: bool
    rank: int
    targets: str
    lora: Path | None
    compute: str = "model"
    checkpointing: bool = False
    sketch: int = 0
    looks: int = 1
    margin: float = 0.05
    diagnostics: bool = True
    one_route: bool = False
    micro_batch: int = 1

    @property
    def batches(self) -> int:
        """Draws as a cell counts them."""
        return self.draws // self.micro_batch


@dataclass(frozen=True)
class Preset:
    """How much to measure: the options of this name, bins as `draws.parse_bins` reads them."""

    bins: str
    draws: int
    looks: int
    diagnostics: bool
    one_route: bool = False


PRESETS = {
    # Whether there is a window: bins where windows are found, nothing but one route.
    "quick": Preset("0.5-0.65, 0.65-0.8, 0.8-0.95", 4, 3, diagnostics=False, one_route=True),
    "map": Preset("8", 8, 1, diagnostics=True),
    "full": Preset("12, 1", 16, 1, diagnostics=True),
}


def run(
    model,
    training_set: arms.TrainingSet,
    options: Options,
    folder: Path,
    progress: Callable[[int], Callable[[], None]],
    say: Callable[[str], None] = lambda text: None,
    into: Path | None = None,
    seen: Callable[[measure.Measurement], None] = lambda measurement: None,
) -> tuple[measure.Measurement, Path]:
    """Measure every (image, bin) cell that the folder does not hold yet, pictures in the order of
    their hashes. into names a file to continue in place of the folder's own for these settings.

    At each look say is given what is expected or known so far, in lines of text, and progress the
    number of gradients to take, which returns what to call after each. seen is given what has been
    measured, at the start of a look and after each cell, these without their sketches. Raises
    ValueError, before the first gradient, for a model, adapter, bins or draws that do not fit, and
    for a file to continue that was measured with other settings.
    """
    low, high = families.sigma_range(model.model)
    for sigma_bin in options.bins:
        if sigma_bin[0] < low or sigma_bin[1] > high:
            raise ValueError(
                f"bin {draws.bin_text(sigma_bin)} leaves the model's sigma range "
                f"{low:g}-{high:.5g}: choose bins inside it"
            )
    probe.check_count(options.draws, options.micro_batch, options.sketch > 0)
    measured = _measured(training_set, options)
    if not options.diagnostics and not _routes(measured):
        raise ValueError(
            "the set has no demoted tier, and without diagnostics nothing else is measured: add "
            "Demote Latents, or turn diagnostics on"
        )
    if not 1 <= options.looks <= verdict.MAX_LOOKS:
        raise ValueError(f"looks is {options.looks}: plan 1 to {verdict.MAX_LOOKS} looks")
    rotary.check_unaligned(model)
    if any(arm.rotary for arm in measured):
        rotary.check(model, [item.conditioning for item in training_set.items])
    if options.micro_batch > 1 and any(arm.rotary == velocity.GATED for arm in measured):
        raise ValueError(
            f"the set has an arm with rotary alignment {velocity.GATED}, which depends on sigma, "
            f"and micro_batch is {options.micro_batch}: set it to 1"
        )
    given, unused = None, []
    if options.lora is not None:
        given, unused = lora_file.read(options.lora, model.model)
    # Two half-sets' sums and a vector for each arm, the adapter, its gradient, the sketch's hash.
    copies = 3 * len(measured) + 2 + (options.sketch > 0)
    dense = given is not None and any(kind in given.kind for kind in adapter.DENSE)
    need = memory.needed(model, training_set, options, copies, dense, options.micro_batch)
    with session.open_session(model, options.compute, options.checkpointing, need) as live:
        if options.micro_batch > 1:
            _check_shared(live, training_set)
        weights = given or _fresh_weights(live, options)
        settings = _settings(live, training_set, options, weights, unused)
        path = into or folder / f"{measure.settings_key(settings)}.jsonl"
        measurement = measure.open_for_append(path, settings)
        work = _Run(live, training_set, options, weights, need, path, seen)
        work.look_by_look(measurement, progress, say)
    measurement = measure.Measurement.load(path)
    dtype = settings["environment"]["dtype"]
    if dtype != "float32" and "precision" not in measurement.checks:
        cosines = _precision(model, training_set, options, weights, need)
        measurement.checks["precision"] = {"dtype": dtype, "cosines": cosines}
        measure.append_check(path, "precision", measurement.checks["precision"])
    return measurement, path


@dataclass
class _Run:
    """A session at work on a measurement's file. The adapter is put into the network when the first
    gradient is needed."""

    live: session.Session
    training_set: arms.TrainingSet
    options: Options
    weights: adapter.Weights
    need: float
    path: Path
    seen: Callable[[measure.Measurement], None]
    adapted: adapter.Adapter | None = None
    sketcher: sketch.CountSketch | None = None

    def look_by_look(
        self,
        measurement: measure.Measurement,
        progress: Callable[[int], Callable[[], None]],
        say: Callable[[str], None],
    ) -> None:
        """Measure what the file lacks, told by the measurement read from it."""
        unique = {item.image: item for item in self.training_set.items}
        items = [unique[image] for image in sorted(unique)]
        bins, told = list(self.options.bins), []
        sizes = verdict.look_sizes(len(items), self.options.looks)
        for look, size in enumerate(sizes, start=1):
            done = {(cell.image, cell.bin) for cell in measurement.cells}
            missing = [
                (item, sigma_bin)
                for item in items
                for sigma_bin in bins
                if (item.image, sigma_bin) not in done
            ]
            if missing and self.adapted is None:
                self.adapt()
                told.append(self.plan(missing))
            say("\n".join(told))
            now = {item.image for item in items[:size]}
            planned = [cell for cell in missing if cell[0].image in now]
            self.measure(planned, measurement, progress)
            if look == len(sizes) or not bins:
                break
            measurement = measure.Measurement.load(self.path)
            found = self.decide(measurement, look, now)
            told.append(_look_text(look, size, found, self.options))
            bins = [sigma_bin for sigma_bin in bins if not self.settled(sigma_bin, found)]

    def adapt(self) -> None:
        self.adapted = _adapted(self.live, self.training_set, self.weights)
        if self.options.sketch:
            self.sketcher = sketch.CountSketch(
                self.options.seed, self.adapted.size, self.options.sketch, self.live.device
            )

    def gradients(self, cells: Sequence[tuple[arms.Item, draws.Bin]]) -> int:
        """Evaluations that cells take."""
        counts = (len(_arms_of(self.training_set, item, self.options)) for item, _ in cells)
        return self.options.batches * sum(counts)

    def plan(self, missing: Sequence[tuple[arms.Item, draws.Bin]]) -> str:
        """What it takes to measure cells: evaluations, time from a timed draw, memory, disk."""
        options = self.options
        counts = [len(_arms_of(self.training_set, item, options)) for item, _ in missing]
        blocks = sketch.blocks_of(options.batches) if options.sketch else 0
        parts = len(self.weights.parts)
        disk = sum(measure.cell_bytes(count, parts, blocks, options.sketch) for count in counts)
        gradients, seconds = self.gradients(missing), self.seconds_per_gradient(*missing[0])
        native_tier = self.training_set.native_tier
        routes = [
            gap_map.arm_title(str(arm), native_tier) for arm in _routes(self.training_set.arms)
        ]
        alone = options.one_route and len(routes) > 1
        left_out = f"{routes[0]} only, without {', '.join(routes[1:])}; " if alone else ""
        together = f" of {options.micro_batch} draws each, counted as one draw"
        return (
            f"{left_out}{'at most ' if options.looks > 1 else ''}{gradients:,} gradients"
            f"{together * (options.micro_batch > 1)}, about {words.duration(gradients * seconds)}; "
            f"{words.size(self.need)} of memory beside the model; {words.size(disk)} on the disk"
        )

    def seconds_per_gradient(self, item: arms.Item, sigma_bin: draws.Bin) -> float:
        """From one draw of every arm, after one of src that pays for warm-up."""
        subject = _subject(self.live, self.training_set, item, self.options)
        vector = torch.empty(self.adapted.size, device=self.live.device)

        def draw(arm: str) -> None:
            probe.draw_gradient(
                subject,
                arm,
                sigma_bin,
                range(self.options.micro_batch),
                self.options.seed,
                self.options.shared_noise,
                self.live.velocity,
                self.adapted.parameters,
                vector,
            )

        draw(str(arms.SRC))
        began = time.monotonic()
        for arm in subject.latents:
            draw(arm)
        return (time.monotonic() - began) / len(subject.latents)

    def measure(
        self,
        cells: Sequence[tuple[arms.Item, draws.Bin]],
        measurement: measure.Measurement,
        progress: Callable[[int], Callable[[], None]],
    ) -> None:
        """Measure these cells, each appended to the file as it is finished, and to what was read
        from it."""
        options, subject = self.options, None
        tick = progress(self.gradients(cells))
        self.seen(measurement)
        for item, sigma_bin in cells:
            if subject is None or subject.image != item.image:
                subject = _subject(self.live, self.training_set, item, options)
            cell = probe.measure_cell(
                subject,
                sigma_bin,
                options.draws,
                options.seed,
                options.shared_noise,
                self.live.velocity,
                self.adapted.parts,
                tick,
                self.sketcher,
                options.micro_batch,
            )
            measure.append(self.path, cell)
            measurement.cells.append(replace(cell, sketches=None))
            self.seen(measurement)

    def decide(
        self, measurement: measure.Measurement, look: int, images: Collection[str]
    ) -> list[list]:
        """[arm, bin, verdict] of every route's bins that a look at these images decides. It is kept
        in the file, so that a run that continues does not look again."""
        name = f"look {look}"
        if name not in measurement.checks:
            cells = [cell for cell in measurement.cells if cell.image in images]
            seen = gap_map.gap_map(
                measure.Measurement(measurement.settings, cells, measurement.checks),
                margin=self.options.margin,
                looks=self.options.looks,
            )
            decided = gap_map.decided(seen)
            measurement.checks[name] = [
                [gap.arm, list(gap.bin), gap.verdict]
                for gap in seen.gaps
                if (gap.arm, gap.bin) in decided
            ]
            measure.append_check(self.path, name, measurement.checks[name])
        return measurement.checks[name]

    def settled(self, sigma_bin: draws.Bin, found: list[list]) -> bool:
        """Whether every route is decided in a bin."""
        decided = {arm for arm, edges, _ in found if tuple(edges) == sigma_bin}
        measured = _measured(self.training_set, self.options)
        return all(str(arm) in decided for arm in _routes(measured))


def _look_text(look: int, images: int, found: list[list], options: Options) -> str:
    decided = ", ".join(
        f"{arm} {draws.bin_text(tuple(edges))} {judged} at {options.margin:g}"
        for arm, edges, judged in found
    )
    return f"look {look} of {options.looks}, {images} pictures: {decided or 'nothing decided yet'}"


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
            adapted = _adapted(live, training_set, weights)
            rows = torch.empty(len(items), adapted.size, device=live.device)
            for row, item, sigma_bin in zip(rows, items, bins):
                probe.draw_gradient(
                    _subject(live, training_set, item, options),
                    str(arms.SRC),
                    sigma_bin,
                    [0],
                    options.seed,
                    options.shared_noise,
                    live.velocity,
                    adapted.parameters,
                    row,
                )
            found.append(rows.cpu().double())
    return torch.nn.functional.cosine_similarity(*found, dim=1).tolist()


def _adapted(
    live: session.Session, training_set: arms.TrainingSet, weights: adapter.Weights
) -> adapter.Adapter:
    """The adapter in the network, after the look at its additions that must come before it."""
    first = training_set.items[0]
    live.check_additions(live.load_arm(training_set, first, arms.SRC)[0], first.conditioning)
    return live.adapt(weights)


def _fresh_weights(live: session.Session, options: Options) -> adapter.Weights:
    linears = families.linears(live.network)
    targets = adapter.match_targets(linears, families.targets_of(live.family, options.targets))
    return adapter.probe_weights(linears, targets, options.rank, options.seed)


def _check_shared(live: session.Session, training_set: arms.TrainingSet) -> None:
    """Raise ValueError for a picture whose draws cannot share a forward."""
    for item in training_set.items:
        shape = live.load_arm(training_set, item, arms.SRC)[0].shape
        # What goes alone has another signature each time.
        if len({live.velocity.signature(item.conditioning, shape) for _ in range(2)}) > 1:
            raise ValueError(
                f"draws of {item.name} cannot share a forward of this {live.family.name}: set "
                "micro_batch to 1"
            )


def _routes(measured: Sequence[arms.Arm]) -> list[arms.Arm]:
    return [arm for arm in measured if gap_map.is_route(str(arm))]


def _measured(training_set: arms.TrainingSet, options: Options) -> list[arms.Arm]:
    """What is measured of a set."""
    routes = _routes(training_set.arms)[: 1 if options.one_route else None]
    if not options.diagnostics:
        return [arms.SRC, *routes]
    others = (arm for arm in training_set.arms if arm != arms.SRC)
    kept = (arm for arm in others if arm in routes or not gap_map.is_route(str(arm)))
    return [arms.SRC, arms.NULL, *kept]


def _arms_of(training_set: arms.TrainingSet, item: arms.Item, options: Options) -> list[arms.Arm]:
    """What is measured of a picture."""
    has = (arms.SRC, arms.NULL, *training_set.arms_of(item))
    return [arm for arm in _measured(training_set, options) if arm in has]


def _subject(
    live: session.Session, training_set: arms.TrainingSet, item: arms.Item, options: Options
) -> probe.Subject:
    latents, weights = {}, {}
    for arm in _arms_of(training_set, item, options):
        latents[str(arm)], weights[str(arm)] = live.load_arm(training_set, item, arm)
    return probe.Subject(item.image, latents, weights, item.conditioning, training_set.native_tier)


def _settings(
    live: session.Session,
    training_set: arms.TrainingSet,
    options: Options,
    weights: adapter.Weights,
    unused: list[str],
) -> dict[str, Any]:
    return {
        "protocol": probe.PROTOCOL,
        "arms": [str(arm) for arm in _measured(training_set, options)],
        "bins": [list(sigma_bin) for sigma_bin in options.bins],
        "draws": options.draws,
        # Named where it is not 1, so that files from before it was an option are continued.
        **({"micro_batch": options.micro_batch} if options.micro_batch > 1 else {}),
        "seed": options.seed,
        "noise": "shared" if options.shared_noise else "independent",
        "sketch": options.sketch,
        "looks": options.looks,
        # With one look the margin decides nothing of what is measured.
        "margin": options.margin if options.looks > 1 else None,
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
        "images": {
            item.image: _image_settings(training_set, item, options)
            for item in sorted(training_set.items, key=lambda item: item.image)
        },
        "environment": live.environment,
    }


def _image_settings(
    training_set: arms.TrainingSet, item: arms.Item, options: Options
) -> dict[str, Any]:
    return {
        "name": item.name,
        "size": list(item.size),
        "mask": item.mask.stem if item.mask else None,
        "conditioning": text.conditioning_hash(item.conditioning),
        "guidance": text.guidance(item.conditioning),
        "grids": {
            str(arm): list(training_set.grid_of(item, arm))
            for arm in _arms_of(training_set, item, options)
        },
    }
