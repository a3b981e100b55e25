"""Cost of a Gate."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from comfy_api.latest import io, ui
from PIL import Image

from ..demotion import arms, gate_cost, plots
from ..demotion import gate as gates
from ..demotion import train as loop
from . import wires
from .density import density_inputs, density_of, schedule_inputs


class GateCost(io.ComfyNode):
    """Gate + set + how training draws its samples -> P(rule) and saving."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionGateCost",
            display_name="Cost of a Gate",
            category=wires.CATEGORY,
            description="Tells before a run which share of its samples each rule of a gate takes, "
            "and which share of the tokens that saves. Draws it over the density of sigma.",
            search_aliases=["predicted saving", "sigma density", "timestep distribution"],
            is_output_node=True,
            inputs=[
                wires.Gate.Input("gate", tooltip="The gate to price."),
                wires.TrainingSet.Input(
                    "training_set",
                    display_name="set",
                    tooltip="The set to train on: its grids count. It need not be demoted yet.",
                ),
                *density_inputs(),
                io.Int.Input("steps", default=500, min=1, max=1000000, tooltip="Steps of the run."),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=256,
                    tooltip="Samples a step. It changes how many steps are mixed, not the saving.",
                ),
                *schedule_inputs(),
                io.Combo.Input(
                    "theme",
                    options=list(plots.THEMES),
                    default="light",
                    tooltip="Light or dark paper.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Needed for the model's own sigma_density. It is not run.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "report", display_name="report", tooltip="P(rule), and the saving expected."
                ),
                io.Image.Output(
                    "image",
                    display_name="image",
                    tooltip="The density of sigma, and what each rule takes of it.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        gate: gates.Gate,
        training_set: arms.TrainingSet,
        sigma_density: str,
        density_mean: float,
        density_std: float,
        density_shift: float,
        steps: int,
        batch_size: int,
        schedule: str,
        warmup_steps: int,
        theme: str,
        model=None,
    ) -> io.NodeOutput:
        density = density_of(model, sigma_density, density_mean, density_std, density_shift)
        course = loop.Settings(
            steps, learning_rate=1.0, schedule=schedule, warmup_steps=warmup_steps
        ).course
        pictures = gate_cost.pictures_of(training_set, gate)
        found = gate_cost.forecast(gate, density, pictures, course, batch_size)
        report = gate_cost.report(gate, density, found, course, batch_size)
        drawn = plots.png(plots.gate_figure(gate, density, found, theme))
        pixels = np.asarray(Image.open(BytesIO(drawn)).convert("RGB"), dtype=np.float32)
        image = torch.from_numpy(pixels / 255)[None]
        shown = ui.PreviewImage(image, cls=cls).as_dict()
        return io.NodeOutput(report, image, ui={**shown, "text": (report,)})


NODES = [GateCost]
