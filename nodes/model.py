"""Inspect Model, and the inputs that say how a model computes gradients."""

from __future__ import annotations

from comfy_api.latest import io

from ..host import inspection, session
from . import wires


def compute_inputs() -> list[io.Input]:
    """Precision and checkpointing, the same for the probe and the trainer."""
    return [
        io.Combo.Input(
            "compute",
            options=list(session.COMPUTE),
            default="model",
            advanced=True,
            tooltip="Precision of forward and backward. model: as ComfyUI would for pictures.",
        ),
        io.Boolean.Input(
            "checkpointing",
            default=True,
            advanced=True,
            tooltip="Keep only what enters each block and compute the rest again: far less memory, "
            "about a third more time. Needed where weights are streamed.",
        ),
    ]


class InspectModel(io.ComfyNode):
    """What the pack knows of a model, and what a pattern of targets matches in it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionInspectModel",
            display_name="Inspect Model",
            category=wires.CATEGORY,
            description="Shows a model's family, latents, tokens, sigma range and rotary table, "
            "and the Linears that a LoRA would sit on, before any time is spent.",
            search_aliases=["lora targets", "preview targets", "model info"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A flow-matching model. It is not changed."),
                io.String.Input(
                    "targets",
                    default="",
                    tooltip="Regular expression over the model's Linears, as in the probe and the "
                    "trainer. Empty: attention and MLP of the image stream.",
                ),
                io.Int.Input(
                    "rank", default=16, min=1, max=256, tooltip="Rank, to count parameters."
                ),
                io.Int.Input(
                    "native_tier",
                    default=1024,
                    min=32,
                    max=4096,
                    step=16,
                    tooltip="Nominal edge in pixels, to count tokens and memory.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "report", display_name="report", tooltip="The facts, one a line."
                )
            ],
        )

    @classmethod
    def execute(cls, model, targets: str, rank: int, native_tier: int) -> io.NodeOutput:
        report = inspection.report(model, targets, rank, native_tier)
        return io.NodeOutput(report, ui={"text": (report,)})


NODES = [InspectModel]
