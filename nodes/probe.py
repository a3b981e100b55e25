"""Probe Preset - Sigma-Binned Gradient Probe - Load and Save Measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..demotion import arms, gap_map, measure, verdict, views
from ..demotion import draws as random_draws
from ..host import probing
from . import files, wires
from .live import Live
from .model import compute_inputs
from .progress import Progress, tell

FRESH = "[fresh adapter]"


class ProbePreset(io.ComfyNode):
    """How much to measure, for the question at hand."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionProbePreset",
            display_name="Probe Preset",
            category=wires.CATEGORY,
            description="Bins, draws, looks and what is measured that go together: connect them to "
            "the probe's widgets of these names.",
            search_aliases=["quick", "gap map"],
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=list(probing.PRESETS),
                    default="quick",
                    tooltip="quick: is there a window for one route? map: every arm over all of "
                    "sigma. full: finer bins, the endpoint and twice the draws.",
                )
            ],
            outputs=[
                io.String.Output("bins", tooltip="Bins of sigma."),
                io.Int.Output("draws", tooltip="Draws per picture and bin."),
                io.Int.Output("looks", tooltip="Planned looks."),
                io.Boolean.Output("diagnostics", tooltip="Whether null and controls are measured."),
                io.Boolean.Output("one_route", tooltip="Whether only the first route is measured."),
            ],
        )

    @classmethod
    def execute(cls, preset: str) -> io.NodeOutput:
        chosen = probing.PRESETS[preset]
        return io.NodeOutput(
            chosen.bins, chosen.draws, chosen.looks, chosen.diagnostics, chosen.one_route
        )


class GradientProbe(io.ComfyNode):
    """Gradients of every arm, bin by bin, reduced to their inner products."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionGradientProbe",
            display_name="Sigma-Binned Gradient Probe",
            category=wires.CATEGORY,
            description="Measures LoRA gradients per noise bin for every arm of a set. Finished "
            "cells are kept on disk: the same queue again continues after a Cancel.",
            search_aliases=["gradient", "measure", "gap map"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model the LoRA will be trained on. It is not changed."
                ),
                wires.TrainingSet.Input(
                    "training_set", display_name="set", tooltip="A set with the arms to compare."
                ),
                io.String.Input(
                    "bins",
                    default="8",
                    tooltip="Bins of sigma: a count of equal bins over 0-1, or edges such as "
                    "0.1-0.3, 0.3-0.5. Then 1 adds the endpoint sigma = 1 (8, 1).",
                ),
                io.Int.Input(
                    "draws",
                    default=8,
                    min=1,
                    max=4096,
                    tooltip="Random (sigma, noise) draws per picture and bin. An even number of at "
                    "least 4 also tells draw noise from differences between pictures. 1 needs a "
                    "sketch.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFF,
                    control_after_generate=False,
                    tooltip="Names all random numbers. Another seed is another measurement.",
                ),
                io.Combo.Input(
                    "noise",
                    options=["shared", "independent"],
                    default="shared",
                    tooltip="shared: all arms of a draw have the same noise as far as their grids "
                    "allow, which needs fewer draws. independent: every arm has its own.",
                ),
                io.Combo.Input(
                    "adapter",
                    options=[FRESH, *folder_paths.get_filename_list("loras")],
                    default=FRESH,
                    tooltip="The LoRA whose gradient is taken: your own file, best, or a fresh "
                    "seeded one.",
                ),
                io.Int.Input(
                    "rank", default=16, min=1, max=256, tooltip="Rank of a fresh adapter."
                ),
                io.String.Input(
                    "targets",
                    default="",
                    advanced=True,
                    tooltip="Regular expression over the model's Linears that a fresh adapter sits "
                    "on. Empty: attention and MLP of the image stream.",
                ),
                *compute_inputs(),
                io.Int.Input(
                    "looks",
                    default=1,
                    min=1,
                    max=verdict.MAX_LOOKS,
                    optional=True,
                    tooltip="Look at the map this often while pictures come in, and measure no "
                    "more in bins where every route is decided.",
                ),
                io.Float.Input(
                    "margin",
                    default=0.05,
                    min=0.001,
                    max=0.999,
                    step=0.001,
                    optional=True,
                    advanced=True,
                    tooltip="Distance that counts as safe at the looks between. Of no effect with "
                    "one look.",
                ),
                io.Boolean.Input(
                    "diagnostics",
                    default=True,
                    optional=True,
                    tooltip="Measure null and the controls beside the routes. Off: only what a "
                    "gate is made from.",
                ),
                io.Int.Input(
                    "sketch",
                    default=0,
                    min=0,
                    max=1 << 20,
                    optional=True,
                    advanced=True,
                    tooltip="Buckets of a count-sketch of each gradient sum, which the estimands "
                    "population and dataset need; 16384 is usual. 0: none.",
                ),
                io.Boolean.Input(
                    "one_route",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Measure no route but the first of the set: the arm that the first "
                    "Demote Latents made.",
                ),
                io.Int.Input(
                    "micro_batch",
                    display_name="draws per forward",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    advanced=True,
                    tooltip="So many draws go through the model at once, and their mean counts as "
                    "one draw. Draws must be a multiple of it, at least twice. Faster only where "
                    "one picture does not fill the device.",
                ),
            ],
            outputs=[
                wires.Measurement.Output(
                    "measurement",
                    display_name="measurement",
                    tooltip="Inner products of all arms per picture and bin.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, bins: str | None = None) -> bool | str:
        try:
            # Linked bins are None here and are parsed when they are known.
            random_draws.parse_bins("1" if bins is None else bins)
        except ValueError as problem:
            return str(problem)
        return True

    @classmethod
    def execute(
        cls,
        model,
        training_set: arms.TrainingSet,
        bins: str,
        draws: int,
        seed: int,
        noise: str,
        adapter: str,
        rank: int,
        targets: str,
        compute: str,
        checkpointing: bool,
        looks: int = 1,
        margin: float = 0.05,
        diagnostics: bool = True,
        sketch: int = 0,
        one_route: bool = False,
        micro_batch: int = 1,
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        lora = (
            None
            if adapter == FRESH
            else Path(folder_paths.get_full_path_or_raise("loras", adapter))
        )
        options = probing.Options(
            bins=tuple(random_draws.parse_bins(bins)),
            draws=draws,
            seed=seed,
            shared_noise=noise == "shared",
            rank=rank,
            targets=targets,
            lora=lora,
            compute=compute,
            checkpointing=checkpointing,
            looks=looks,
            margin=margin,
            diagnostics=diagnostics,
            sketch=sketch,
            one_route=one_route,
            micro_batch=micro_batch,
        )
        watch = Watch(node_id, margin)
        measurement, path = probing.run(
            model,
            training_set,
            options,
            files.output_folder("measurements"),
            watch.start,
            watch.say,
            seen=watch.seen,
        )
        tell(node_id, f"{len(measurement.cells)} cells in {path.name}")
        return io.NodeOutput(
            measurement,
            ui={
                "text": [watch.said],
                "files": [files.shown("measurement", path)],
                **watch.finish(measurement),
            },
        )


class Watch:
    """Shows a probe under its node: what is said, how far it is, and the map so far."""

    def __init__(self, node_id: str, margin: float) -> None:
        self.node_id, self.margin = node_id, margin
        self.live = Live("map", node_id)
        self.said = ""

    def say(self, text: str) -> None:
        self.said = text

    def start(self, total: int) -> Callable[[], None]:
        self.progress = Progress(total, self.node_id, "gradients", self.said)
        return self.tick

    def seen(self, measurement: measure.Measurement) -> None:
        self.measurement, self.key = measurement, measurement.key
        self.show()

    def tick(self) -> None:
        self.progress()
        self.show()

    def show(self) -> None:
        self.live.show(
            self.key, lambda: views.map_so_far(self.measurement, self.margin), self.progress
        )

    def finish(self, measurement: measure.Measurement) -> dict[str, list]:
        made = gap_map.gap_map(measurement, margin=self.margin)
        return self.live.finish(measurement.key, views.map_view(made))


class SaveMeasurement(files.NamedOutput):
    """Keeps a measurement under a name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionSaveMeasurement",
            display_name="Save Measurement",
            category=wires.CATEGORY,
            description="Saves a measurement under a name in output/demotion/measurements. Nothing "
            "is overwritten.",
            is_output_node=True,
            inputs=[
                wires.Measurement.Input("measurement", tooltip="A measurement."),
                io.String.Input(
                    "name", default="measurement", tooltip="File name; a number is added."
                ),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, measurement: measure.Measurement, name: str) -> io.NodeOutput:
        path = files.numbered(files.output_folder("measurements"), name, ".jsonl")
        measurement.save(path)
        return io.NodeOutput(ui={"files": [files.shown("measurement", path)]})


class LoadMeasurement(io.ComfyNode):
    """Reads a saved measurement."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionLoadMeasurement",
            display_name="Load Measurement",
            category=wires.CATEGORY,
            description="Loads a measurement from output/demotion/measurements, again when the "
            "file changes.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=files.saved_names("measurements", ".jsonl"),
                    tooltip="A file in output/demotion/measurements.",
                )
            ],
            outputs=[
                wires.Measurement.Output(
                    "measurement", display_name="measurement", tooltip="The measurement."
                )
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        return files.stamp(files.saved_file("measurements", file))

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        return io.NodeOutput(measure.Measurement.load(files.saved_file("measurements", file)))


NODES = [ProbePreset, GradientProbe, SaveMeasurement, LoadMeasurement]
