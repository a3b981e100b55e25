"""GapMap: how far each arm's gradient is from the native one, per sigma bin, with verdicts.

The map is numbers only: a figure or a gate is made from a saved map without the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import cosine, verdict
from .arms import Arm
from .grid import token_count
from .measure import Cell, Measurement, read_json, reading, write_atomically

FORMAT = "demotion-gap-map"
VERSION = 2


@dataclass(frozen=True)
class Gap:
    """One arm in one sigma bin. Distances are 1 - cosine; NaN where a norm is not positive.

    arm, bin          arm name; (lo, hi) of sigma
    control           arm whose distance is subtracted from d, per_image and split_half, or None
    d, se             distance over images and its linearised standard error
    pointwise         95 % interval of this cell alone (jackknife, t)
    band              simultaneous 95 % bounds over the cell's family
    q_safe, q_unsafe  band = (d - q_unsafe se, d + q_safe se)
    verdict           "safe", "unsafe", "undecided", "no signal" or "fewer than 8 images: no
                      verdict"
    resolution        q_safe se: the smallest margin at which a distance of 0 would be called safe
    images            images that have the arm (and the control's)
    with_signal       of these, images with a cosine of their own
    per_image         mean distance over those
    raw               biased cosine of the plain means, which reads low
    split_half        correlation over images of the even and the odd draws' distances
    norm_ratio        |g_arm| / |g_src|
    kappa_par         change of the component along g_src, M_sa / M_ss - 1
    noise_scale       trace(Sigma) / |g|^2 of the arm: draws at which noise equals signal
    src_noise_scale   the same of src
    within, between   variance of one image's influence that more draws, or only more images, would
                      shrink
    decide            what would decide an open verdict, else empty
    tokens            mean tokens of the arm, and of src on the same images
    src_tokens
    parts             distance of each part of the adapter by itself, without control
    """

    arm: str
    bin: tuple[float, float]
    control: str | None
    d: float
    se: float
    pointwise: tuple[float, float]
    band: tuple[float, float]
    q_safe: float
    q_unsafe: float
    verdict: str
    resolution: float
    images: int
    with_signal: int
    per_image: float
    raw: float
    split_half: float
    norm_ratio: float
    kappa_par: float
    noise_scale: float
    src_noise_scale: float
    within: float
    between: float
    decide: str
    tokens: float
    src_tokens: float
    parts: dict[str, float]


@dataclass(frozen=True)
class GapMap:
    """Gaps of all arms and bins, and everything they depend on.

    settings are the measurement's: model, adapter, seeds, grids, environment. draws is the draw
    count of the cells, images the number of images measured. checks are those of the instrument.
    """

    estimand: str
    estimator: str
    control: str | None
    margin: float
    key: str
    draws: int
    images: int
    settings: dict[str, Any]
    gaps: tuple[Gap, ...]
    checks: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        """Arm names in the order of the map, without src."""
        return list(dict.fromkeys(gap.arm for gap in self.gaps))

    @property
    def bins(self) -> list[tuple[float, float]]:
        return sorted({gap.bin for gap in self.gaps})

    @property
    def native_tier(self) -> int:
        return self.settings["native_tier"]

    @property
    def hash(self) -> str:
        """16 hex digits naming the map's content."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def of(self, arm: str) -> list[Gap]:
        """The gaps of one arm in ascending order of sigma."""
        return sorted((gap for gap in self.gaps if gap.arm == arm), key=lambda gap: gap.bin)

    def to_json(self) -> str:
        data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        return json.dumps(_without_nan(data), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the map as JSON, atomically; NaN becomes null."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> GapMap:
        """Read a map. Raises ValueError when the file is none, damaged or of a later version."""
        with reading(path) as file:
            data = read_json(file, FORMAT, VERSION)
            # Version 1 had no checks.
            data.setdefault("checks", {})
            fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
            return cls(**fields | {"gaps": tuple(map(_gap_from_json, data["gaps"]))})


def is_route(arm: str) -> bool:
    """Whether an arm is what training would see, so that its verdicts may open a gate."""
    return Arm.parse(arm).kind == "demote"


def arm_title(arm: str, native_tier: int) -> str:
    """How an arm is shown: a route as "256 -> 192" or "256 -> 192 yarn", another by its name."""
    if not is_route(arm):
        return arm.replace(":", " ")
    route = Arm.parse(arm)
    return f"{native_tier} -> {route.tier} {route.rotary or ''}".rstrip()


def gap_map(measurement: Measurement, *, estimator: str = "one_set",
            control: str | None = None, margin: float = 0.05) -> GapMap:
    """Distances and verdicts of every arm but src, from a measurement, under the estimand "ratio".

    estimator  "one_set" or "two_set"
    control    arm whose distance is subtracted from those of the demote and repromote arms, or None
    margin     distance that still counts as safe

    All bins of all demote arms form one family for the simultaneous band, since a gate chooses its
    windows among them; each other arm's bins form a family of their own. Raises ValueError for an
    unknown estimator or control, a margin outside (0, 1), and a measurement without cells or with
    unfinished images.
    """
    _check(measurement, estimator, control, margin)
    cells = {(cell.image, cell.bin): cell for cell in measurement.cells}
    images = sorted({image for image, _ in cells})
    rows = {edges: [cells[image, edges] for image in images] for edges in measurement.bins}
    context = _Context(rows, measurement, estimator, control, margin)
    found = {arm for cell in cells.values() for arm in cell.arms}
    arms = [arm for arm in measurement.arms if arm in found and arm != "src"]
    routes = [arm for arm in arms if is_route(arm)]
    families = [routes] * bool(routes) + [[arm] for arm in arms if not is_route(arm)]
    gaps = [gap for family in families for gap in _family_gaps(context, family)]
    return GapMap(estimand="ratio", estimator=estimator, control=control, margin=margin,
                  key=measurement.key, draws=max(cell.count for cell in cells.values()),
                  images=len(images), settings=measurement.settings, gaps=tuple(gaps),
                  checks=measurement.checks)


def headline(gap_map: GapMap) -> str:
    """What the numbers of a map are, in one line."""
    relative = f", relative to {gap_map.control}" if gap_map.control else ""
    return (f"estimand {gap_map.estimand} ({gap_map.estimator}), {gap_map.draws} draws, "
            f"{gap_map.images} images, margin {gap_map.margin:g}{relative}")


def summary(gap_map: GapMap) -> str:
    """The map as a plain text table."""
    width = max([14, *(len(arm_title(arm, gap_map.native_tier)) for arm in gap_map.arms)])
    lines = [headline(gap_map), "", f"{'arm':{width}} {'sigma':11} {'distance':>8} "
             f"{'simultaneous 95 %':>18} {'signal':>9}  verdict"]
    for gap in gap_map.gaps:
        sigma = f"{gap.bin[0]:.3f}-{gap.bin[1]:.3f}"
        band = "-" if math.isnan(gap.band[0]) else f"{gap.band[0]:.3f} to {gap.band[1]:.3f}"
        distance = "-" if math.isnan(gap.d) else f"{gap.d:.3f}"
        settled = gap.verdict in (verdict.SAFE, verdict.UNSAFE)
        at_margin = f" at {gap_map.margin:g}" if settled else ""
        relative = f", relative to {gap.control}" if gap.control else ""
        lines.append(f"{arm_title(gap.arm, gap_map.native_tier):{width}} {sigma:11} {distance:>8} "
                     f"{band:>18} {gap.with_signal:3} of {gap.images:<3}  "
                     f"{gap.verdict}{at_margin}{relative}")
    return "\n".join([*lines, *precision(gap_map)])


def precision(gap_map: GapMap) -> list[str]:
    """How far the compute precision moves a gradient, beside the margin; empty if not measured."""
    check = gap_map.checks.get("precision")
    if check is None:
        return []
    moved = 1 - float(np.mean(check["cosines"]))
    beyond = moved > gap_map.margin
    return ["", f"{'Warning: ' if beyond else ''}{check['dtype']} moves a gradient by {moved:.4f} "
            f"(1 - cosine to float32, mean of {len(check['cosines'])} draws)"
            + (f", more than the margin {gap_map.margin:g}: compute in a higher precision, or "
               "measure and train in this one only." if beyond else ".")]


def _check(measurement: Measurement, estimator: str, control: str | None, margin: float) -> None:
    if estimator not in cosine.ESTIMATORS:
        raise ValueError(f"estimator '{estimator}' is unknown: "
                         f"use one of {', '.join(cosine.ESTIMATORS)}")
    if not 0 < margin < 1:
        raise ValueError(f"margin is {margin}: give a distance between 0 and 1, such as 0.05")
    allowed = [arm for arm in measurement.arms if arm != "src" and not is_route(arm)]
    if control is not None and control not in allowed:
        raise ValueError(f"control '{control}' is not an arm of this measurement that can serve as "
                         f"one: use {' or '.join([*allowed, 'none'])}")
    if not measurement.cells:
        raise ValueError("the measurement has no cells: "
                         "run the probe until at least one image is finished")
    measured = {(cell.image, cell.bin) for cell in measurement.cells}
    wanted = [(image, edges) for image in sorted({image for image, _ in measured})
              for edges in measurement.bins]
    missing = [name for name in wanted if name not in measured]
    if missing:
        image, (low, high) = missing[0]
        raise ValueError(f"the measurement lacks {len(missing)} of {len(wanted)} cells, first "
                         f"image {image} in bin {low:g}-{high:g}: run the probe again with the "
                         "same settings to finish it")


@dataclass(frozen=True)
class _Context:
    """What every gap of a map is computed from: the images' cells of each bin, and the choices."""

    rows: dict[tuple[float, float], list[Cell]]
    measurement: Measurement
    estimator: str
    control: str | None
    margin: float

    def control_of(self, arm: str) -> str | None:
        # Only resampled pictures carry what a control prices; null stays the instrument's own zero.
        resampled = Arm.parse(arm).kind in ("demote", "repromote")
        return self.control if resampled and arm != self.control else None


def _family_gaps(context: _Context, arms: Sequence[str]) -> list[Gap]:
    members = [(arm, edges) for arm in arms for edges in sorted(context.rows)]
    contrasts = [_contrast(context.rows[edges], arm, context.control_of(arm), context.estimator)
                 for arm, edges in members]
    band = verdict.simultaneous(contrasts, context.measurement.key)
    return [_gap(context, *member, contrast, band, signal)
            for member, contrast, signal in zip(members, contrasts, band.signal, strict=True)]


def _contrast(cells: Sequence[Cell], arm: str, control: str | None,
              estimator: str) -> verdict.Contrast:
    terms = cosine.ratio_terms(cells, arm, estimator)
    return verdict.contrast(terms, control and cosine.ratio_terms(cells, control, estimator))


def _image_distances(contrast: verdict.Contrast) -> np.ndarray:
    """[N] each image's own distance, or excess over the control's."""
    own = 1 - cosine.per_image(contrast.arm)
    return own if contrast.control is None else own - (1 - cosine.per_image(contrast.control))


def _gap(context: _Context, arm: str, edges: tuple[float, float], contrast: verdict.Contrast,
         band: verdict.Band, signal: bool) -> Gap:
    cells, settings = context.rows[edges], context.measurement.settings
    control, estimator, margin = context.control_of(arm), context.estimator, context.margin
    d, error = verdict.point(contrast)
    member = signal and contrast.images >= verdict.MIN_IMAGES
    q_safe, q_unsafe = (band.q_safe, band.q_unsafe) if member else (math.nan, math.nan)
    low, high = d - q_unsafe * error, d + q_safe * error
    judged = verdict.judge(contrast.images, signal, low, high, margin)
    own = [cell for cell, present in zip(cells, contrast.present, strict=True) if present]
    within, between, split_half = math.nan, math.nan, math.nan
    if own and all(cell.counts[0] == cell.counts[1] >= 2 for cell in own):
        halves = [_contrast([cosine.half(cell, index) for cell in cells], arm, control, "one_set")
                  for index in (0, 1)]
        within, between = verdict.split_variance(contrast, *halves)
        split_half = _correlation(*map(_image_distances, halves))
    distances = _image_distances(contrast)
    with_signal = np.isfinite(distances)
    draws = min((cell.count for cell in own), default=0)
    return Gap(
        arm=arm, bin=edges, control=control, d=d, se=error,
        pointwise=verdict.pointwise(contrast), band=(low, high), q_safe=q_safe, q_unsafe=q_unsafe,
        verdict=judged, resolution=q_safe * error, images=contrast.images,
        with_signal=int(with_signal.sum()), per_image=_mean(distances[with_signal]),
        raw=1 - _distance(cosine.ratio_terms(cells, arm, "raw")), split_half=split_half,
        **_lengths(own, arm, estimator), within=within, between=between,
        decide=verdict.what_decides(judged, d, error, band, margin, contrast.images, draws,
                                    within, between),
        tokens=_mean([token_count(cell.grids[cell.arms.index(arm)], settings["patch"])
                      for cell in own]),
        src_tokens=_mean([token_count(cell.grids[0], settings["patch"]) for cell in own]),
        parts={name: _distance(cosine.ratio_terms(cells, arm, estimator, part))
               for part, name in enumerate(settings["parts"])})


def _distance(terms: cosine.Terms) -> float:
    return verdict.point(verdict.Contrast(terms))[0]


def _lengths(cells: Sequence[Cell], arm: str, estimator: str) -> dict[str, float]:
    """Norm ratio, kappa_par and noise scales over images.

    Each image's gradients are scaled by src's mean squared draw norm, so that none dominates.
    """
    sums = np.zeros(5)
    for cell in cells:
        index = cell.arms.index(arm)
        square = cosine.mean_square(cell)[0]
        matrix, noise = cosine.moments(cell, estimator), cosine.noise_trace(cell)
        if square > 0:
            sums += np.array([matrix[0, 0], matrix[0, index], matrix[index, index],
                              noise[0], noise[index]]) / square
    src_src, src_arm, arm_arm, src_noise, arm_noise = sums.tolist()
    return {"norm_ratio": math.sqrt(arm_arm / src_src) if min(arm_arm, src_src) > 0 else math.nan,
            "kappa_par": src_arm / src_src - 1 if src_src > 0 else math.nan,
            "noise_scale": arm_noise / arm_arm if arm_arm > 0 else math.nan,
            "src_noise_scale": src_noise / src_src if src_src > 0 else math.nan}


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    both = np.isfinite(first) & np.isfinite(second)
    if both.sum() < 3 or not np.ptp(first[both]) or not np.ptp(second[both]):
        return math.nan
    return float(np.corrcoef(first[both], second[both])[0, 1])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _without_nan(data: Any) -> Any:
    """The same plain data with non-finite floats as None, since JSON has no NaN."""
    if isinstance(data, dict):
        return {name: _without_nan(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _gap_from_json(data: dict[str, Any]) -> Gap:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    kept = {field.name: data[field.name] for field in dataclasses.fields(Gap)}
    kept |= {name: math.nan for name, value in kept.items() if value is None and name != "control"}
    kept |= {name: tuple(map(number, kept[name])) for name in ("bin", "pointwise", "band")}
    return Gap(**kept | {"parts": {name: number(value) for name, value in kept["parts"].items()}})
