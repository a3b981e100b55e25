"""The gap map: what it computes, refuses, and survives on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from demotion import draw_limit, verdict
from demotion import gap_map as gap_map_module
from demotion.gap_map import GapMap, decided, gap_map, is_route, summary
from demotion.measure import Measurement

WORLD = synthetic.World({"null": 0.0, "reenc": 0.02, "demote:224": [0.3, 0.1, 0.02, 0.01],
                         "demote:192": [0.4, 0.2, 0.08, 0.06], "repromote:192": 0.05},
                        spread=0.01, gains={"demote:224": 1.5})
MEASUREMENT = synthetic.measure(WORLD)
MAP = gap_map(MEASUREMENT)


def without_arm(measurement: Measurement, arm: str, images: int) -> Measurement:
    """The measurement with an arm taken from its first images, as when they are off-route."""
    names = sorted({cell.image for cell in measurement.cells})[:images]
    cells = []
    for cell in measurement.cells:
        if cell.image in names:
            kept = [index for index, name in enumerate(cell.arms) if name != arm]
            cell = replace(cell, arms=tuple(cell.arms[index] for index in kept),
                           gram=cell.gram[:, :, kept][..., kept],
                           products=cell.products[:, :, kept][..., kept],
                           grids=tuple(cell.grids[index] for index in kept),
                           losses=tuple(cell.losses[index] for index in kept))
        cells.append(cell)
    return Measurement(measurement.settings, cells)


def test_every_arm_but_src_has_every_bin() -> None:
    assert MAP.arms == ["demote:224", "demote:192", "null", "reenc", "repromote:192"]
    assert [(gap.arm, gap.bin) for gap in MAP.gaps] == [(a, b) for a in MAP.arms for b in MAP.bins]


def test_distances_are_near_the_truth_and_inside_their_bands() -> None:
    for gap in MAP.gaps:
        truth = WORLD.distances[gap.arm]
        truth = truth if isinstance(truth, float) else truth[MAP.bins.index(gap.bin)]
        assert abs(gap.d - truth) < 0.03
        assert gap.band[0] <= gap.d <= gap.band[1] and gap.pointwise[0] <= gap.d <= gap.pointwise[1]


def test_all_routes_share_one_family_and_each_diagnostic_has_its_own() -> None:
    quantiles = {arm: {(gap.q_safe, gap.q_unsafe) for gap in MAP.of(arm)} for arm in MAP.arms}
    assert all(len(values) == 1 for values in quantiles.values())
    assert quantiles["demote:224"] == quantiles["demote:192"]
    assert len({next(iter(values)) for values in quantiles.values()}) == 4


def test_verdicts_follow_from_bands_and_margin() -> None:
    for gap in MAP.gaps:
        expected = verdict.judge(gap.images, True, *gap.band, MAP.margin)
        assert gap.verdict == expected
        assert bool(gap.decide) == (expected == verdict.UNDECIDED)
    assert MAP.of("demote:224")[0].verdict == verdict.UNSAFE
    assert MAP.of("demote:224")[3].verdict == verdict.SAFE


def test_lengths_and_tokens_are_reported_beside_the_blind_cosine() -> None:
    gap = MAP.of("demote:224")[3]
    assert gap.norm_ratio == pytest.approx(1.5, rel=0.05)
    assert gap.kappa_par == pytest.approx(1.5 * 0.99 - 1, abs=0.06)
    assert gap.src_noise_scale == pytest.approx(1 + WORLD.slope ** 2 / 3, rel=0.2)
    assert gap.noise_scale == pytest.approx(gap.src_noise_scale / 1.5 ** 2, rel=0.2)
    assert (gap.tokens, gap.src_tokens) == (14 ** 2, 16 ** 2)
    assert 0.8 < gap.raw < 1 - gap.d
    assert set(gap.parts) == {"A", "B"}
    assert gap.resolution == pytest.approx(gap.band[1] - gap.d)


def test_scaling_the_gradients_of_an_arm_changes_its_length_alone() -> None:
    scale = np.diag([1.0, 1.0, 1.0, 3.0, 1.0, 1.0])
    cells = [replace(cell, gram=np.einsum("ai,ghikj,jb->ghakb", scale, cell.gram, scale),
                     products=scale @ cell.products @ scale) for cell in MEASUREMENT.cells]
    scaled = gap_map(Measurement(MEASUREMENT.settings, cells))
    for before, after in zip(MAP.of("demote:224"), scaled.of("demote:224"), strict=True):
        assert after.norm_ratio == pytest.approx(3 * before.norm_ratio)
        assert after.kappa_par + 1 == pytest.approx(3 * (before.kappa_par + 1))
        for name in ("d", "se", "per_image", "raw", "noise_scale", "src_noise_scale", "within"):
            assert getattr(after, name) == pytest.approx(getattr(before, name)), name


def test_within_and_between_add_up_to_the_error_where_between_is_left() -> None:
    for gap in MAP.gaps:
        assert gap.within + gap.between >= gap.images * gap.se ** 2 * (1 - 1e-12)
        if gap.between > 0:
            assert (gap.within + gap.between) / gap.images == pytest.approx(gap.se ** 2)


def test_two_set_agrees_with_one_set_within_their_errors() -> None:
    for one, two in zip(MAP.gaps, gap_map(MEASUREMENT, estimator="two_set").gaps, strict=True):
        assert abs(one.d - two.d) < 4 * (one.se + two.se)


def test_a_control_is_subtracted_from_resampled_arms_and_named_everywhere() -> None:
    relative = gap_map(MEASUREMENT, control="reenc")
    for gap in relative.gaps:
        plain = MAP.of(gap.arm)[MAP.bins.index(gap.bin)]
        reenc = MAP.of("reenc")[MAP.bins.index(gap.bin)]
        if gap.arm in ("null", "reenc"):
            assert (gap.control, gap.d) == (None, plain.d)
        else:
            assert gap.control == "reenc" and gap.d == pytest.approx(plain.d - reenc.d)
            assert gap.per_image == pytest.approx(plain.per_image - reenc.per_image)
    assert "relative to reenc" in summary(relative) and "relative" not in summary(MAP)


def test_an_off_route_picture_is_left_out_of_its_route_alone() -> None:
    partial = gap_map(without_arm(MEASUREMENT, "demote:192", 3))
    assert {gap.images for gap in partial.of("demote:192")} == {9}
    assert {gap.images for gap in partial.of("demote:224")} == {12}
    assert [gap.d for gap in partial.of("demote:224")] == [gap.d for gap in MAP.of("demote:224")]


def test_fewer_than_eight_images_give_no_verdict() -> None:
    few = gap_map(without_arm(MEASUREMENT, "demote:192", 5))
    for gap in few.of("demote:192"):
        assert gap.verdict == "fewer than 8 images: no verdict"
        assert math.isfinite(gap.d) and math.isnan(gap.band[1]) and "at least 8" in gap.decide
    assert all(gap.verdict in (verdict.SAFE, verdict.UNSAFE, verdict.UNDECIDED)
               for gap in few.of("demote:224"))


def test_an_arm_that_no_picture_has_is_not_in_the_map() -> None:
    assert "demote:192" not in gap_map(without_arm(MEASUREMENT, "demote:192", 12)).arms


def test_pure_noise_is_no_signal_and_never_safe() -> None:
    noise = gap_map(synthetic.measure(replace(WORLD, noise=60.0)))
    verdicts = [gap.verdict for gap in noise.gaps]
    assert verdict.NO_SIGNAL in verdicts and verdict.SAFE not in verdicts
    lost = next(gap for gap in noise.gaps if gap.verdict == verdict.NO_SIGNAL)
    assert math.isnan(lost.band[0]) and "more draws" in lost.decide
    assert any(gap.with_signal < gap.images for gap in noise.gaps)


def test_two_draws_are_enough_for_a_map() -> None:
    shallow = gap_map(synthetic.measure(replace(WORLD, draws=2, noise=0.3)))
    assert all(math.isfinite(gap.d) and math.isnan(gap.within) for gap in shallow.gaps)


def test_the_map_is_a_function_of_its_measurement() -> None:
    shuffled = Measurement(MEASUREMENT.settings, MEASUREMENT.cells[::-1])
    assert gap_map(shuffled).to_json() == MAP.to_json()


@pytest.mark.parametrize("options, sentence", [
    ({"control": "resample"}, "null or reenc or repromote:192 or none"),
    ({"control": "demote:192"}, "can serve as one"),
    ({"margin": 0.0}, "between 0 and 1"),
    ({"margin": 1.0}, "between 0 and 1"),
    ({"estimator": "mean"}, "one_set, two_set"),
    ({"estimand": "mean"}, "ratio, power_ratio, per_image, population, dataset"),
    ({"estimator": "published"}, "with the estimand per_image"),
    ({"estimator": "stepped", "estimand": "per_image"}, "shared noise"),
    ({"estimator": "two_set", "estimand": "population"}, "use one_set"),
    ({"estimand": "population"}, "measure with sketch buckets"),
    ({"looks": 5}, "1 to 4"),
    ({"control": "repromote"}, "can serve as one"),
])
def test_bad_options_are_refused_in_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        gap_map(MEASUREMENT, **options)


def test_a_measurement_without_cells_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="no cells: run the probe"):
        gap_map(Measurement(MEASUREMENT.settings))


def test_an_image_that_lacks_a_bin_is_left_out_of_that_bin_alone() -> None:
    edges, lacking = MAP.bins[1], sorted({cell.image for cell in MEASUREMENT.cells})[:3]
    cells = [cell for cell in MEASUREMENT.cells
             if cell.bin != edges or cell.image not in lacking]
    partial = gap_map(Measurement(MEASUREMENT.settings, cells))
    for before, after in zip(MAP.gaps, partial.gaps, strict=True):
        assert after.images == (9 if after.bin == edges else 12)
        assert (after.d == before.d) == (after.bin != edges)


def test_what_is_decided_are_the_settled_bins_of_routes() -> None:
    found = decided(MAP)
    assert ("demote:224", MAP.bins[0]) in found and ("demote:224", MAP.bins[3]) in found
    for gap in MAP.gaps:
        settled = is_route(gap.arm) and gap.verdict in (verdict.SAFE, verdict.UNSAFE)
        assert ((gap.arm, gap.bin) in found) == settled


def test_planned_looks_widen_every_band_and_are_named() -> None:
    looking = gap_map(MEASUREMENT, looks=4)
    for once, often in zip(MAP.gaps, looking.gaps, strict=True):
        assert once.d == often.d and often.q_safe > once.q_safe
        assert often.q_unsafe > once.q_unsafe
    assert "4 planned looks" in summary(looking) and "looks" not in summary(MAP)


def test_what_a_look_decided_stays_decided_unless_the_map_says_otherwise(tmp_path) -> None:
    settings = MEASUREMENT.settings | {"looks": 3, "margin": 0.05}
    routes = [gap for gap in gap_map(Measurement(settings, MEASUREMENT.cells)).gaps
              if is_route(gap.arm)]
    assert {verdict.UNDECIDED, verdict.UNSAFE} <= {gap.verdict for gap in routes}

    def look(judged: str, kept: slice) -> list[list]:
        return [[gap.arm, list(gap.bin), judged] for gap in routes[kept]]

    # The first look decides all bins, the second those of the second route otherwise.
    looked = Measurement(settings, MEASUREMENT.cells, {
        "look 1": look(verdict.SAFE, slice(None)), "look 2": look(verdict.UNSAFE, slice(4, None))})
    made = gap_map(looked)
    for before, gap in zip(routes, made.gaps, strict=False):
        stood = (verdict.UNSAFE, 2) if gap.arm == "demote:192" else (verdict.SAFE, 1)
        if before.verdict != verdict.UNDECIDED:
            stood = before.verdict, 0
        assert (gap.verdict, gap.look) == stood
        assert (gap.band, gap.decide) == (before.band, "")
    assert "unsafe at 0.05 by look 2" in summary(made)
    assert len(decided(made)) == len(routes)
    made.save(tmp_path / "map.json")
    assert GapMap.load(tmp_path / "map.json").to_json() == made.to_json()


@pytest.mark.parametrize("choice", [{"margin": 0.06}, {"looks": 2}, {"estimator": "two_set"},
                                    {"control": "reenc"}, {"estimand": "power_ratio"}])
def test_a_look_says_nothing_of_a_map_of_other_choices(choice: dict) -> None:
    settings = MEASUREMENT.settings | {"looks": 3, "margin": 0.05}
    every = [[arm, list(edges), verdict.SAFE] for arm in MAP.arms for edges in MAP.bins]
    looked = Measurement(settings, MEASUREMENT.cells, {"look 1": every})
    assert any(gap.look for gap in gap_map(looked).gaps)
    plain = gap_map(Measurement(settings, MEASUREMENT.cells), **choice)
    assert gap_map(looked, **choice).gaps == plain.gaps


def shared_direction(images: int, draws: int, buckets: int = 1 << 14) -> Measurement:
    """Pictures with nearly one mean gradient, so that the batch gradient has a direction; the
    demoted one stands at a distance of .1."""
    rng = np.random.default_rng(0)
    src, side = np.eye(2, 50)
    means = np.stack([src, src, 0.9 * src + np.sqrt(1 - 0.81) * side])
    arms = ("src", "null", "demote:192")
    cells = []
    for image in range(images):
        own = means + 0.05 * rng.standard_normal(50)
        gradients = own + 0.1 * rng.standard_normal((draws, 3, 50))
        cells.append(synthetic.cell(f"{image:016x}", (0.0, 1.0), arms, gradients,
                                    buckets=buckets))
    settings = MEASUREMENT.settings | {"arms": list(arms), "bins": [[0.0, 1.0]], "draws": draws,
                                       "parts": ["A"]}
    return Measurement(settings, cells)


@pytest.mark.parametrize("estimand", ["power_ratio", "per_image", "population", "dataset"])
def test_every_estimand_is_named_and_says_whether_it_judges(estimand: str) -> None:
    made = gap_map(shared_direction(10, 8), estimand=estimand)
    assert made.estimand == estimand and f"estimand {estimand}" in summary(made)
    for gap in made.gaps:
        silent = estimand in ("per_image", "dataset")
        assert (gap.verdict == verdict.NO_VERDICT) == silent
        assert not silent or math.isnan(gap.band[0])
        assert math.isnan(gap.se_half_buckets) == (estimand not in ("population", "dataset"))
        assert silent <= ("use the estimand" in gap.decide)


@pytest.mark.parametrize("draws", [1, 8])
def test_population_finds_the_batch_gradient_even_from_one_draw(draws: int) -> None:
    made = gap_map(shared_direction(24, draws), estimand="population")
    (null,), (route,) = made.of("null"), made.of("demote:192")
    assert route.d == pytest.approx(0.1, abs=0.02) and abs(null.d) < 0.01
    assert route.band[0] < 0.1 < route.band[1] and route.verdict == verdict.UNSAFE
    assert null.verdict == verdict.SAFE
    assert math.isfinite(route.within) == (draws == 8) and math.isnan(route.effective)
    assert route.se_half_buckets == pytest.approx(route.se, rel=0.3)
    assert "with half the sketch buckets" in summary(made)


def test_dataset_is_conditional_on_the_images() -> None:
    measurement = shared_direction(10, 8)
    (route,) = gap_map(measurement, estimand="dataset").of("demote:192")
    assert route.d == pytest.approx(0.1, abs=0.02)
    assert route.pointwise[0] < route.d < route.pointwise[1]
    (excess,) = gap_map(measurement, estimand="dataset", control="null").of("demote:192")
    (null,) = gap_map(measurement, estimand="dataset").of("null")
    assert excess.d == pytest.approx(route.d - null.d)


def test_power_ratio_gives_no_verdict_where_few_images_count() -> None:
    cells = [replace(cell, gram=cell.gram * scale ** 2, products=cell.products * scale ** 2)
             for cell in MEASUREMENT.cells
             for scale in [30.0 if int(cell.image, 16) < 2 else 1.0]]
    loud = gap_map(Measurement(MEASUREMENT.settings, cells), estimand="power_ratio")
    for gap in loud.gaps:
        assert gap.effective < 3 and gap.verdict == verdict.NO_VERDICT
        assert "an effective" in gap.decide and math.isnan(gap.band[0])
    assert "of 12 images" in summary(loud)
    ratio = gap_map(Measurement(MEASUREMENT.settings, cells))
    assert [gap.d for gap in ratio.gaps] == pytest.approx([gap.d for gap in MAP.gaps])


def test_published_forms_need_independent_noise_and_differ_as_their_formula_says() -> None:
    world = replace(WORLD, shared=0.0, draws=16, noise=2.0, slope=0.0)
    apart = synthetic.measure(world)
    apart.settings["noise"] = "independent"
    plain, published, stepped = (gap_map(apart, estimand="per_image", estimator=form)
                                 for form in ("one_set", "published", "stepped"))
    for one, low, near in zip(plain.gaps, published.gaps, stepped.gaps, strict=True):
        assert low.d < near.d and abs(near.d - one.d) < 0.05
        assert low.verdict == verdict.NO_VERDICT and low.with_signal <= low.images


def test_a_control_of_each_tier_is_taken_by_its_kind() -> None:
    world = replace(WORLD, distances=dict(WORLD.distances) | {
        "resample:224": 0.01, "resample:192": 0.03})
    measurement = synthetic.measure(world, parts=1)
    relative, plain = gap_map(measurement, control="resample"), gap_map(measurement)
    for tier in (224, 192):
        for excess, own, control in zip(*(m.of(a) for m, a in (
                (relative, f"demote:{tier}"), (plain, f"demote:{tier}"),
                (plain, f"resample:{tier}"))), strict=True):
            assert excess.control == f"resample:{tier}"
            assert excess.d == pytest.approx(own.d - control.d)


def test_draw_limit_checks_hold_on_independent_draws_and_fail_on_linked_ones() -> None:
    def worst(measurement: Measurement) -> tuple[float, float]:
        check = gap_map(measurement).checks["draw_limit"]
        return (max(abs(row["a"] - 1) / row["se"] for row in check["native"]),
                max(abs(row["c"]) / row["se"] for row in check["arms"]))

    world = replace(WORLD, images=24, draws=16)
    native, arms = worst(synthetic.measure(world))
    assert native < 3.5 and arms < 4
    # Draws that repeat those of their own half are not independent: rho gains less than it says.
    rng = np.random.default_rng(0)
    cells = []
    for image in range(24):
        gradients = rng.standard_normal((4, 2, 60)) + 1
        repeated = gradients[[0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]]
        cells.append(synthetic.cell(f"{image:016x}", (0.0, 1.0), ("src", "null"), repeated))
    settings = MEASUREMENT.settings | {"arms": ["src", "null"], "bins": [[0.0, 1.0]],
                                       "parts": ["A"]}
    native, _ = worst(Measurement(settings, cells))
    assert native > 10


def test_the_draw_limit_check_is_left_out_where_draws_do_not_allow_it() -> None:
    shallow = gap_map(synthetic.measure(replace(WORLD, draws=2, noise=0.3)))
    assert "draw_limit" not in shallow.checks and "Draw-limit" not in summary(shallow)


def test_a_limit_is_fitted_to_any_draw_counts() -> None:
    counts = (4, 8, 16, 32)
    values = np.array([[0.05 + 0.4 / count, 1 + 3 / count] for count in counts]).T
    limit, slope = draw_limit.fit(counts, values)
    np.testing.assert_allclose(limit, [0.05, 1])
    np.testing.assert_allclose(slope, [0.4, 3])
    with pytest.raises(ValueError, match="2 different"):
        draw_limit.fit((8, 8), np.zeros(2))


def test_saving_and_loading_changes_nothing_and_nan_becomes_null(tmp_path) -> None:
    noise = gap_map(synthetic.measure(replace(WORLD, noise=60.0, draws=3)))
    for original in (MAP, noise):
        original.save(tmp_path / "map.json")
        text = (tmp_path / "map.json").read_text()
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        again = GapMap.load(tmp_path / "map.json")
        assert again.to_json() == original.to_json() and again.hash == original.hash
        assert again.bins == original.bins and again.settings == original.settings
    assert math.isnan(again.gaps[0].within) and again.gaps[0].control is None


def test_a_map_of_an_earlier_pack_opens(tmp_path) -> None:
    data = json.loads(MAP.to_json())
    del data["looks"], data["checks"]
    for gap in data["gaps"]:
        del gap["effective"], gap["se_half_buckets"], gap["look"]
    (tmp_path / "map.json").write_text(json.dumps(data))
    old = GapMap.load(tmp_path / "map.json")
    assert old.looks == 1 and [gap.d for gap in old.gaps] == [gap.d for gap in MAP.gaps]


def test_other_files_and_later_versions_are_refused(tmp_path) -> None:
    path = tmp_path / "map.json"
    path.write_text("not json")
    with pytest.raises(ValueError, match="is not a demotion-gap-map file"):
        GapMap.load(path)
    path.write_text(json.dumps(json.loads(MAP.to_json()) | {"version": 99}))
    with pytest.raises(ValueError, match="update the pack"):
        GapMap.load(path)


def test_the_summary_names_what_the_numbers_are() -> None:
    text = summary(MAP)
    for part in ("ratio", "one_set", "8 draws", "12 images", "margin 0.05", "256 -> 192",
                 "safe at 0.05"):
        assert part in text
    assert len(text.splitlines()) == 5 + len(MAP.gaps)
    assert "Draw-limit check" in text
    assert text.isascii()


def test_only_demote_arms_are_routes() -> None:
    assert [arm for arm in MAP.arms if is_route(arm)] == ["demote:224", "demote:192"]
    assert gap_map_module.arm_title("demote:224", 256) == "256 -> 224"
    assert gap_map_module.arm_title("repromote:192", 256) == "repromote 192"
