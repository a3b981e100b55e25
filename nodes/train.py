"""Train LoRA (Gated)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import numpy as np
from comfy_api.latest import io
from PIL import Image

from ..demotion import adapter, arms, measure, plots, views
from ..demotion import train as loop
from ..host import sampling, training
from . import files, wires
from .density import density_inputs, density_of, schedule_inputs
from .live import Live
from .model import compute_inputs
from .progress import Progress, tell

CONTINUE, AFRESH = "continue", "start again"


class TrainLora(files.NamedOutput):
    """Training set + gate -> LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionTrainLora",
            display_name="Train LoRA (Gated)",
            category=wires.CATEGORY,
            description="Trains a LoRA and demotes the samples whose sigma lies in a window of the "
            "gate. The file is written to output/loras; after a Cancel or a crash the same queue "
            "again continues.",
            search_aliases=["lora", "finetune", "training"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model to train for. It is not changed."),
                wires.TrainingSet.Input(
                    "training_set",
                    display_name="set",
                    tooltip="A training set, demoted to every tier of the gate.",
                ),
                io.Int.Input(
                    "steps",
                    default=500,
                    min=1,
                    max=1000000,
                    tooltip="Optimiser steps. More steps than a finished run had continue it.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=1e-8,
                    max=10.0,
                    step=1e-6,
                    round=False,
                    tooltip="Learning rate. Prodigy finds its own: set 1.",
                ),
                io.Int.Input("rank", default=16, min=1, max=256, tooltip="Rank of the LoRA."),
                io.Float.Input(
                    "alpha",
                    default=16.0,
                    min=0.01,
                    max=1024.0,
                    step=0.5,
                    tooltip="Scale of the LoRA is alpha / rank.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=256,
                    tooltip="Samples that go through the model together, where their grids and "
                    "captions allow. Each is demoted or not by its own sigma.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFF,
                    control_after_generate=False,
                    tooltip="Names all random numbers, the adapter's start included.",
                ),
                *density_inputs(),
                *schedule_inputs(),
                io.String.Input(
                    "targets",
                    default="",
                    advanced=True,
                    tooltip="Regular expression over the model's Linears that take a LoRA. Empty: "
                    "attention and MLP of the image stream.",
                ),
                io.String.Input(
                    "name",
                    default="demotion_lora",
                    tooltip="File name in output/loras; steps and a number are added.",
                ),
                io.Combo.Input(
                    "algorithm",
                    options=list(adapter.KINDS),
                    default="LoRA",
                    tooltip="Form of the adapter. All load in ComfyUI's LoRA loaders.",
                ),
                *compute_inputs(),
                wires.Gate.Input(
                    "gate",
                    optional=True,
                    tooltip="Which samples to demote. Without one all train native.",
                ),
                io.Combo.Input(
                    "optimizer",
                    options=list(loop.OPTIMIZERS),
                    default="AdamW",
                    optional=True,
                    tooltip="AdamW; Adafactor, which keeps next to no state; or Prodigy, which "
                    "finds its own learning rate.",
                ),
                io.Float.Input(
                    "epochs",
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=1.0,
                    optional=True,
                    advanced=True,
                    tooltip="Above 0: train for so many passes over the pictures and their "
                    "repeats instead of for so many steps.",
                ),
                io.Int.Input(
                    "accumulation",
                    default=1,
                    min=1,
                    max=1024,
                    optional=True,
                    advanced=True,
                    tooltip="Batches whose gradients are averaged for a step.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=0.01,
                    min=0.0,
                    max=10.0,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Decoupled weight decay.",
                ),
                io.Float.Input(
                    "max_norm",
                    default=1.0,
                    min=0.001,
                    max=1e9,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Gradients longer than this are shortened to it.",
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    optional=True,
                    advanced=True,
                    tooltip="Fraction of samples trained with the set's empty text.",
                ),
                io.Float.Input(
                    "ema_decay",
                    default=0.0,
                    min=0.0,
                    max=0.99999,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Above 0: the LoRA saved, sampled and validated is a moving average of "
                    "the weights with this decay, such as 0.99.",
                ),
                io.Int.Input(
                    "held_out",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="Pictures that are not trained on but give the validation loss.",
                ),
                io.Int.Input(
                    "validate_every",
                    default=50,
                    min=1,
                    max=1000000,
                    optional=True,
                    advanced=True,
                    tooltip="Steps between validation losses, if pictures are held out.",
                ),
                io.Int.Input(
                    "save_every",
                    default=100,
                    min=0,
                    max=1000000,
                    optional=True,
                    tooltip="Steps between saves: a LoRA in output/loras, and a state that a crash "
                    "goes on from. 0: only at the end and at a Cancel.",
                ),
                io.Int.Input(
                    "keep",
                    default=2,
                    min=1,
                    max=1000,
                    optional=True,
                    advanced=True,
                    tooltip="States to keep while training, the newest. LoRAs are all kept.",
                ),
                io.Conditioning.Input(
                    "sample_prompt",
                    optional=True,
                    tooltip="What to sample pictures of while training, from before the first "
                    "step on.",
                ),
                io.Int.Input(
                    "sample_every",
                    default=100,
                    min=1,
                    max=1000000,
                    optional=True,
                    tooltip="Steps between sample pictures, if a sample_prompt is connected.",
                ),
                io.Int.Input(
                    "sample_steps",
                    default=20,
                    min=1,
                    max=1000,
                    optional=True,
                    advanced=True,
                    tooltip="Steps of ComfyUI's sampler for a sample picture (euler, simple).",
                ),
                io.Float.Input(
                    "sample_cfg",
                    default=1.0,
                    min=1.0,
                    max=30.0,
                    step=0.1,
                    optional=True,
                    advanced=True,
                    tooltip="Guidance scale of a sample picture. Above 1 the set's empty text is "
                    "the negative.",
                ),
                io.Boolean.Input(
                    "deterministic",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Only kernels that give the same bits in every run. Slower on a GPU.",
                ),
                io.Combo.Input(
                    "resume",
                    options=[CONTINUE, AFRESH],
                    default=CONTINUE,
                    optional=True,
                    advanced=True,
                    tooltip="continue: go on where the same run was left. start again: from the "
                    "first step, every time it is queued.",
                ),
            ],
            outputs=[
                io.LoraModel.Output("lora", display_name="lora", tooltip="The trained LoRA."),
                io.LossMap.Output(
                    "loss_map", display_name="loss map", tooltip="Loss of every step."
                ),
                io.String.Output(
                    "report", display_name="report", tooltip="What was done, demoted and saved."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, resume: str = CONTINUE, **_) -> float:
        # Not a number is never what it was, so nothing of the host's cache is used.
        return float("nan") if resume == AFRESH else 0.0

    @classmethod
    def execute(
        cls, model, training_set: arms.TrainingSet, name: str, gate=None, **widgets
    ) -> io.NodeOutput:
        options = options_of(model, training_set, **widgets)
        watch = Watch(cls.hidden.unique_id, name)
        states = files.output_folder("training") / "states"
        result = training.run(model, training_set, gate, options, states, watch)
        written = watch.keep(result)
        tell(watch.node_id, result.report)
        samples = [files.shown(f"sample after step {step}", path) for step, path in watch.pictures]
        return io.NodeOutput(
            result.weights.tensors(),
            {"loss": result.history.losses},
            result.report,
            ui={
                "images": [files.shown("loss curve", written["loss curve"]), *samples],
                "text": [result.report],
                "files": [files.shown(label, path) for label, path in written.items()],
                **watch.finish(result.history),
            },
        )


def options_of(
    model,
    training_set: arms.TrainingSet,
    *,
    steps,
    learning_rate,
    rank,
    alpha,
    batch_size,
    seed,
    sigma_density,
    density_mean,
    density_std,
    density_shift,
    schedule,
    warmup_steps,
    targets,
    algorithm,
    compute,
    checkpointing,
    optimizer="AdamW",
    epochs=0.0,
    accumulation=1,
    weight_decay=0.01,
    max_norm=1.0,
    caption_dropout=0.0,
    ema_decay=0.0,
    held_out=0,
    validate_every=50,
    save_every=100,
    keep=2,
    sample_prompt=None,
    sample_every=100,
    sample_steps=20,
    sample_cfg=1.0,
    deterministic=False,
    resume=CONTINUE,
) -> training.Options:
    """What the widgets ask for, on this model and set."""
    if epochs:
        steps = training.steps_of(epochs, training_set, held_out, batch_size * accumulation)
    settings = loop.Settings(
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        accumulation=accumulation,
        optimizer=optimizer,
        schedule=schedule,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_norm=max_norm,
        caption_dropout=caption_dropout,
        ema_decay=ema_decay,
        validate_every=validate_every if held_out else 0,
        seed=seed,
        density=density_of(model, sigma_density, density_mean, density_std, density_shift),
    )
    return training.Options(
        settings,
        rank,
        alpha,
        targets,
        algorithm,
        compute,
        checkpointing,
        deterministic=deterministic,
        held_out=held_out,
        save_every=save_every,
        keep=keep,
        fresh=resume == AFRESH,
        sampling=sample_prompt and sampling.Sampling(sample_prompt, sample_steps, sample_cfg),
        sample_every=sample_every,
    )


class Watch(training.Watch):
    """Shows a run under its node, and keeps the LoRAs and samples that it makes on the way. folder
    takes what is kept of it beside the LoRAs."""

    def __init__(self, node_id: str, name: str) -> None:
        self.node_id, self.name = node_id, name
        self.root = files.output_folder("training")
        self.folder = files.numbered(self.root, name, "")
        self.pictures: list[tuple[int, Path]] = []
        self.live = Live("training", node_id)

    def start(self, plan: training.Plan) -> None:
        self.plan = plan
        self.progress = Progress(plan.steps, self.node_id, "steps", done=plan.done)
        if plan.done and self.index.exists():
            found = json.loads(self.index.read_text("utf-8"))
            self.pictures = [
                (step, path)
                for step, path in ((step, self.root / name) for step, name in found)
                if step <= plan.done and path.exists()
            ]

    def step(self, history: loop.History) -> None:
        if history.losses:
            self.progress.detail = f", mean loss {history.smoothed():.4f}"
            self.progress()
        else:
            comfy.model_management.throw_exception_if_processing_interrupted()
        self.live.show(self.key, lambda: self.view(history), self.progress)

    def view(self, history: loop.History) -> dict[str, Any]:
        """What the node's widget draws of the run."""
        pictures = [
            {"step": step, "file": files.shown("sample", path)} for step, path in self.pictures
        ]
        plan = self.plan
        drawn = views.training_view(history, plan.steps, plan.cells, plan.saving)
        return {**drawn, "pictures": pictures}

    def finish(self, history: loop.History) -> dict[str, list]:
        return self.live.finish(self.key, self.view(history))

    @property
    def key(self) -> str:
        """Names the run as its folder does."""
        return self.folder.relative_to(self.root).as_posix().replace("/", "_")

    @property
    def index(self) -> Path:
        """What a run that goes on finds of the samples that it had before: [[step, file], ...]."""
        return self.plan.folder / "samples.json"

    def lora(self, step: int, weights: adapter.Weights, metadata: dict[str, str]) -> None:
        self.save(step, weights, metadata)

    def picture(self, step: int, pixels: np.ndarray) -> None:
        path = self.folder / f"sample_{step:07}.png"
        arms.write_picture(pixels, path)
        self.pictures.append((step, path))
        found = [(step, path.relative_to(self.root).as_posix()) for step, path in self.pictures]
        measure.write_atomically(self.index, json.dumps(found).encode())
        self.progress.preview(Image.fromarray(pixels))

    def keep(self, result: training.Result) -> dict[str, Path]:
        """Write what a finished run made; the files by what they are called."""
        done = result.history
        curve, report, history = (
            self.folder / file for file in ("loss.png", "report.txt", "history.json")
        )
        lora = self.save(len(done.losses), result.weights, result.metadata)
        plots.save_png(plots.loss_figure(done.losses, done.demoted, done.validation), curve)
        measure.write_atomically(report, (result.report + "\n").encode())
        measure.write_atomically(history, json.dumps(asdict(done)).encode())
        return {"LoRA": lora, "loss curve": curve, "report": report, "history": history}

    def save(self, step: int, weights: adapter.Weights, metadata: dict[str, str]) -> Path:
        """Write a LoRA where ComfyUI's loaders list it."""
        path = files.numbered(
            Path(folder_paths.get_output_directory()) / "loras",
            f"{self.name}_{step}_steps",
            ".safetensors",
        )
        own = {"modelspec.title": path.stem, "ss_steps": str(step)}
        weights.save(path, metadata | own)
        return path


NODES = [TrainLora]
