"""GapMap: how far each arm's gradient is from the native one, per sigma bin, with verdicts.

The map is numbers only: a figure or a gate is made from a saved map without the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import cosine, draw_limit, verdict
from .arms import Arm
from .grid import token_count
from .measure import Cell, Measurement, read_json, reading, write_atomically

FORMAT = "demotion-gap-map"
# Controls that each route has one of its own of.
BY_TIER = ("resample", "repromote")
VERSION = 2


@dataclass(frozen=True)
class Gap:
    """One arm in one sigma bin. Distances are 1 - cosine; NaN where a norm is not positive.

    arm, bin          arm name; (lo, hi) of sigma
    control           arm whose distance is subtracted from d, per_image and split_half, or None
    d, se             distance over images and its linearised standard error
    pointwise         95 % interval of this cell alone
    band              simultaneous 95 % bounds over the cell's family
    q_safe, q_unsafe  band = (d - q_unsafe se, d + q_safe se)
    verdict           "safe", "unsafe", "undecided", "no signal", "fewer than 8 images: no verdict",
                      or "no verdict" where the estimand drives none
    resolution        q_safe se: the smallest margin at which a distance of 0 would be called safe
    images            images that have the arm (and the control's)
    with_signal       of these, images with a cosine of their own
    per_image         mean distance over those
    raw               biased cosine of the plain means ("ratio"), which reads low
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
    parts             distance of each part of the adapter by itself ("ratio"), without control
    effective         effective number of images, (sum g^2)^2 / sum g^4; NaN where images enter in
                      pairs
    se_half_buckets   se with half the sketch's buckets; NaN for estimands without a sketch
    look              planned look whose verdict stands, the band being open again since; else 0
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
    effective: float = math.nan
    se_half_buckets: float = math.nan
    look: int = 0


@dataclass(frozen=True)
class GapMap:
    """Gaps of all arms and bins, and everything they depend on.

    settings are the measurement's: model, adapter, seeds, grids, environment. draws is the draw
    count of the cells, images the number of images measured. looks is the number of planned looks
    whose bands hold together. checks are those of the instrument; "draw_limit" holds, per bin, the
    limits of the native self-cosine ("native") and of the arms' distances ("arms").
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
    looks: int = 1

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
            # What earlier packs did not write.
            data = {"checks": {}, "looks": 1} | data
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


def gap_map(measurement: Measurement, *, estimand: str = "ratio", estimator: str = "one_set",
            control: str | None = None, margin: float = 0.05,
            looks: int | None = None) -> GapMap:
    """Distances and verdicts of every arm but src, from a measurement.

    estimand   one of cosine.ESTIMANDS; per_image and dataset drive no verdict
    estimator  "one_set" or "two_set"; population and dataset have the first alone, and per_image
               also "published" and "stepped", from a measurement of independent noise
    control    arm whose distance is subtracted from those of the arms of a downscaled picture;
               "resample" or "repromote" is that arm of each one's own tier; or None
    margin     distance that still counts as safe
    looks      planned looks at the data, 1 to 4: each has its share of the error; None: as many as
               the measurement was planned with

    All bins of all demote arms form one family for the simultaneous band, since a gate chooses its
    windows among them; each other arm's bins form a family of their own. An image may lack a bin.
    What a planned look has decided stays decided in a map of the same choices, unless this map
    decides otherwise: each look has its share of the error, and a bin that was settled gets no
    more images.
    Raises ValueError for an unknown estimand, estimator or control, for ones that do not go
    together or with the measurement, a margin outside (0, 1), and a measurement without cells.
    """
    looks = measurement.settings.get("looks", 1) if looks is None else looks
    _check(measurement, estimand, estimator, control, margin, looks)
    cells = {(cell.image, cell.bin): cell for cell in measurement.cells}
    images = sorted({image for image, _ in cells})
    rows = {edges: [cells.get((image, edges)) for image in images]
            for edges in measurement.bins}
    context = _Context(rows, measurement, estimand, estimator, control, margin, looks)
    found = {arm for cell in cells.values() for arm in cell.arms}
    arms = [arm for arm in measurement.arms if arm in found and arm != "src"]
    routes = [arm for arm in arms if is_route(arm)]
    families = [routes] * bool(routes) + [[arm] for arm in arms if not is_route(arm)]
    gaps = [gap for family in families for gap in _family_gaps(context, family)]
    return GapMap(estimand=estimand, estimator=estimator, control=control, margin=margin,
                  key=measurement.key, draws=max(cell.count for cell in cells.values()),
                  images=len(images), settings=measurement.settings, gaps=tuple(gaps),
                  checks=measurement.checks | _draw_limits(context, arms), looks=looks)


def decided(gap_map: GapMap) -> set[tuple[str, tuple[float, float]]]:
    """(arm, bin) of every route's bins that are safe or unsafe: no look need spend more on them."""
    return {(gap.arm, gap.bin) for gap in gap_map.gaps
            if is_route(gap.arm) and gap.verdict in (verdict.SAFE, verdict.UNSAFE)}


def headline(gap_map: GapMap) -> str:
    """What the numbers of a map are, in one line."""
    relative = f", relative to {gap_map.control}" if gap_map.control else ""
    looks = f", {gap_map.looks} planned looks" if gap_map.looks > 1 else ""
    samples = gap_map.settings.get("micro_batch", 1)
    each = f" of {samples} samples each" if samples > 1 else ""
    return (f"estimand {gap_map.estimand} ({gap_map.estimator}), {gap_map.draws} draws{each}, "
            f"{gap_map.images} images, margin {gap_map.margin:g}{relative}{looks}")


def summary(gap_map: GapMap) -> str:
    """The map as a plain text table."""
    width = max([14, *(len(arm_title(arm, gap_map.native_tier)) for arm in gap_map.arms)])
    lines = [headline(gap_map), "", f"{'arm':{width}} {'sigma':11} {'distance':>8} "
             f"{'simultaneous 95 %':>18} {'signal':>9}  verdict"]
    for gap in gap_map.gaps:
        low, high = gap.bin
        sigma = f"{low:.3f}-{high:.3f}" if low < high else f"{high:.3f}"
        band = "-" if math.isnan(gap.band[0]) else f"{gap.band[0]:.3f} to {gap.band[1]:.3f}"
        distance = "-" if math.isnan(gap.d) else f"{gap.d:.3f}"
        settled = gap.verdict in (verdict.SAFE, verdict.UNSAFE)
        at_margin = f" at {gap_map.margin:g}" if settled else ""
        at_margin += f" by look {gap.look}" if gap.look else ""
        relative = f", relative to {gap.control}" if gap.control else ""
        lines.append(f"{arm_title(gap.arm, gap_map.native_tier):{width}} {sigma:11} {distance:>8} "
                     f"{band:>18} {gap.with_signal:3} of {gap.images:<3}  "
                     f"{gap.verdict}{at_margin}{relative}{_beside(gap_map, gap)}")
    return "\n".join([*lines, *draw_limit_lines(gap_map), *precision(gap_map)])


def _beside(gap_map: GapMap, gap: Gap) -> str:
    """What an estimand must not be read without."""
    if gap_map.estimand == "power_ratio":
        return f"; an effective {gap.effective:.1f} of {gap.images} images"
    if gap_map.estimand in ("population", "dataset"):
        return (f"; standard error {gap.se:.4f}, {gap.se_half_buckets:.4f} with half the sketch "
                "buckets")
    return ""


def draw_limit_lines(gap_map: GapMap) -> list[str]:
    """The draw-limit checks in words; empty if the draws do not allow any."""
    check = gap_map.checks.get("draw_limit")
    if check is None:
        return []
    lines = []
    if check["native"]:
        worst = max(check["native"], key=lambda row: abs(row["a"] - 1) / max(row["se"], 1e-12))
        lines.append(f"1 / native self-cosine tends to {worst['a']:.3f} (must be 1; standard error "
                     f"{worst['se']:.3f}; the worst of {len(check['native'])} bins)")
    if check["arms"]:
        worst = max(check["arms"], key=lambda row: abs(row["c"]) / max(row["se"], 1e-12))
        lines.append(f"distance changes with draws D as {worst['c']:.3f} / D (must be 0; standard "
                     f"error {worst['se']:.3f}; {arm_title(worst['arm'], gap_map.native_tier)}, "
                     f"the worst of {len(check['arms'])} cells)")
    return ["", "Draw-limit check, from single draws, half-sets and all draws of this run: "
            + "; ".join(lines) + "."]


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


def check_choice(estimand: str, estimator: str) -> None:
    """Raises ValueError for an unknown estimand or estimator, and for two that do not go
    together."""
    for name, value, known in (("estimand", estimand, cosine.ESTIMANDS),
                               ("estimator", estimator, cosine.ESTIMATORS)):
        if value not in known:
            raise ValueError(f"{name} '{value}' is unknown: use one of {', '.join(known)}")
    if estimand in ("population", "dataset") and estimator != "one_set":
        raise ValueError(f"estimator '{estimator}' does not go with the estimand {estimand}, whose "
                         "products are between images: use one_set")
    if estimator in cosine.PUBLISHED and estimand != "per_image":
        raise ValueError(f"estimator '{estimator}' is a cosine of each image: "
                         "use it with the estimand per_image")


def _check(measurement: Measurement, estimand: str, estimator: str, control: str | None,
           margin: float, looks: int) -> None:
    check_choice(estimand, estimator)
    if estimator in cosine.PUBLISHED and measurement.settings["noise"] != "independent":
        raise ValueError(f"estimator '{estimator}' is valid only when arms do not share noise, and "
                         "this measurement has shared noise: measure with independent noise, or "
                         "use one_set")
    if not 0 < margin < 1:
        raise ValueError(f"margin is {margin}: give a distance between 0 and 1, such as 0.05")
    if not 1 <= looks <= verdict.MAX_LOOKS:
        raise ValueError(f"looks is {looks}: plan 1 to {verdict.MAX_LOOKS} looks")
    tiers = {Arm.parse(arm).tier for arm in measurement.arms if is_route(arm)}
    allowed = [arm for arm in measurement.arms if arm != "src" and not is_route(arm)]
    allowed += [kind for kind in BY_TIER if tiers and {str(Arm(kind, tier)) for tier in tiers}
                <= set(measurement.arms)]
    if control is not None and control not in allowed:
        raise ValueError(f"control '{control}' is not an arm of this measurement that can serve as "
                         f"one: use {' or '.join([*allowed, 'none'])}")
    if not measurement.cells:
        raise ValueError("the measurement has no cells: "
                         "run the probe until at least one image is finished")


@dataclass(frozen=True)
class _Context:
    """What every gap of a map is computed from: the images' cells of each bin, None where an image
    lacks the bin, and the choices."""

    rows: dict[tuple[float, float], list[Cell | None]]
    measurement: Measurement
    estimand: str
    estimator: str
    control: str | None
    margin: float
    looks: int

    def look_verdict(self, arm: str, edges: tuple[float, float]) -> tuple[str, int]:
        """Verdict of the last look that decided a cell, and its number; undecided and 0 without
        one, or where the probe looked with other choices."""
        settings, found = self.measurement.settings, (verdict.UNDECIDED, 0)
        choices = (self.estimand, self.estimator, self.control, self.margin, self.looks)
        if choices != ("ratio", "one_set", None, settings.get("margin"), settings.get("looks")):
            return found
        for look in range(1, self.looks):
            for name, place, judged in self.measurement.checks.get(f"look {look}", []):
                if (name, tuple(place)) == (arm, edges):
                    found = judged, look
        return found

    def control_of(self, arm: str) -> str | None:
        # Only resampled pictures carry what a control prices; null stays the instrument's own zero.
        parsed = Arm.parse(arm)
        if self.control is None or parsed.kind not in ("demote", "repromote", "shifted"):
            return None
        control = str(Arm(self.control, parsed.tier)) if self.control in BY_TIER else self.control
        return None if control == arm else control

    def contrast(self, arm: str, edges: tuple[float, float], *, half: int | None = None,
                 fold: int = 1) -> verdict.Contrast:
        """The contrast of a cell, from all its draws or one half of them."""
        terms = [self._terms(self.rows[edges], name, half, fold)
                 for name in (arm, self.control_of(arm)) if name is not None]
        return verdict.contrast(*terms)

    def _terms(self, cells: Sequence[Cell | None], arm: str, half: int | None,
               fold: int) -> cosine.Terms:
        if self.estimand == "population":
            return cosine.population_terms(cells, arm, fold, half)
        terms = cosine.power_terms if self.estimand == "power_ratio" else cosine.ratio_terms
        if half is None:
            return terms(cells, arm, self.estimator)
        return terms([cell and cosine.half(cell, half) for cell in cells], arm, "one_set")

    def halves(self, cells: Sequence[Cell]) -> bool:
        """Whether the draws of these cells fall into two halves that can be compared."""
        if not cells:
            return False
        if self.estimand == "population":
            return all(_even(cell.block_counts) for cell in cells)
        return all(cell.counts[0] == cell.counts[1] >= 2 for cell in cells)


def _even(counts: Sequence[int]) -> bool:
    middle = len(counts) // 2
    return middle > 0 and sum(counts[:middle]) == sum(counts[middle:])


@dataclass(frozen=True)
class _Reading:
    """What an estimand says of one cell; fields as in Gap."""

    d: float
    se: float
    pointwise: tuple[float, float]
    verdict: str
    decide: str
    band: tuple[float, float] = (math.nan, math.nan)
    q_safe: float = math.nan
    q_unsafe: float = math.nan
    within: float = math.nan
    between: float = math.nan
    effective: float = math.nan
    se_half_buckets: float = math.nan
    look: int = 0


def _family_gaps(context: _Context, arms: Sequence[str]) -> list[Gap]:
    members = [(arm, edges) for arm in arms for edges in sorted(context.rows)]
    read = {"per_image": _image_readings, "dataset": _dataset_readings}
    readings = read.get(context.estimand, _judged_readings)(context, members)
    return [_gap(context, *member, reading)
            for member, reading in zip(members, readings, strict=True)]


def _judged_readings(context: _Context, members: Sequence[tuple]) -> list[_Reading]:
    """Readings with a simultaneous band over all members and verdicts."""
    contrasts = [context.contrast(*member) for member in members]
    power = context.estimand == "power_ratio"
    effective = [cosine.effective_images(cell.arm) if cell.arm.order == 1 else math.nan
                 for cell in contrasts]
    votes = [index for index, cell in enumerate(contrasts) if cell.images >= verdict.MIN_IMAGES
             and not (power and effective[index] < verdict.MIN_IMAGES)]
    band = verdict.Band(math.nan, math.nan, ())
    if votes:
        band = verdict.simultaneous([contrasts[index] for index in votes], context.measurement.key,
                                    looks=context.looks)
    signal = dict(zip(votes, band.signal, strict=True))
    alone = dict(zip(votes, band.alone, strict=True))
    readings = []
    for index, (member, cell) in enumerate(zip(members, contrasts, strict=True)):
        d, error = verdict.point(cell)
        q_safe, q_unsafe = ((band.q_safe, band.q_unsafe) if signal.get(index)
                            else (math.nan, math.nan))
        low, high = d - q_unsafe * error, d + q_safe * error
        if signal.get(index):
            above, below = alone[index]
            interval = d - below * error, d + above * error
        else:
            interval = verdict.jackknife(cell)
        within, between, look = math.nan, math.nan, 0
        own = _own(context, *member)
        if context.halves(own):
            within, between = verdict.split_variance(
                cell, *(context.contrast(*member, half=half) for half in (0, 1)))
        if cell.images >= verdict.MIN_IMAGES and index not in votes:
            judged = verdict.NO_VERDICT
            decide = (f"the largest gradients outweigh the others, an effective "
                      f"{effective[index]:.1f} of {cell.images} images where a verdict needs "
                      f"{verdict.MIN_IMAGES}: use the estimand ratio")
        else:
            judged = verdict.judge(cell.images, signal.get(index, False), low, high, context.margin)
            if judged == verdict.UNDECIDED:
                judged, look = context.look_verdict(*member)
            decide = verdict.what_decides(judged, d, error, band, context.margin, cell.images,
                                          min((cell.count for cell in own), default=0), within,
                                          between)
        folded = (verdict.point(context.contrast(*member, fold=2))[1]
                  if context.estimand == "population" else math.nan)
        readings.append(_Reading(
            d=d, se=error, pointwise=interval, verdict=judged, decide=decide,
            band=(low, high), q_safe=q_safe, q_unsafe=q_unsafe, within=within, between=between,
            effective=effective[index], se_half_buckets=folded, look=look))
    return readings


def _image_readings(context: _Context, members: Sequence[tuple]) -> list[_Reading]:
    """Mean distance over the images that have a cosine of their own."""
    readings = []
    for member in members:
        distances = _image_distances(context, *member)
        d, error, interval = verdict.mean_interval(distances[np.isfinite(distances)])
        readings.append(_Reading(
            d=d, se=error, pointwise=interval, verdict=verdict.NO_VERDICT,
            decide="images without signal are left out of a mean of cosines, so no verdict rests "
                   "on it: use the estimand ratio"))
    return readings


def _dataset_readings(context: _Context, members: Sequence[tuple]) -> list[_Reading]:
    """Distance of the full-batch gradient over exactly the images measured."""
    readings = []
    for arm, edges in members:
        cells, control = context.rows[edges], context.control_of(arm)
        names = [name for name in (arm, control) if name is not None]
        present = np.all([cosine.has_arm(cells, name) for name in names], axis=0)
        (d, error, interval), (_, folded, _) = (
            verdict.block_interval(*(cosine.dataset_sums(cells, name, present, fold)
                                     for name in names)) for fold in (1, 2))
        readings.append(_Reading(
            d=d, se=error, pointwise=interval, verdict=verdict.NO_VERDICT,
            decide="it speaks of exactly these images, so no verdict rests on it: use the "
                   "estimand population or ratio", se_half_buckets=folded))
    return readings


def _own(context: _Context, arm: str, edges: tuple[float, float]) -> list[Cell]:
    """The cells of the images that have an arm (and its control) in a bin."""
    names = {arm, context.control_of(arm) or "src"}
    return [cell for cell in context.rows[edges] if cell is not None and names <= set(cell.arms)]


def _image_distances(context: _Context, arm: str, edges: tuple[float, float],
                     half: int | None = None) -> np.ndarray:
    """[N] each image's own distance, or excess over the control's; NaN without signal."""
    cells, estimator = context.rows[edges], context.estimator
    if half is not None:
        cells, estimator = [cell and cosine.half(cell, half) for cell in cells], "one_set"
    if any(cell is not None and cell.count < 2 for cell in cells):
        return np.full(len(cells), math.nan)
    own, *control = (1 - cosine.image_cosines(cells, name, estimator)
                     for name in (arm, context.control_of(arm)) if name is not None)
    return own - control[0] if control else own


def _gap(context: _Context, arm: str, edges: tuple[float, float], reading: _Reading) -> Gap:
    cells, settings = context.rows[edges], context.measurement.settings
    own = _own(context, arm, edges)
    distances = _image_distances(context, arm, edges)
    with_signal = np.isfinite(distances)
    split_half = math.nan
    if own and all(cell.counts[0] == cell.counts[1] >= 2 for cell in own):
        split_half = _correlation(*(_image_distances(context, arm, edges, half)
                                    for half in (0, 1)))
    estimator = context.estimator if context.estimator in cosine.CONSISTENT else "one_set"
    deep = all(cell.count >= 2 for cell in own)
    return Gap(
        arm=arm, bin=edges, control=context.control_of(arm),
        resolution=reading.q_safe * reading.se, images=len(own),
        with_signal=int(with_signal.sum()), per_image=_mean(distances[with_signal]),
        raw=1 - _distance(cosine.ratio_terms(cells, arm, "raw")), split_half=split_half,
        **_lengths(own if deep else [], arm, estimator),
        tokens=_mean([token_count(cell.grids[cell.arms.index(arm)], settings["patch"])
                      for cell in own]),
        src_tokens=_mean([token_count(cell.grids[0], settings["patch"]) for cell in own]),
        parts={name: _distance(cosine.ratio_terms(cells, arm, estimator, part)) if deep
               else math.nan for part, name in enumerate(settings["parts"])},
        **vars(reading))


def _draw_limits(context: _Context, arms: Collection[str]) -> dict[str, Any]:
    """{"draw_limit": ...} as plain JSON data; empty where no cell allows the check."""
    native, distances = [], []
    for (low, high), cells in sorted(context.rows.items()):
        found = draw_limit.self_cosine([cell for cell in cells if cell is not None])
        if found is not None:
            native.append({"bin": [low, high], **found})
        for arm in arms:
            own = [cell for cell in cells if cell is not None and arm in cell.arms]
            found = draw_limit.distance(own, arm)
            if found is not None:
                distances.append({"arm": arm, "bin": [low, high], **found})
    if not native and not distances:
        return {}
    return {"draw_limit": {"native": native, "arms": distances}}


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

    # What earlier packs did not write is not known of their maps.
    data = {"effective": None, "se_half_buckets": None, "look": 0} | data
    kept = {field.name: data[field.name] for field in dataclasses.fields(Gap)}
    kept |= {name: math.nan for name, value in kept.items() if value is None and name != "control"}
    kept |= {name: tuple(map(number, kept[name])) for name in ("bin", "pointwise", "band")}
    return Gap(**kept | {"parts": {name: number(value) for name, value in kept["parts"].items()}})
