"""Analyse Published Rows."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..demotion import published
from . import files, wires


def rows_file(name: str) -> Path:
    """A file in ComfyUI's input folder. Raises ValueError when it is not there."""
    root = folder_paths.get_input_directory()
    path = Path(root) / name
    if not path.is_file() or not folder_paths.is_within_directory(root, str(path)):
        raise ValueError(
            f"file '{name}' is not in ComfyUI's input folder: copy the released rows there"
        )
    return path


class AnalysePublishedRows(io.ComfyNode):
    """Released per-image cosines -> report."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionAnalysePublishedRows",
            display_name="Analyse Published Rows",
            category=wires.CATEGORY,
            description="Recomputes the published gap table, its stepped form and its windows' "
            "bounds from released rows of cosines, beside a consistent estimate with its band.",
            search_aliases=["gap map", "paper"],
            inputs=[
                io.String.Input(
                    "file",
                    default="published_rows.jsonl",
                    tooltip="A file of released rows (JSON lines) in ComfyUI's input folder.",
                )
            ],
            outputs=[
                io.String.Output("report", display_name="report", tooltip="The tables as text.")
            ],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool | str:
        if file is None:
            return True  # a linked name is checked when it is known
        try:
            rows_file(file)
        except ValueError as problem:
            return str(problem)
        return True

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        return files.stamp(rows_file(file))

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        return io.NodeOutput(published.report(rows_file(file)))


NODES = [AnalysePublishedRows]
