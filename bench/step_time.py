#!/usr/bin/env python3
"""Time per step and memory of the trainer: beside ComfyUI's own Train LoRA, and with demoted
samples beside without.

First part: batch 1 without a gate, both trainers in float32 on the same latents and captions, AdamW
and rank 8, with and without checkpointing. The pack's LoRA is on all Linears; ComfyUI's trainer has
no choice of targets, and trains all weights, norms and biases. Flux shows what goes wrong there.
Each trainer runs in a process of its own, and they take turns, a step at a time. Memory is the
highest resident size in training over that before the first step (Linux).

Second part: what a gate (half of the noise levels, every other step) saves in the steps in which it
demotes samples. Realised is 1 - the time of such a step over that of the native one before it.
Predicted is the same if a step were no more than its forwards and backwards, which are timed by
themselves on a native batch and on one of which so many samples are demoted. Nano: the demo's
pictures, 256 -> 192. Mid-size: a random Flux of 100 M parameters, 1024 -> 768.

Times are processor time on one thread, without the first steps; what is compared are neighbours,
and the median of their ratios counts. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/step_time.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common

MB = 1 << 20
RANK, ALPHA, RATE = 8, 1.0, 5e-4
WINDOW = (0.5, 1.0)
PICTURES = 4
NANO = common.ROOT / "demo" / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"
BESIDE = "{:<8}{:<14}{:>10}{:>12}{:>9}{:>12}{:>7}{:>9}{:>12}{:>7}"
SAVING = "{:<15}{:>6}{:>12}{:>9}{:>11}{:>10}{:>7}"
NANO_VAE = common.ROOT / "demo" / "models" / "vae" / "demotion_nano_vae.safetensors"


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    family          of the toys, whose latents and captions the model takes; None: the demo's own
    native          tier in pixels
    demoted         tier of the gate's route; None: there is no gate
    steps           so many, of which the first `warm` do not count
    targets         pattern; empty: the family's own
    """

    file: Path
    family: str | None
    native: int
    demoted: int | None = None
    batch: int = 1
    steps: int = 10
    warm: int = 2
    checkpointing: bool = False
    targets: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a process tells at its end: trained numbers, highest memory in bytes, and what each of
    its turns was."""

    size: int = 0
    peak: int = 0
    turns: Sequence[int] = ()
    error: str | None = None


class Turns:
    """A process's end of the line: before each step it waits for its turn, after it it tells the
    seconds. Told of a run of the pack as its Watch."""

    def __init__(self, line: Connection) -> None:
        self.line = line

    def start(self, steps: int = 0, done: int = 0) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _resident("VmRSS")
        self.tell(0.0)

    def step(self, history: Any = None) -> None:
        # The pack tells of no step at first.
        if history is None or history.losses:
            self.tell(time.process_time() - self.started)

    @property
    def peak(self) -> int:
        return _resident("VmHWM") - self.before

    def tell(self, found: float) -> None:
        """Instead of the seconds of a step."""
        self.line.send(found)
        self.line.recv()
        self.started = time.process_time()


def _resident(name: str) -> int:
    """Bytes of the process by the kernel's name for them."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def in_turns(
    comfyui: str, sides: Mapping[str, tuple[Callable[[Turns, Case], Outcome], Case]]
) -> tuple[dict[str, list[float]], dict[str, Outcome]]:
    """What every side told of its turns (seconds, but for `costs`), each side in a process of its
    own, and at its end."""
    spawn = multiprocessing.get_context("spawn")
    lines, outcomes = {}, {}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name, (work, case) in sides.items():
        lines[name], end = spawn.Pipe()
        spawn.Process(target=_side, args=(end, comfyui, work, case), daemon=True).start()

    def hear(name: str) -> None:
        said = lines[name].recv()
        if isinstance(said, float):
            times[name].append(said)
        else:
            outcomes[name] = said
            del lines[name]

    for name in list(lines):
        hear(name)
    while lines:
        for name in list(lines):
            lines[name].send(None)
            hear(name)
    # The first is the start.
    return {name: seconds[1 + sides[name][1].warm :] for name, seconds in times.items()}, outcomes


def alone(
    comfyui: str, work: Callable[[Turns, Case], Outcome], case: Case
) -> tuple[list[float], Sequence[int]]:
    """What one side told of its turns when all were its own, and what each of them was."""
    times, outcomes = in_turns(comfyui, {"": (work, case)})
    return times[""], outcomes[""].turns


def _side(
    line: Connection, comfyui: str, work: Callable[[Turns, Case], Outcome], case: Case
) -> None:
    common.start(comfyui)
    import against_native_trainer

    try:
        outcome = work(Turns(line), case)
    except RuntimeError as error:
        outcome = Outcome(error=against_native_trainer.reason(error))
    line.send(outcome)


def ours(turns: Turns, case: Case) -> Outcome:
    """The pack's trainer, without a gate or through one."""
    import torch
    from pack.host import training

    from demotion import gate, train

    with tempfile.TemporaryDirectory() as folder:
        model, the_set = model_and_set(case, Path(folder))
        settings = train.Settings(case.steps, RATE, case.batch)
        options = training.Options(
            settings, RANK, ALPHA, case.targets, compute="fp32", checkpointing=case.checkpointing
        )
        opened = gate.Gate((), False, None, "by hand", case.native)
        if case.demoted:
            opened = gate.by_hand(case.native, case.demoted, WINDOW, "spread:0.5")
        with torch.inference_mode():
            result = training.run(model, the_set, opened, options, Path(folder) / "runs", turns)
    size = sum(
        tensor.numel()
        for factors in result.weights.modules.values()
        for tensor in factors.tensors.values()
    )
    return Outcome(size, turns.peak, result.history.demoted[case.warm :])


def theirs(turns: Turns, case: Case) -> Outcome:
    """ComfyUI's Train LoRA, its widgets as they come but for the case and float32."""
    import comfy.utils
    import comfy_extras.nodes_train as trainer
    import torch

    from demotion import arms

    loop = trainer._run_training_loop

    def watched(*args: Any) -> None:
        turns.start()
        loop(*args)

    trainer._run_training_loop = watched
    comfy.utils.set_progress_bar_enabled(False)
    comfy.utils.set_progress_bar_global_hook(lambda *args, **kwargs: turns.step())
    inputs = trainer.TrainLoraNode.define_schema().inputs
    widgets = {widget.id: widget.default for widget in inputs if hasattr(widget, "default")}
    widgets |= {
        "steps": case.steps,
        "rank": RANK,
        "learning_rate": RATE,
        "optimizer": "AdamW",
        "training_dtype": "fp32",
        "lora_dtype": "fp32",
        "gradient_checkpointing": case.checkpointing,
    }
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model, the_set = model_and_set(case, Path(folder))
        lora = trainer.TrainLoraNode.execute(
            [model],
            [{"samples": the_set.latent(item, arms.SRC)[None]} for item in the_set.items],
            [item.conditioning for item in the_set.items],
            **{name: [value] for name, value in widgets.items()},
        ).result[0]
    return Outcome(sum(tensor.numel() for tensor in lora.values()), turns.peak)


def costs(turns: Turns, case: Case) -> Outcome:
    """In every turn the forwards and backwards of a batch of which so many samples are demoted,
    over those of a native one."""
    import torch
    from pack.host import families, session

    from demotion import adapter, arms, draws

    tiers = {None: arms.SRC, case.demoted: arms.Arm("demote", case.demoted)}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model, the_set = model_and_set(case, Path(folder))
        with session.open_session(model, "fp32", case.checkpointing) as live:
            linears = families.linears(live.network)
            targets = adapter.match_targets(linears, families.targets_of(live.family, case.targets))
            trained = live.adapt(adapter.zero_weights(linears, targets, RANK, ALPHA, 0))
            item = the_set.items[0]
            latents = {tier: live.load_arm(the_set, item, arm)[0] for tier, arm in tiers.items()}

            def seconds(tier: int | None, count: int) -> float:
                if not count:
                    return 0.0
                began = time.process_time()
                latent = latents[tier].repeat(count, *[1] * (latents[tier].ndim - 1))
                predicted = live.velocity(latent, [0.5] * count, [item.conditioning] * count)
                draws.velocity_loss(predicted, latent, -latent).backward()
                took = time.process_time() - began
                for parameter in trained.parameters:
                    parameter.grad = None
                return took

            counts = [1 + turn % case.batch for turn in range(case.steps)]
            turns.start()
            for count in counts:
                whole = seconds(None, case.batch)
                split = seconds(None, case.batch - count) + seconds(case.demoted, count)
                turns.tell(split / whole)
    return Outcome(trained.size, turns.peak, counts[case.warm :])


class RandomLatents:
    """A VAE of random latents [..., h, w], for models that are random too."""

    fingerprint = "random"

    def __init__(self, leading: tuple[int, ...]) -> None:
        self.leading = leading

    def encode(self, pixels: Any) -> Any:
        import torch

        height, width, _ = pixels.shape
        return torch.randn(*self.leading, height // 8, width // 8)


def model_and_set(case: Case, folder: Path) -> tuple[Any, Any]:
    """MODEL and training set of a case."""
    import comfy.sd
    import comfy.utils
    import evaluations
    import numpy as np
    import torch

    from demotion import arms, grid

    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(case.file))
        if case.family is None:
            vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(NANO_VAE)))
            return model, evaluations.training_set(model, vae, 3 * PICTURES, folder)
        from family_toys import TOYS

        toy, size = TOYS[case.family], (case.native, case.native)
        items = []
        for index in range(PICTURES):
            pixels = np.full((*size, 3), index, np.uint8)
            items.append(
                arms.Item(
                    image=arms.content_hash(pixels),
                    name=f"picture {index}",
                    picture=arms.store_picture(pixels, folder),
                    mask=None,
                    size=size,
                    native=grid.native_grid(size, case.native),
                    caption="",
                    repeats=1,
                    conditioning=toy.conditioning(model, index, 64),
                )
            )
        codec = RandomLatents(toy.latent[:-2])
        the_set = arms.TrainingSet(tuple(items), case.native, 8, 2, codec, folder)
        wanted = [arms.SRC, *([arms.Arm("demote", case.demoted)] if case.demoted else [])]
        for arm in wanted:
            the_set = arms.add_arm(the_set, arm, lambda: None)
        return model, the_set


def models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Family and checkpoint of random models, wide and deep enough for steps of some tenths of a
    second."""
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit
    import toys

    width = 384
    yield (
        "SD3",
        toys.saved(
            folder / "sd3.safetensors",
            mmdit.MMDiT,
            input_size=None,
            in_channels=16,
            depth=width // 64,
            adm_in_channels=16,
            context_embedder_config={
                "target": "torch.nn.Linear",
                "params": {"in_features": 32, "out_features": width},
            },
            pos_embed_max_size=32,
            num_patches=1024,
            qk_norm="rms",
            x_block_self_attn_layers=[0],
        ),
    )
    yield "WAN21", toys.wan(folder, "wan", dim=width, ffn_dim=4 * width, num_heads=3, num_layers=6)
    yield "Flux", toys.flux(folder, "flux", hidden_size=width, num_heads=3, depth_single_blocks=4)


def beside_train_lora(comfyui: str, family: str, file: Path, checkpointing: bool) -> str:
    """A line of the first table."""
    case = Case(file, family, 384, steps=8, checkpointing=checkpointing, targets=".")
    times, told = in_turns(comfyui, {"ours": (ours, case), "theirs": (theirs, case)})
    own, other = told["ours"], told["theirs"]
    sizes = f"{own.size:,}", f"{other.size:,}"
    seconds, memory = statistics.median(times["ours"]), own.peak / MB
    cells = [f"{seconds:.3f}", "error", "", f"{memory:.0f}", "", ""]
    if not other.error:
        pairs = zip(times["ours"], times["theirs"], strict=True)
        cells[1] = f"{statistics.median(times['theirs']):.3f}"
        cells[2] = f"{statistics.median(a / b for a, b in pairs):.2f}"
        cells[4] = f"{other.peak / MB:.0f}"
        cells[5] = f"{own.peak / other.peak:.2f}"
    line = BESIDE.format(family, "on" if checkpointing else "off", *sizes, *cells)
    return f"{line.rstrip()}  {other.error or ''}".rstrip()


def savings(comfyui: str, name: str, case: Case) -> str:
    """A line of the second table."""
    # One after the other: what comes first after waiting for a turn is slower.
    seconds, demoted = alone(comfyui, ours, case)
    ratios, split = alone(comfyui, costs, case)
    after_native = [i for i in range(1, len(seconds)) if demoted[i] and not demoted[i - 1]]
    counts = [demoted[i] for i in after_native]
    whole = medians(counts, [seconds[i] / seconds[i - 1] for i in after_native])
    bare = medians(split, ratios)
    predicted, realised = (
        1 - statistics.mean(ratio[count] for count in counts) for ratio in (bare, whole)
    )
    native = statistics.median(took for took, count in zip(seconds, demoted) if not count)
    return SAVING.format(
        name,
        case.batch,
        f"{sum(counts)} of {len(counts) * case.batch}",
        f"{native:.3f}",
        f"{predicted:.1%}",
        f"{realised:.1%}",
        f"{realised / predicted:.2f}",
    )


def medians(labels: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Median of the values that have the same label."""
    alike: dict[int, list[float]] = {}
    for label, value in zip(labels, values, strict=True):
        alike.setdefault(label, []).append(value)
    return {label: statistics.median(found) for label, found in alike.items()}


def wrong_gradient(folder: Path) -> str:
    """Cosine of what ComfyUI's trainer takes for the gradient of a toy Flux, with checkpointing."""
    import against_native_trainer
    import comfy.sd
    import torch
    import toys
    from family_toys import TOYS

    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(toys.flux(folder)))
    picture = torch.randn(1, *TOYS["Flux"].latent, generator=torch.Generator().manual_seed(0))
    caption = TOYS["Flux"].conditioning(model)
    return against_native_trainer.compare(model, [picture], [caption], True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comfyui", help="folder of ComfyUI")
    parser.add_argument("parts", nargs="*", help="only these: beside, nano, mid")
    options = parser.parse_args()
    parts = options.parts or ["beside", "nano", "mid"]
    common.start(options.comfyui)
    import toys

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "beside" in parts:
            print(BESIDE.format("", "", "numbers", "", "seconds", "", "", "MB", "", ""))
            sides = "pack", "Train LoRA"
            titles = "family", "checkpointing", *sides, *sides, "ratio", *sides, "ratio"
            print(BESIDE.format(*titles))
            for family, file in models(folder):
                for checkpointing in (False, True):
                    print(
                        beside_train_lora(options.comfyui, family, file, checkpointing), flush=True
                    )
            cosine = wrong_gradient(folder)
            print(f"Flux: what Train LoRA takes for the gradient has cosine {cosine} to it")
        titles = "batch", "demoted", "seconds", "predicted", "realised", "ratio"
        if {"nano", "mid"} & set(parts):
            print(SAVING.format("model", *titles))
        if "nano" in parts:
            for batch, steps in ((1, 302), (4, 202)):
                case = Case(NANO, None, 256, 192, batch=batch, steps=steps)
                print(savings(options.comfyui, "nano Flux", case), flush=True)
        if "mid" in parts:
            file = toys.flux(
                folder,
                "mid",
                hidden_size=640,
                num_heads=5,
                depth=6,
                depth_single_blocks=1,
            )
            case = Case(file, "Flux", 1024, 768, steps=11, warm=1)
            print(savings(options.comfyui, "Flux of 100 M", case), flush=True)


if __name__ == "__main__":
    main()
