#!/usr/bin/env python3
"""Time per step and memory of the trainer: beside ComfyUI's own Train LoRA, and with demoted
samples beside without.

First part: batch 1 without a gate, both trainers in float32 on the same latents and captions, AdamW
and rank 8, with and without checkpointing. The pack's LoRA is on all Linears; ComfyUI's trainer has
no choice of targets, and trains all weights, norms and biases. Flux shows what goes wrong there.
Each trainer runs in a process of its own, and they take turns, a step at a time. Memory is the
highest resident size in training over that before the first step, in processes for that alone in
which freed memory is given back at once (Linux).

Second part: what a gate (half of the noise levels, every other step) saves of native training's
time. Realised: 1 - the mean step over a native one. Predicted: the same of bare steps of the same
batches, each timed after a step of the trainer in the same process: forwards and backwards of the
native and of the demoted samples, clipping, an optimiser's step. Nano: the demo's pictures,
256 -> 192. Mid-size: a random Flux of 100 M parameters, 1024 -> 768.

Times are processor time on one thread, without the first steps; medians of steps that demoted so
many samples. In the first part what is compared are neighbours, and the median of their ratios
counts. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/step_time.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import common

MB = 1 << 20
RANK, ALPHA, RATE = 8, 1.0, 5e-4
# glibc gives back what is freed, so that the resident size is what is in use. This takes time.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
WINDOW = (0.5, 1.0)
PICTURES = 4
NANO = common.ROOT / "demo" / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"
BESIDE = "{:<8}{:<14}{:>10}{:>12}{:>9}{:>12}{:>7}{:>9}{:>12}{:>7}"
SAVING = "{:<15}{:>6}{:>12}{:>8}{:>9}{:>11}{:>10}{:>7}"
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
    """What a process tells at its end: trained numbers, and highest memory in bytes."""

    size: int = 0
    peak: int = 0
    error: str | None = None


class Turns:
    """A process's end of the line: before each step it waits for its turn, after it it tells the
    seconds. Told of a run of the pack as its Watch."""

    def __init__(self, line: Connection) -> None:
        self.line = line

    def start(self, plan: Any = None) -> None:
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

    def tell(self, seconds: float) -> None:
        self.line.send(seconds)
        self.line.recv()
        self.started = time.process_time()


def _resident(name: str) -> int:
    """Bytes of the process by the kernel's name for them."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def in_turns(
    comfyui: str, sides: Mapping[str, tuple[Callable[[Turns, Case], Outcome], Case]]
) -> tuple[dict[str, list[float]], dict[str, Outcome]]:
    """The seconds of every side's turns, each side in a process of its own, and what it told at its
    end."""
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
    """The pack's trainer, without a gate."""
    import torch
    from pack.host import training

    from demotion import train

    with tempfile.TemporaryDirectory() as folder:
        model, the_set = model_and_set(case, Path(folder))
        settings = train.Settings(case.steps, RATE, case.batch)
        options = training.Options(
            settings, RANK, ALPHA, case.targets, compute="fp32", checkpointing=case.checkpointing
        )
        with torch.inference_mode():
            result = training.run(model, the_set, None, options, Path(folder) / "runs", turns)
    size = sum(
        tensor.numel()
        for factors in result.weights.modules.values()
        for tensor in factors.tensors.values()
    )
    return Outcome(size, turns.peak)


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


class Beside:
    """Times the trainer's steps, as their Watch, and after each one a bare one: the forwards and
    backwards of such a batch, clipping and an optimiser's step at a rate of 0, in the trainer's own
    session. Both by how many samples were demoted, in seconds."""

    def __init__(self, case: Case, the_set: Any) -> None:
        self.case, self.the_set = case, the_set
        self.steps: list[tuple[int, float]] = []
        self.bare: list[tuple[int, float]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a run lasts."""
        from pack.host import session

        opening = session.open_session

        @contextmanager
        def kept(*args: Any) -> Iterator[Any]:
            with opening(*args) as self.live:
                yield self.live

        session.open_session = kept
        try:
            yield
        finally:
            session.open_session = opening

    def start(self, plan: Any) -> None:
        import torch

        from demotion import arms

        parameters = self.live.network.parameters()
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        item = self.the_set.items[0]
        self.latents = [
            self.live.load_arm(self.the_set, item, arm)[0]
            for arm in (arms.SRC, arms.Arm("demote", self.case.demoted))
        ]

    def step(self, history: Any) -> None:
        if history.losses:
            self.steps.append((history.demoted[-1], time.process_time() - self.began))
            # What came before either is a batch of another make-up, as often as not.
            self.time_bare(history.demoted[-2:][0])
        self.began = time.process_time()

    def time_bare(self, demoted: int) -> None:
        import torch

        from demotion import draws

        began = time.process_time()
        conditioning = self.the_set.items[0].conditioning
        for one, count in zip(self.latents, (self.case.batch - demoted, demoted)):
            if count:
                latent = one.repeat(count, *[1] * (one.ndim - 1))
                predicted = self.live.velocity(latent, [0.5] * count, [conditioning] * count)
                draws.velocity_loss(predicted, latent, -latent).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bare.append((demoted, time.process_time() - began))


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
    sides = {"ours": (ours, case), "theirs": (theirs, case)}
    times, _ = in_turns(comfyui, sides)
    with mock.patch.dict(os.environ, GIVING_BACK):
        _, told = in_turns(comfyui, sides)
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


def savings(name: str, case: Case) -> str:
    """A line of the second table."""
    import torch
    from pack.host import training

    from demotion import gate, train

    opened = gate.by_hand(case.native, case.demoted, WINDOW, "spread:0.5")
    options = training.Options(
        train.Settings(case.steps, RATE, case.batch), RANK, ALPHA, case.targets, compute="fp32"
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model, the_set = model_and_set(case, Path(folder))
        beside = Beside(case, the_set)
        with beside.listening():
            training.run(model, the_set, opened, options, Path(folder) / "runs", beside)
    found, bare = (medians(timed[case.warm :]) for timed in (beside.steps, beside.bare))
    counts = [count for count, _ in beside.steps[case.warm :]]
    predicted, realised = (
        1 - statistics.mean(seconds[count] for count in counts) / seconds[0]
        for seconds in (bare, found)
    )
    return SAVING.format(
        name,
        case.batch,
        f"{sum(counts)} of {len(counts) * case.batch}",
        f"{bare[0]:.3f}",
        f"{found[0]:.3f}",
        f"{predicted:.1%}",
        f"{realised:.1%}",
        f"{realised / predicted:.2f}",
    )


def medians(timed: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median of the seconds of each count."""
    alike: dict[int, list[float]] = {}
    for count, seconds in timed:
        alike.setdefault(count, []).append(seconds)
    return {count: statistics.median(found) for count, found in alike.items()}


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
        titles = "batch", "demoted", "bare", "trainer", "predicted", "realised", "ratio"
        if {"nano", "mid"} & set(parts):
            print(SAVING.format("model", *titles))
        if "nano" in parts:
            for batch, steps in ((1, 302), (4, 202)):
                case = Case(NANO, None, 256, 192, batch=batch, steps=steps)
                print(savings("nano Flux", case), flush=True)
        if "mid" in parts:
            file = toys.flux(
                folder,
                "mid",
                hidden_size=640,
                num_heads=5,
                depth=6,
                depth_single_blocks=1,
            )
            case = Case(file, "Flux", 1024, 768, steps=21, warm=1)
            print(savings("Flux of 100 M", case), flush=True)


if __name__ == "__main__":
    main()
