"""Merge Measurements."""

from __future__ import annotations

from comfy_api.latest import io

from ..demotion import measure, merge
from . import wires


class MergeMeasurements(io.ComfyNode):
    """Two measurements of different pictures -> one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionMergeMeasurements",
            display_name="Merge Measurements",
            category=wires.CATEGORY,
            description="Joins two measurements of different pictures, of two machines say, as if "
            "one run had made them. Their settings must be the same.",
            search_aliases=["combine", "join", "gap map"],
            inputs=[
                wires.Measurement.Input("first", tooltip="A measurement."),
                wires.Measurement.Input(
                    "second",
                    tooltip="A measurement of other pictures with the same model, adapter, bins, "
                    "draws, seed and environment.",
                ),
            ],
            outputs=[
                wires.Measurement.Output(
                    "measurement", display_name="measurement", tooltip="The cells of both."
                )
            ],
        )

    @classmethod
    def execute(cls, first: measure.Measurement, second: measure.Measurement) -> io.NodeOutput:
        return io.NodeOutput(
            merge.merge({"the first measurement": first, "the second measurement": second})
        )


NODES = [MergeMeasurements]
