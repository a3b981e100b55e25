"""Train LoRA (Gated)."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..demotion import adapter, arms, draws, measure, plots
from ..demotion import gate as gates
from ..demotion import train as loop
from ..host import families, training
from . import files, wires
from .model import compute_inputs
from .progress import Progress, tell

DENSITIES = ["uniform", "logit_normal", "shifted", "model"]


class TrainLora(files.NamedOutput):
    """Training set + gate -> LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionTrainLora",
            display_name="Train LoRA (Gated)",
            category=wires.CATEGORY,
            description="Trains a LoRA and demotes the samples whose sigma lies in a window of the "
            "gate. The file is "
            "written to output/loras; after a Cancel the same queue again continues.",
            search_aliases=["lora", "finetune", "training"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model to train for. It is not changed."),
                wires.TrainingSet.Input(
                    "training_set",
                    display_name="set",
                    tooltip="A training set, demoted to every tier of the gate.",
                ),
                io.Int.Input("steps", default=500, min=1, max=1000000, tooltip="Optimiser steps."),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=1e-8,
                    max=1.0,
                    step=1e-6,
                    round=False,
                    tooltip="AdamW's learning rate.",
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
                    tooltip="Samples a step. Each is demoted or not by its own sigma.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFF,
                    control_after_generate=False,
                    tooltip="Names all random numbers, the adapter's start included.",
                ),
                io.Combo.Input(
                    "sigma_density",
                    options=DENSITIES,
                    default="logit_normal",
                    tooltip="How sigma is drawn: uniform, logit_normal, shifted, or through the "
                    "model's own schedule shift.",
                ),
                io.Float.Input(
                    "density_mean",
                    default=0.0,
                    min=-10.0,
                    max=10.0,
                    step=0.1,
                    advanced=True,
                    tooltip="Mean of logit_normal.",
                ),
                io.Float.Input(
                    "density_std",
                    default=1.0,
                    min=0.01,
                    max=10.0,
                    step=0.1,
                    advanced=True,
                    tooltip="Standard deviation of logit_normal.",
                ),
                io.Float.Input(
                    "density_shift",
                    default=3.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    advanced=True,
                    tooltip="Shift of shifted; 1 is uniform, larger is noisier.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=["constant", "cosine"],
                    default="constant",
                    tooltip="Learning rate after the warm-up: constant, or a cosine down to 0.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=100000,
                    advanced=True,
                    tooltip="Steps over which the learning rate rises linearly.",
                ),
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
    def execute(
        cls,
        model,
        training_set: arms.TrainingSet,
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
        name,
        algorithm,
        compute,
        checkpointing,
        gate=None,
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        if sigma_density == "model":
            density = families.own_density(model.model)
        else:
            density = draws.SigmaDensity(sigma_density, density_mean, density_std, density_shift)
        settings = loop.Settings(
            steps=steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            schedule=schedule,
            warmup_steps=warmup_steps,
            seed=seed,
            density=density,
        )
        if gate is None:
            gate = gates.Gate(
                (), measured=False, margin=None, source="none", native_tier=training_set.native_tier
            )
        result = training.run(
            model,
            training_set,
            gate,
            training.Options(
                settings, rank, alpha, targets, algorithm, compute, checkpointing
            ),
            files.output_folder("training"),
            lambda total: Progress(total, node_id, "steps"),
        )
        lora = files.numbered(
            Path(folder_paths.get_output_directory()) / "loras",
            f"{name}_{steps}_steps",
            ".safetensors",
        )
        result.weights.save(lora, result.metadata)
        curve = files.output_folder("training") / f"{lora.stem}_loss.png"
        plots.save_png(
            plots.loss_figure(
                result.history.losses, [count > 0 for count in result.history.demoted]
            ),
            curve,
        )
        report = files.output_folder("training") / f"{lora.stem}_report.txt"
        measure.write_atomically(report, (result.report + "\n").encode())
        tell(node_id, result.report)
        return io.NodeOutput(
            result.weights.tensors(),
            {"loss": result.history.losses},
            result.report,
            ui={
                "images": [files.shown("loss curve", curve)],
                "text": [result.report],
                "files": [
                    files.shown("LoRA", lora),
                    files.shown("loss curve", curve),
                    files.shown("report", report),
                ],
            },
        )


NODES = [TrainLora]
