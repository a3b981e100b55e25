"""The probe without a canvas and without a server: ComfyUI in this process, the nodes' functions.

What nodes show under themselves is printed. Everything else is as in a workflow of Load Diffusion
Model, Load VAE, Load Training Folder, Training Set, one node an arm, and the probe, so that a run
here and one there continue the same file.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io
from server import PromptServer

from ..demotion import arms, draws, measure
from ..host import probing
from . import files, training_set
from .progress import Progress

KINDS = ("demote", "repromote", "resample", "shifted")
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
    **options: Any,
) -> tuple[measure.Measurement, Path]:
    """Measure a folder of pictures on a model; the measurement and its file.

    other_arms are named ("reenc", "repromote:768"); preset, bins and noise are as the probe node
    has them; output is used in place of ComfyUI's output folder. options are the others of
    `probing.Options`; those that are None are the preset's. into names a file to continue. Raises
    ValueError for files and options that do not fit.
    """
    for path in (model, vae, *clip, *filter(None, [lora])):
        if not path.is_file():
            raise ValueError(f"{path} is not there: give the path of a file")
    wanted = [
        parse_arm(name) for name in (*(f"demote:{tier}" for tier in target_tiers), *other_arms)
    ]
    if not wanted:
        raise ValueError("there is no arm to compare: give --target-tiers or --arms")
    given = {name: value for name, value in options.items() if value is not None}
    chosen = asdict(probing.PRESETS[preset]) | given
    chosen |= {"shared_noise": noise == "shared", "lora": lora}
    chosen["bins"] = tuple(draws.parse_bins(bins or chosen["bins"]))
    console = PromptServer.instance = Console()
    if output:
        folder_paths.set_output_directory(str(output.resolve()))
    files.register_folders()
    try:
        with torch.inference_mode():
            loaded = _load("model", model, comfy.sd.load_diffusion_model)
            encoder = _load_clip(clip, clip_type) if clip else None
            made = _training_set(loaded, _load("VAE", vae, _vae), encoder, images, native_tier)
            for arm in wanted:
                tick = Progress(len(made.items), str(arm), "pictures")
                made = arms.add_arm(made, arm, tick)
            return probing.run(
                loaded,
                made,
                probing.Options(**chosen),
                files.output_folder("measurements"),
                lambda total: Progress(total, "probe", "gradients"),
                console.say,
                into,
            )
    finally:
        console.end()


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
