"""The probe, the trainer and the study of a gate without a canvas and without a server: ComfyUI in
this process, the nodes' functions.

What nodes show under themselves is printed. Everything else is as in a workflow of Load Diffusion
Model, Load VAE, Load Training Folder, Training Set, one node an arm, and the probe or the trainer,
so that a run here and one there continue the same file.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io
from server import PromptServer

from ..demotion import adapter, arms, compare, draws, measure, merge, plots
from ..demotion import gate as gates
from ..demotion import study as studies
from ..demotion import train as loop
from ..host import comparing, probing, team, training
from . import files, training_set
from . import train as trainer
from .progress import Progress

KINDS = ("demote", "repromote", "resample", "shifted")
DEMO_MODEL = files.DEMO / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"
DEMO_VAE = files.DEMO / "models" / "vae" / "demotion_nano_vae.safetensors"
DEMO_PICTURES = files.DEMO / "pictures" / "demotion_demo"
DEMO_GATE = files.DEMO / "gates" / "demotion_by_hand_256_192.json"
# Seconds between lines where one cannot be written over another.
EVERY = 15.0


class Console:
    """Stands where ComfyUI's server would: prints what nodes show."""

    def __init__(self) -> None:
        self.told = -EVERY
        self.said = 0
        self.open = False

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        line = f"{node_id}: {text}"
        if "\n" in text:
            self.end()
            print(line.replace("\n", "\n  "), flush=True)
        elif sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", flush=True)
            self.open = True
        elif time.monotonic() - self.told >= EVERY:
            self.told = time.monotonic()
            print(line, flush=True)

    def say(self, text: str) -> None:
        """Print the lines that a growing text has more than the last time."""
        self.end()
        lines = text.splitlines()
        print(*lines[self.said :], sep="\n", end="\n" * (len(lines) > self.said), flush=True)
        self.said = len(lines)

    def end(self) -> None:
        """Leave the line that is being written over."""
        if self.open:
            print(flush=True)
            self.open = False


def probe(
    *,
    model: Path,
    vae: Path,
    images: Path,
    clip: Sequence[Path],
    clip_type: str,
    native_tier: int,
    target_tiers: Sequence[int],
    other_arms: Sequence[str],
    preset: str,
    bins: str | None,
    noise: str,
    lora: Path | None,
    output: Path | None,
    into: Path | None,
    party: loop.Team = loop.ALONE,
    **options: Any,
) -> tuple[measure.Measurement, Path]:
    """Measure a folder of pictures on a model; the measurement and its file.

    other_arms are named ("reenc", "repromote:768"); preset, bins and noise are as the probe node
    has them; output is used in place of ComfyUI's output folder. options are the others of
    `probing.Options`; those that are None are the preset's. into names a file to continue.
    Processes of a party measure some of the pictures each, into files of their own, and the
    measurement is what these are together. Raises ValueError for files and options that do not fit.
    """
    _check_files(model, vae, *clip, *filter(None, [lora]))
    wanted = [
        parse_arm(name) for name in (*(f"demote:{tier}" for tier in target_tiers), *other_arms)
    ]
    if not wanted:
        raise ValueError("there is no arm to compare: give --target-tiers or --arms")
    given = {name: value for name, value in options.items() if value is not None}
    chosen = asdict(probing.PRESETS[preset]) | given
    chosen |= {"shared_noise": noise == "shared", "lora": lora}
    chosen["bins"] = tuple(draws.parse_bins(bins or chosen["bins"]))
    if party.size > 1 and chosen["looks"] > 1:
        raise ValueError(
            f"{chosen['looks']} looks are planned, and what a look leaves out depends on the "
            "pictures of all processes: give --looks 1, or measure in one process"
        )
    if party.size > 1 and into:
        raise ValueError(
            "--into names one file, and every process has its own: leave it out, or measure in one "
            "process"
        )
    with _console(output) as console:
        loaded, made = _loaded(model, vae, images, clip, clip_type, native_tier, wanted)
        measured, path = probing.run(
            loaded,
            _share(made, party),
            probing.Options(**chosen),
            files.output_folder("measurements"),
            lambda total: Progress(total, "probe", "gradients"),
            console.say,
            into,
        )
        parts = team.gathered(party, path)
    if party.size > 1:
        measured = merge.merge({part.name: measure.Measurement.load(part) for part in parts})
        key = measure.settings_key(measured.settings)
        path = path.with_name(f"{key}_merged_from_{party.size}.jsonl")
        if party.rank == 0:
            measured.save(path)
    return measured, path


def train(
    *,
    model: Path,
    vae: Path,
    images: Path,
    clip: Sequence[Path],
    clip_type: str,
    native_tier: int,
    gate: Path | None,
    output: Path | None,
    name: str,
    party: loop.Team = loop.ALONE,
    **widgets: Any,
) -> tuple[str, dict[str, Path]]:
    """Train a LoRA on a folder of pictures, through the gate of a file if there is one: the report,
    and the files written by what they are called.

    widgets and name are those of the trainer's node. The set is demoted to every tier of the gate.
    Only the first process of a party writes. Raises ValueError for what does not fit.
    """
    _check_files(model, vae, *clip)
    _check_widgets(widgets)
    opened = gate and gates.Gate.load(gate)
    if opened and opened.native_tier != native_tier:
        raise ValueError(
            f"the gate's native tier is {opened.native_tier}, and --native-tier is {native_tier}: "
            "give the gate's, or a gate made for this tier"
        )
    with _console(output), _cancellable():
        loaded, made = _loaded(
            model, vae, images, clip, clip_type, native_tier, _demoted(opened) if opened else []
        )
        options = trainer.options_of(loaded, made, **widgets)
        watch = training.Watch() if party.rank else Watch(name)
        states = files.output_folder("training") / "states"
        result = training.run(loaded, made, opened, options, states, watch, party)
        return result.report, {} if party.rank else watch.kept.keep(result)


def study(
    *,
    model: Path | None,
    vae: Path | None,
    images: Path | None,
    clip: Sequence[Path],
    clip_type: str,
    gate: Path | None,
    output: Path | None,
    name: str,
    party: loop.Team = loop.ALONE,
    **widgets: Any,
) -> tuple[str, list[Path]]:
    """Train every arm of a study of a gate: its table, and the files written, of which the first
    process of a party writes all.

    Without model, vae and images it is done on the demo's, and without a gate there through the
    demo's. What is finished is not trained again: the folder keeps each arm's last state. widgets
    are those of the trainer's node but for validate_every. Raises ValueError for what does not fit.
    """
    given = model, vae, images
    if given == (None, None, None):
        model, vae, images = DEMO_MODEL, DEMO_VAE, DEMO_PICTURES
        gate = gate or DEMO_GATE
    if None in (model, vae, images, gate):
        raise ValueError(
            "a study needs --model, --vae, --images and --gate, or none of the first three for the "
            "demo's: give what is missing"
        )
    _check_files(model, vae, *clip)
    _check_widgets(widgets)
    problem = files.name_problem(name)
    if problem:
        raise ValueError(problem)
    opened = gates.Gate.load(gate)
    planned = studies.arms(opened)
    with _console(output), _cancellable():
        loaded, made = _loaded(
            model, vae, images, clip, clip_type, opened.native_tier, _demoted(opened)
        )
        options = trainer.options_of(loaded, made, **widgets, validate_every=1)
        settings = replace(options.settings, validate_every=options.settings.steps)
        folder = files.output_folder("studies") / name
        native, rows = folder / f"{studies.NATIVE}.safetensors", []
        for arm in planned:
            chosen = replace(
                options, settings=replace(settings, seed=settings.seed + arm.other_seed)
            )
            watch = training.Watch() if party.rank else Steps(arm.name)
            states = folder / "states" / arm.stem
            result = training.run(loaded, made, arm.gate, chosen, states, watch, party)
            if party.rank:
                continue
            path = folder / f"{arm.stem}.safetensors"
            result.weights.save(path, result.metadata)
            predicted = training.forecast(made, arm.gate, options).saving if arm.gate else 0.0
            rows.append(
                studies.row(arm, result.history, predicted, _cosine(native, path, loaded.model))
            )
    if party.rank:
        return "", []
    found = studies.Study(rows, _setting(model, made, opened, options, party))
    return studies.table(found), _write_study(found, folder)


def _cosine(first: Path, second: Path, model) -> float:
    roles = {compare.FIRST: (first.stem, first), compare.SECOND: (second.stem, second)}
    compared = comparing.run(roles, model, lambda total: lambda: None)
    return compared.whole(compare.SECOND).cosine


def _setting(
    model: Path,
    made: arms.TrainingSet,
    opened: gates.Gate,
    options: training.Options,
    party: loop.Team,
) -> str:
    """What is the same in all arms of a study, in words."""
    settings = options.settings
    device = comfy.model_management.get_torch_device()
    pictures = len(made.items) - options.held_out
    return (
        f"{model.name}, {pictures} pictures at {made.native_tier} px and {options.held_out} held "
        f"out; {settings.steps} steps of {settings.samples}, {options.algorithm} of rank "
        f"{options.rank} and alpha {options.alpha:g}, {settings.optimizer}, learning rate "
        f"{settings.learning_rate:g} {settings.schedule} after {settings.warmup_steps} of warm-up, "
        f"sigma {settings.density}, seed {settings.seed}; gate "
        f"{'measured' if opened.measured else 'not measured'}; "
        f"{'deterministic' if options.deterministic else 'ordinary'} kernels, compute "
        f"{options.compute}, checkpointing {'on' if options.checkpointing else 'off'}, "
        f"{comfy.model_management.get_torch_device_name(device)}, processes: {party.size}, threads "
        f"of each: {torch.get_num_threads()}."
    )


def _write_study(found: studies.Study, folder: Path) -> list[Path]:
    data, words = folder / "study.json", folder / "study.md"
    found.save(data)
    measure.write_atomically(words, studies.table(found).encode())
    written = [data, words]
    for theme in plots.THEMES:
        drawn = plots.study_figure(found, theme)
        for suffix, save in ((".png", plots.save_png), (".svg", plots.save_svg)):
            written.append(folder / f"study_{theme}{suffix}")
            save(drawn, written[-1])
    return written


class Steps(training.Watch):
    """Prints how far a run is."""

    def __init__(self, label: str) -> None:
        self.label = label

    def start(self, plan: training.Plan) -> None:
        self.progress = Progress(plan.steps, self.label, "steps", done=plan.done)

    def step(self, history: loop.History) -> None:
        if history.losses:
            self.progress.detail = f", mean loss {history.smoothed():.4f}"
            self.progress()


class Watch(Steps):
    """Keeps the LoRAs made on the way as well, as the trainer's node does."""

    def __init__(self, name: str) -> None:
        super().__init__("training")
        self.kept = trainer.Watch(self.label, name)

    def lora(self, step: int, weights: adapter.Weights, metadata: dict[str, str]) -> None:
        self.kept.lora(step, weights, metadata)


@contextmanager
def _console(output: Path | None) -> Iterator[Console]:
    """ComfyUI without a server: what nodes show is printed, and files go to this folder, if one is
    given."""
    console = PromptServer.instance = Console()
    if output:
        folder_paths.set_output_directory(str(output.resolve()))
    files.register_folders()
    try:
        with torch.inference_mode():
            yield console
    finally:
        console.end()


@contextmanager
def _cancellable() -> Iterator[None]:
    """Ctrl-C is heard when a step is done, as ComfyUI's Cancel is; a second one at once."""

    def cancel(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        comfy.model_management.interrupt_current_processing()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except comfy.model_management.InterruptProcessingException:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def _check_files(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not there: give the path of a file")


def _check_widgets(widgets: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that the trainer's node would not take."""
    for known in trainer.TrainLora.define_schema().inputs:
        if isinstance(known, io.Int.Input | io.Float.Input) and known.id in widgets:
            value = widgets[known.id]
            if not known.min <= value <= known.max:
                raise ValueError(
                    f"--{known.id.replace('_', '-')} is {value:g}: give {known.min:g} to "
                    f"{known.max:g}"
                )


def _loaded(
    model: Path,
    vae: Path,
    images: Path,
    clip: Sequence[Path],
    clip_type: str,
    native_tier: int,
    wanted: Sequence[arms.Arm],
) -> tuple[Any, arms.TrainingSet]:
    """The model, and the set of the pictures with these arms."""
    loaded = _load("model", model, comfy.sd.load_diffusion_model)
    encoder = _load_clip(clip, clip_type) if clip else None
    made = _training_set(loaded, _load("VAE", vae, _vae), encoder, images, native_tier)
    for arm in wanted:
        made = arms.add_arm(made, arm, Progress(len(made.items), str(arm), "pictures"))
    return loaded, made


def _demoted(opened: gates.Gate) -> list[arms.Arm]:
    """The arms that a gate trains."""
    return [arms.Arm("demote", tier) for tier in sorted({rule.route[1] for rule in opened.rules})]


def _share(made: arms.TrainingSet, party: loop.Team) -> arms.TrainingSet:
    """A process's part of a set: different pictures in each."""
    hashes = sorted({item.image for item in made.items})
    if len(hashes) < party.size:
        raise ValueError(
            f"{len(hashes)} different pictures cannot be shared by {party.size} processes: ask for "
            "fewer processes"
        )
    mine = set(hashes[party.rank :: party.size])
    return replace(made, items=tuple(item for item in made.items if item.image in mine))


def parse_arm(name: str) -> arms.Arm:
    """An arm by its name. Raises ValueError for one that cannot be added to a set."""
    kind, _, tier = name.partition("+")[0].partition(":")
    if not (name == "reenc" or (kind in KINDS and tier.isdigit())):
        raise ValueError(
            f"arm '{name}' is unknown: use reenc, or one of {', '.join(KINDS)} with a tier, such "
            "as repromote:768"
        )
    return arms.Arm.parse(name)


def _training_set(model, vae, clip, images: Path, native_tier: int) -> arms.TrainingSet:
    """The set that the nodes would make of a folder, each picture named by its file."""
    images = images.resolve()
    if not images.is_dir():
        raise ValueError(f"{images} is not there: give a folder of pictures")
    folder_paths.set_input_directory(str(images.parent))
    pictures, captions, masks, repeats = training_set.LoadTrainingFolder.execute(images.name).args
    hidden = {"hidden_inputs": {io.Hidden.unique_id: "training set"}}
    made = training_set.TrainingSet.PREPARE_CLASS_CLONE(hidden).execute(
        [model], pictures, [vae], [native_tier], captions, masks, repeats, clip and [clip]
    )
    names = [path.relative_to(images).as_posix() for path in training_set.pictures_in(images)]
    items = (replace(item, name=name) for item, name in zip(made.args[0].items, names))
    return replace(made.args[0], items=tuple(items))


def _load(what: str, path: Path, loader: Callable[[str], Any]) -> Any:
    """What a loader of ComfyUI's makes of a file. Raises ValueError where it can make nothing."""
    try:
        return loader(str(path))
    # Loaders raise whatever the bytes of a strange file lead to.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ValueError(f"{path.name} is no {what} that ComfyUI can load ({reason})") from error


def _vae(path: str):
    state, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = comfy.sd.VAE(sd=state, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae


def _load_clip(paths: Sequence[Path], kind: str):
    try:
        kind = comfy.sd.CLIPType[kind.upper()]
    except KeyError:
        known = ", ".join(kind.name.lower() for kind in comfy.sd.CLIPType)
        raise ValueError(f"--clip-type {kind} is unknown: use one of {known}") from None
    embeddings = folder_paths.get_folder_paths("embeddings")
    return _load(
        "text encoder",
        paths[0],
        lambda _: comfy.sd.load_clip(list(map(str, paths)), embeddings, kind),
    )
