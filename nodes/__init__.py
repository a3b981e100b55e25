"""The canvas: V3 schemas, tooltips, checks and progress over `demotion` and `host`."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import (
    compare,
    files,
    gap_map,
    gate_cost,
    merge,
    model,
    probe,
    published,
    rotary,
    train,
    training_set,
)


class DemotionExtension(ComfyExtension):
    """All nodes of the pack."""

    async def on_load(self) -> None:
        files.register_folders()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            *training_set.NODES,
            *model.NODES,
            *probe.NODES,
            *merge.NODES,
            *gap_map.NODES,
            *gate_cost.NODES,
            *published.NODES,
            *train.NODES,
            *compare.NODES,
            *rotary.NODES,
        ]


async def comfy_entrypoint() -> DemotionExtension:
    return DemotionExtension()
