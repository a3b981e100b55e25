"""Debiased Cosine - Plot Gap Map - Gate from Gap Map - Gate by Hand - Load and Save Gap Map and
Gate."""

from __future__ import annotations

import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image

from ..demotion import cosine, draws, measure, plots, views
from ..demotion import gap_map as maps
from ..demotion import gate as gates
from . import files, live, rotary, wires
from .training_set import TIER

SPANS = ["always", "early", "late", "spread"]
STEPS, MASS = "steps", "learning-rate mass"
NO_DENSITY = "none"


class DebiasedCosine(io.ComfyNode):
    """Measurement -> gap map."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionDebiasedCosine",
            display_name="Debiased Cosine",
            category=wires.CATEGORY,
            description="Distances between each arm's mean gradient and the native one, free of "
            "the bias of finite draws, with a simultaneous 95 % band and a verdict at the margin.",
            search_aliases=["gap map", "gradient distance"],
            inputs=[
                wires.Measurement.Input(
                    "measurement", tooltip="A measurement of at least 8 pictures for verdicts."
                ),
                io.Combo.Input(
                    "estimator",
                    options=list(cosine.ESTIMATORS),
                    default="one_set",
                    tooltip="one_set: all pairs of different draws. two_set: even against odd "
                    "draws, less precise; a check. published, stepped: the published forms, to "
                    "compare with; per_image and independent noise only.",
                ),
                io.Combo.Input(
                    "control",
                    options=["none", "reenc", *maps.BY_TIER],
                    default="none",
                    tooltip="none: the distance itself decides. Else the distance beyond that of "
                    "reenc (the VAE round trip, which training does not pay), or of resample or "
                    "repromote at each route's own tier.",
                ),
                io.Float.Input(
                    "margin",
                    default=0.05,
                    min=0.001,
                    max=0.999,
                    step=0.001,
                    tooltip="Largest distance (1 - cosine) that still counts as the same gradient.",
                ),
                io.Combo.Input(
                    "estimand",
                    options=list(cosine.ESTIMANDS),
                    default="ratio",
                    optional=True,
                    tooltip="What is averaged over pictures. ratio: directions. power_ratio: in "
                    "their own lengths. per_image: the mean of the pictures' cosines. population, "
                    "dataset: the batch gradient, from a measurement with sketches.",
                ),
            ],
            outputs=[
                wires.GapMap.Output(
                    "gap_map", display_name="gap map", tooltip="Distances, bands, verdicts."
                ),
                io.String.Output("summary", display_name="summary", tooltip="The map as a table."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, estimand: str | None = "ratio", estimator: str | None = "one_set"
    ) -> bool | str:
        if None in (estimand, estimator):
            return True  # linked values are checked when they are known
        try:
            maps.check_choice(estimand, estimator)
        except ValueError as problem:
            return str(problem)
        return True

    @classmethod
    def execute(
        cls,
        measurement: measure.Measurement,
        estimator: str,
        control: str,
        margin: float,
        estimand: str = "ratio",
    ) -> io.NodeOutput:
        made = maps.gap_map(
            measurement,
            estimand=estimand,
            estimator=estimator,
            control=None if control == "none" else control,
            margin=margin,
        )
        return io.NodeOutput(made, maps.summary(made))


class PlotGapMap(files.NamedOutput):
    """Gap map -> picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionPlotGapMap",
            display_name="Plot Gap Map",
            category=wires.CATEGORY,
            description="Draws distance over sigma for every route with its band, the margin and "
            "the verdicts; the same as a table; and the self-checks. Saves PNG and SVG.",
            is_output_node=True,
            inputs=[
                wires.GapMap.Input("gap_map", display_name="gap map", tooltip="A gap map."),
                io.String.Input(
                    "name",
                    default="gap_map",
                    tooltip="File name in output/demotion/maps; a number is added.",
                ),
                io.Combo.Input(
                    "figure",
                    options=[*plots.FIGURES, "all"],
                    default="map",
                    optional=True,
                    tooltip="map: distance over sigma and verdicts. heat: arms by bins with "
                    "numbers. checks: null, precision, draw limit, split halves. all: the three.",
                ),
                io.Combo.Input(
                    "theme",
                    options=list(plots.THEMES),
                    default="light",
                    optional=True,
                    tooltip="Light or dark paper.",
                ),
                io.Combo.Input(
                    "sigma_density",
                    options=["logit_normal", "uniform", NO_DENSITY],
                    default="logit_normal",
                    optional=True,
                    tooltip="How training draws sigma, shown faintly behind the map: logit_normal "
                    "(mean 0, std 1), uniform, or none. It changes no number.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    "image", display_name="image", tooltip="The figure; with all a batch of three."
                )
            ],
        )

    @classmethod
    def execute(
        cls,
        gap_map: maps.GapMap,
        name: str,
        figure: str = "map",
        theme: str = "light",
        sigma_density: str = "logit_normal",
    ) -> io.NodeOutput:
        density = None if sigma_density == NO_DENSITY else draws.SigmaDensity(sigma_density)
        images, pictures, saved = [], [], []
        for kind in plots.FIGURES if figure == "all" else [figure]:
            drawn = plots.draw(gap_map, kind, theme, density)
            stem = name if kind == "map" else f"{name}_{kind}"
            png, svg = (
                files.numbered(files.output_folder("maps"), stem, suffix)
                for suffix in (".png", ".svg")
            )
            plots.save_png(drawn, png)
            plots.save_svg(drawn, svg)
            label = "gap map" if kind == "map" else f"gap map, {kind}"
            pictures.append(files.shown(f"{label} (picture)", png))
            saved += [pictures[-1], files.shown(f"{label} (SVG)", svg)]
            images.append(np.asarray(Image.open(png).convert("RGB"), dtype=np.float32) / 255)
        return io.NodeOutput(
            torch.from_numpy(np.stack(images)),
            ui={
                "images": pictures,
                "files": saved,
                **live.keep("map", views.map_view(gap_map)),
            },
        )


class SaveGapMap(files.NamedOutput):
    """Keeps a gap map as JSON."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionSaveGapMap",
            display_name="Save Gap Map",
            category=wires.CATEGORY,
            is_output_node=True,
            description="Saves a gap map as JSON in output/demotion/maps. It can be redrawn "
            "without the model.",
            inputs=[
                wires.GapMap.Input("gap_map", display_name="gap map", tooltip="A gap map."),
                io.String.Input("name", default="gap_map", tooltip="File name; a number is added."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, gap_map: maps.GapMap, name: str) -> io.NodeOutput:
        path = files.numbered(files.output_folder("maps"), name, ".json")
        gap_map.save(path)
        return io.NodeOutput(ui={"files": [files.shown("gap map", path)]})


class LoadGapMap(io.ComfyNode):
    """Reads a saved gap map."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionLoadGapMap",
            display_name="Load Gap Map",
            category=wires.CATEGORY,
            description="Loads a gap map from output/demotion/maps, again when the file changes.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=files.saved_names("maps", ".json"),
                    tooltip="A file in output/demotion/maps.",
                )
            ],
            outputs=[
                wires.GapMap.Output("gap_map", display_name="gap map", tooltip="The gap map.")
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        return files.stamp(files.saved_file("maps", file))

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        return io.NodeOutput(maps.GapMap.load(files.saved_file("maps", file)))


class GateFromGapMap(io.ComfyNode):
    """Gap map -> gate."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionGateFromGapMap",
            display_name="Gate from Gap Map",
            category=wires.CATEGORY,
            description="Turns the runs of safe bins into windows. With nothing safe the gate is "
            "empty and training runs native.",
            inputs=[
                wires.GapMap.Input(
                    "gap_map", display_name="gap map", tooltip="A gap map; it carries the margin."
                )
            ],
            outputs=[
                wires.Gate.Output(
                    "gate", display_name="gate", tooltip="Windows of sigma per route."
                ),
                io.String.Output(
                    "text",
                    display_name="text",
                    tooltip="The gate in words, and what would decide the undecided bins.",
                ),
            ],
        )

    @classmethod
    def execute(cls, gap_map: maps.GapMap) -> io.NodeOutput:
        made = gates.from_gap_map(gap_map)
        return io.NodeOutput(
            made,
            gates.describe(made),
            ui=live.keep("gate", views.gate_view(made, gap_map)),
        )


class GateByHand(io.ComfyNode):
    """A gate that nobody measured, or one more rule behind those of another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionGateByHand",
            display_name="Gate by Hand",
            category=wires.CATEGORY,
            description="One window of sigma on one route, marked as not measured. With a gate "
            "connected the rule is added behind its own; the first that fits a sample decides.",
            inputs=[
                io.Int.Input(
                    "native_tier",
                    default=1024,
                    **TIER,
                    tooltip="Native tier of the training set, pixels.",
                ),
                io.Int.Input(
                    "target_tier",
                    default=768,
                    **TIER,
                    tooltip="Tier that is trained at inside the window.",
                ),
                io.Float.Input(
                    "sigma_low",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Lower edge of the window.",
                ),
                io.Float.Input(
                    "sigma_high",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Upper edge of the window.",
                ),
                io.Combo.Input(
                    "span",
                    options=SPANS,
                    default="always",
                    tooltip="Which steps may be demoted: all, the first, the last, or evenly "
                    "spread ones.",
                ),
                io.Float.Input(
                    "span_fraction",
                    default=0.5,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of the steps for early, late and spread.",
                ),
                rotary.choice(
                    "Rotary alignment of a demoted step to its native grid: none, or one that "
                    "the model was measured with."
                ),
                io.Combo.Input(
                    "span_by",
                    options=[STEPS, MASS],
                    default=STEPS,
                    optional=True,
                    advanced=True,
                    tooltip="What early and late are shares of: the number of steps, or the sum "
                    "of their learning rates.",
                ),
                wires.Gate.Input(
                    "gate",
                    optional=True,
                    tooltip="A gate of the same native tier to add this rule to, as its last.",
                ),
            ],
            outputs=[
                wires.Gate.Output(
                    "made", display_name="gate", tooltip="The gate, with this rule as its last."
                ),
                io.String.Output(
                    "text",
                    display_name="text",
                    tooltip="The gate in words, with rules that overlap or never apply named.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        native_tier=1024,
        target_tier=768,
        sigma_low=0.5,
        sigma_high=1.0,
        span="always",
        span_fraction=0.5,
        rotary=rotary.NONE,
        span_by=STEPS,
    ) -> bool | str:
        values = (
            native_tier,
            target_tier,
            sigma_low,
            sigma_high,
            span,
            span_fraction,
            rotary,
            span_by,
        )
        if None in values:
            return True  # linked values are checked when they are known
        for tier in (native_tier, target_tier):
            if not TIER["min"] <= tier <= TIER["max"]:
                return f"tier {tier} is outside {TIER['min']} to {TIER['max']}: choose one inside"
        try:
            _by_hand(*values)
        except ValueError as problem:
            return str(problem)
        return True

    @classmethod
    def execute(
        cls,
        native_tier,
        target_tier,
        sigma_low,
        sigma_high,
        span,
        span_fraction,
        rotary=rotary.NONE,
        span_by=STEPS,
        gate: gates.Gate | None = None,
    ) -> io.NodeOutput:
        made = _by_hand(
            native_tier,
            target_tier,
            sigma_low,
            sigma_high,
            span,
            span_fraction,
            rotary,
            span_by,
            gate,
        )
        return io.NodeOutput(made, gates.describe(made))


def _by_hand(
    native_tier: int,
    target_tier: int,
    low: float,
    high: float,
    span: str,
    fraction: float,
    chosen: str,
    span_by: str,
    after: gates.Gate | None = None,
) -> gates.Gate:
    if span != "always":
        span += f":{fraction:g}" + gates.BY_MASS * (span_by == MASS)
    mode = rotary.mode_of(chosen)
    return gates.by_hand(native_tier, target_tier, (low, high), span, mode, after)


class SaveGate(files.NamedOutput):
    """Keeps a gate as JSON."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionSaveGate",
            display_name="Save Gate",
            category=wires.CATEGORY,
            is_output_node=True,
            description="Saves a gate as JSON in output/demotion/gates. Nothing is overwritten.",
            inputs=[
                wires.Gate.Input("gate", tooltip="A gate."),
                io.String.Input("name", default="gate", tooltip="File name; a number is added."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, gate: gates.Gate, name: str) -> io.NodeOutput:
        path = files.numbered(files.output_folder("gates"), name, ".json")
        gate.save(path)
        return io.NodeOutput(
            ui={"files": [files.shown("gate", path)], "text": [gates.describe(gate)]}
        )


class LoadGate(io.ComfyNode):
    """Reads a saved gate."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemotionLoadGate",
            display_name="Load Gate",
            category=wires.CATEGORY,
            description="Loads a gate from output/demotion/gates or one that comes with the pack, "
            "again when the file changes.",
            inputs=[
                io.Combo.Input(
                    "file",
                    options=files.saved_names("gates", ".json"),
                    tooltip="A file in output/demotion/gates, or a gate that comes with the pack.",
                )
            ],
            outputs=[
                wires.Gate.Output("gate", display_name="gate", tooltip="The gate."),
                io.String.Output("text", display_name="text", tooltip="The gate in words."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        return files.stamp(files.saved_file("gates", file))

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        loaded = gates.Gate.load(files.saved_file("gates", file))
        return io.NodeOutput(
            loaded, gates.describe(loaded), ui=live.keep("gate", views.gate_view(loaded))
        )


NODES = [
    DebiasedCosine,
    PlotGapMap,
    SaveGapMap,
    LoadGapMap,
    GateFromGapMap,
    GateByHand,
    SaveGate,
    LoadGate,
]
