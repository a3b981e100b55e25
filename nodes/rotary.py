"""Align Rotary to Native Grid, and the choice of an alignment in other nodes."""

from __future__ import annotations

from comfy_api.latest import io

from ..demotion import rotary
from ..host import rotary as doors
from . import wires

NONE = "none"


def choice(tooltip: str) -> io.Combo.Input:
    """Widget `rotary` of nodes that can go without; optional, since they are older than it."""
    return io.Combo.Input(
        "rotary", options=[NONE, *rotary.MODES], default=NONE, optional=True, tooltip=tooltip
    )


def mode_of(chosen: str) -> str | None:
    """The alignment chosen in a widget, or None."""
    return None if chosen == NONE else chosen


class AlignRotary(io.ComfyNode):
    """MODEL -> MODEL that samples a small latent as if on its native grid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionAlignRotary",
            display_name="Align Rotary to Native Grid",
            category=wires.CATEGORY,
            description="Samples a latent smaller than the native size with its rotary positions "
            "carried onto the native grid. For looking only: measuring and training have a widget "
            "of their own.",
            search_aliases=["rope", "position interpolation", "yarn"],
            inputs=[
                io.Model.Input("model", tooltip="A model with rotary positions; not changed."),
                io.Combo.Input(
                    "mode",
                    options=list(rotary.MODES),
                    default="gated_yarn",
                    tooltip="pi: all bands are interpolated. yarn: fast bands keep their "
                    "frequency. gated_yarn: the less noise, the more bands keep theirs.",
                ),
                io.Int.Input(
                    "native_width",
                    default=1024,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Width in pixels of the native picture that the latent stands for.",
                ),
                io.Int.Input(
                    "native_height",
                    default=1024,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Height in pixels of the native picture that the latent stands for.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    "aligned", display_name="model", tooltip="The model, aligned, for a sampler."
                )
            ],
        )

    @classmethod
    def execute(cls, model, mode: str, native_width: int, native_height: int) -> io.NodeOutput:
        return io.NodeOutput(doors.align_model(model, mode, (native_height, native_width)))


NODES = [AlignRotary]
