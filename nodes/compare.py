"""Compare LoRAs."""

from __future__ import annotations

from pathlib import Path

import folder_paths
import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image

from ..demotion import compare, measure, plots
from ..host import comparing
from . import files, wires
from .progress import Progress, tell

NONE = "[none]"


class CompareLoras(files.NamedOutput):
    """LoRA files -> how alike their weight changes are."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        loras = folder_paths.get_filename_list("loras")
        return io.Schema(
            node_id="DemotionCompareLoras",
            display_name="Compare LoRAs",
            category=wires.CATEGORY,
            description="Cosine between the weight changes of two LoRA files, in all, by block and "
            "by kind of module, beside those of a rerun and of another seed. Saves table and "
            "figure.",
            search_aliases=["lora similarity", "cosine", "delta w"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "first", options=loras, tooltip="The LoRA to compare with: the native one."
                ),
                io.Combo.Input("second", options=loras, tooltip="The LoRA in question: the gated."),
                io.Combo.Input(
                    "twin",
                    options=[NONE, *loras],
                    default=NONE,
                    tooltip="Reference: the first's training run again, the same in all settings. "
                    "A second as near as this is as good as a rerun.",
                ),
                io.Combo.Input(
                    "other_seed",
                    options=[NONE, *loras],
                    default=NONE,
                    display_name="other seed",
                    tooltip="Reference: the first's training with another seed.",
                ),
                io.String.Input(
                    "name",
                    default="comparison",
                    tooltip="File name in output/demotion/comparisons; a number is added.",
                ),
                io.Combo.Input(
                    "theme",
                    options=list(plots.THEMES),
                    default="light",
                    tooltip="Paper of the figure: light or dark.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The model that the LoRAs are for. With it names may be of any "
                    "convention; without it all files must name the same modules. DoRA needs it.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "report", display_name="report", tooltip="Cosines and norm ratios as a table."
                ),
                io.Image.Output(
                    "image", display_name="image", tooltip="The figure: cosine by block and part."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(
        cls, first=None, second=None, twin=None, other_seed=None, **_
    ) -> list[str]:
        chosen = (first, second, twin, other_seed)
        return [files.stamp(_path(name)) for name in chosen if name not in (None, NONE)]

    @classmethod
    def execute(
        cls,
        first: str,
        second: str,
        twin: str,
        other_seed: str,
        name: str,
        theme: str,
        model=None,
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        roles = {
            compare.FIRST: first,
            compare.SECOND: second,
            compare.TWIN: twin,
            compare.OTHER_SEED: other_seed,
        }
        comparison = comparing.run(
            {role: (chosen, _path(chosen)) for role, chosen in roles.items() if chosen != NONE},
            None if model is None else model.model,
            lambda total: Progress(total, node_id, "modules"),
        )
        data = files.numbered(files.output_folder("comparisons"), name, ".json")
        text, png, svg = (data.with_suffix(suffix) for suffix in (".txt", ".png", ".svg"))
        report = compare.summary(comparison)
        drawn = plots.comparison_figure(comparison, theme)
        comparison.save(data)
        measure.write_atomically(text, (report + "\n").encode())
        plots.save_png(drawn, png)
        plots.save_svg(drawn, svg)
        image = np.asarray(Image.open(png).convert("RGB"), dtype=np.float32) / 255
        picture = files.shown("comparison (picture)", png)
        tell(node_id, f"cosine {comparison.whole(compare.SECOND).cosine:.4f}")
        return io.NodeOutput(
            report,
            torch.from_numpy(image)[None],
            ui={
                "images": [picture],
                "text": [report],
                "files": [
                    files.shown("comparison", data),
                    files.shown("comparison (table)", text),
                    picture,
                    files.shown("comparison (SVG)", svg),
                ],
            },
        )


def _path(name: str) -> Path:
    return Path(folder_paths.get_full_path_or_raise("loras", name))


NODES = [CompareLoras]
