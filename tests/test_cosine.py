"""The debiased cosine against brute force and known truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import synthetic
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import cosine

quick = settings(max_examples=25)


def random_gradients(seed: int, draws: int = 6, arms: int = 3, size: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((draws, arms, size))


def many_cells(world: synthetic.World, count: int) -> tuple[np.ndarray, list]:
    """The true means [arms, size] of one cell, and that cell measured again and again."""
    rng = np.random.default_rng(5)
    mean = synthetic.means(world, rng)[0, 0]
    cells = [synthetic.cell("i", (0.0, 1.0), world.arms, synthetic.draws(world, mean, rng))
             for _ in range(count)]
    return mean, cells


WORLD = synthetic.World({"null": 0.0, "demote:192": 0.2}, bins=((0.0, 1.0),), images=1, draws=4,
                        noise=2.0, shared=0.5, slope=1.0)


@quick
@given(seed=st.integers(0, 10 ** 6), draws=st.integers(2, 9))
def test_one_set_is_the_mean_over_pairs_of_different_draws(seed: int, draws: int) -> None:
    gradients = random_gradients(seed, draws)
    pairs = [gradients[d] @ gradients[e].T for d in range(draws) for e in range(draws) if d != e]
    products = np.einsum("dap,dbp->ab", gradients, gradients)
    matrix = cosine.one_set(gradients.sum(axis=0), products, draws)
    np.testing.assert_allclose(matrix, np.mean(pairs, axis=0), atol=1e-12)
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), gradients, parts=2)
    np.testing.assert_allclose(cosine.moments(cell, "one_set"), matrix, atol=1e-12)


def test_one_set_takes_torch_tensors_of_any_precision() -> None:
    sums, products = torch.ones(2, 5, dtype=torch.bfloat16), torch.ones(2, 2, requires_grad=True)
    matrix = cosine.one_set(sums, products, 2)
    assert matrix.dtype == np.float64
    np.testing.assert_array_equal(matrix, np.full((2, 2), 2.0))


def test_one_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 draws"):
        cosine.one_set(np.ones((2, 3)), np.ones((2, 2)), 1)
    one = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), random_gradients(0, draws=1))
    for estimator in cosine.CONSISTENT:
        with pytest.raises(ValueError, match="at least 2 draws"):
            cosine.moments(one, estimator)


def test_an_unknown_estimator_is_refused() -> None:
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), random_gradients(0))
    with pytest.raises(ValueError, match="one_set, two_set"):
        cosine.moments(cell, "published")


@quick
@given(seed=st.integers(0, 10 ** 6), draws=st.integers(2, 9))
def test_two_set_is_made_of_products_across_halves_alone(seed: int, draws: int) -> None:
    gradients = random_gradients(seed, draws)
    first, second = gradients[0::2].mean(axis=0), gradients[1::2].mean(axis=0)
    cross = (first @ second.T + second @ first.T) / 2
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), gradients)
    np.testing.assert_allclose(cosine.moments(cell, "two_set"), cross, atol=1e-12)
    np.testing.assert_allclose(cosine.two_set(first, second), cosine.cosine(cross), atol=1e-12)
    gram = cell.gram.copy()
    gram[:, 0, :, 0] = gram[:, 1, :, 1] = 1e9
    spoiled = replace(cell, gram=gram, products=cell.products + 1e9)
    np.testing.assert_array_equal(cosine.moments(spoiled, "two_set"),
                                  cosine.moments(cell, "two_set"))


@pytest.mark.parametrize("estimator", cosine.CONSISTENT)
def test_moments_are_unbiased_under_shared_noise_and_shared_sigma(estimator: str) -> None:
    mean, cells = many_cells(WORLD, 1500)
    estimates = np.array([cosine.moments(cell, estimator) for cell in cells])
    error = estimates.std(axis=0) / np.sqrt(len(cells))
    assert (abs(estimates.mean(axis=0) - mean @ mean.T) < 4 * error).all()


def test_noise_trace_is_unbiased() -> None:
    _, cells = many_cells(replace(WORLD, slope=0.0), 800)
    traces = np.array([cosine.noise_trace(cell) for cell in cells])
    error = traces.std(axis=0) / np.sqrt(len(cells))
    assert (abs(traces.mean(axis=0) - WORLD.noise ** 2) < 4 * error).all()


def test_a_finite_draw_cosine_reads_low_and_the_debiased_ones_do_not() -> None:
    _, cells = many_cells(replace(WORLD, shared=0.0, slope=0.0), 1500)

    def pooled(estimator: str) -> float:
        terms = cosine.ratio_terms(cells, "null", estimator)
        return terms.x.sum() / np.sqrt(terms.s.sum() * terms.a.sum())

    assert pooled("raw") < 0.6
    assert all(abs(pooled(estimator) - 1) < 0.03 for estimator in cosine.CONSISTENT)


def test_the_published_form_equals_its_closed_form_and_stepping_up_mends_it() -> None:
    # Self-cosines of one set; at high rank they hardly vary, so the form's mean is that of a cell.
    for own in (0.5, 0.8, 0.95):
        cloud = synthetic.Cloud(2 * own / (1 + own), 10_000, draws=16, shared=0.0, along=0.0,
                                slope=0.0)
        cells = synthetic.cells_of(cloud, np.full((800, 1), 0.1), np.random.default_rng(1))
        found = {form: np.mean(cosine.image_cosines(cells, "demote:192", form))
                 for form in cosine.ESTIMATORS}
        assert found["published"] == pytest.approx(0.9 * 2 / (1 + own), abs=0.003)
        for form in ("one_set", "two_set", "stepped"):
            assert found[form] == pytest.approx(0.9, abs=0.003), form


def test_published_cosines_are_of_pooled_and_single_sets() -> None:
    gradients = random_gradients(8, draws=6, arms=2) + 1
    first, second = gradients[0::2].sum(axis=0), gradients[1::2].sum(axis=0)

    def cos(one: np.ndarray, other: np.ndarray) -> float:
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b"), gradients, parts=2)
    pooled = cos(first[0] + second[0], first[1] + second[1])
    own = [cos(first[index], second[index]) for index in (0, 1)]
    plain = pooled / np.sqrt(own[0] * own[1])
    stepped = pooled / np.sqrt(np.prod([2 * r / (1 + r) for r in own]))
    assert cosine.image_cosines([cell, None], "b", "published")[0] == pytest.approx(plain)
    assert cosine.image_cosines([cell, None], "b", "stepped")[0] == pytest.approx(stepped)
    assert np.isnan(cosine.published_cosine(0.9, -0.1, 0.5, stepped=False))


def test_the_squared_difference_from_vectors_equals_that_from_stored_products() -> None:
    gradients = random_gradients(3, draws=8, size=50)
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "demote:192"), gradients, parts=2)
    difference = gradients[:, 2] - gradients[:, 0]
    plain = cosine.moments(cell, "raw")
    assert plain[2, 2] + plain[0, 0] - 2 * plain[0, 2] == pytest.approx(
        np.sum(difference.mean(axis=0) ** 2), rel=1e-6)
    matrix = cosine.moments(cell, "one_set")
    total, squares = np.sum(difference.sum(axis=0) ** 2), np.sum(difference ** 2)
    assert matrix[2, 2] + matrix[0, 0] - 2 * matrix[0, 2] == pytest.approx(
        (total - squares) / (8 * 7), rel=1e-6)


def test_no_signal_is_nan_and_values_above_one_are_kept() -> None:
    values = cosine.cosine(np.array([[1.0, 1.2, 0.5], [1.2, 1.0, 0.5], [0.5, 0.5, -0.1]]))
    assert values[0, 1] == pytest.approx(1.2)
    assert np.isnan(values[2]).all() and np.isnan(values[:, 2]).all()
    assert np.isnan(cosine.cosine(np.array([[1.0, 0.5], [0.5, 0.0]]))[1]).all()


def test_parts_of_the_adapter_add_up() -> None:
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), random_gradients(4), parts=2)
    for estimator in cosine.CONSISTENT:
        parts = [cosine.moments(cell, estimator, part) for part in (0, 1)]
        np.testing.assert_allclose(sum(parts), cosine.moments(cell, estimator), atol=1e-12)


@quick
@given(seed=st.integers(0, 10 ** 6), gains=st.tuples(*[st.floats(1e-3, 1e3)] * 2))
def test_ratio_terms_do_not_see_the_length_of_gradients(seed: int, gains: tuple) -> None:
    gradients = random_gradients(seed, arms=2)
    scaled = gradients * np.array(gains)[:, None]
    pair = [synthetic.cell("i", (0.0, 1.0), ("src", "b"), rows) for rows in (gradients, scaled)]
    terms = cosine.ratio_terms(pair, "b", "one_set")
    for values in (terms.x, terms.s, terms.a):
        assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-12)


def test_null_is_at_distance_0_though_its_noise_is_its_own() -> None:
    # A tenth of the noise lies along the mean, so that a loud draw adds to M and to q at once.
    cloud = synthetic.Cloud(0.8, 1000, draws=4, shared=0.0, slope=0.0)
    found = {}
    for arm in ("null", "b"):
        cells = synthetic.cells_of(cloud, np.zeros((4000, 1)), np.random.default_rng(0),
                                   ("src", arm))
        terms = cosine.ratio_terms(cells, arm, "one_set")
        found[arm] = 1 - terms.x.sum() / np.sqrt(terms.s.sum() * terms.a.sum())
    # Three Monte Carlo errors. An arm that may have another length keeps the bias of a q each.
    assert abs(found["null"]) < 0.002
    assert -0.025 < found["b"] < -0.015


@quick
@given(seed=st.integers(0, 10 ** 6), gain=st.floats(1e-3, 1e3))
def test_null_terms_do_not_see_the_length_of_an_image(seed: int, gain: float) -> None:
    gradients = random_gradients(seed, arms=2)
    pair = [synthetic.cell("i", (0.0, 1.0), ("src", "null"), rows)
            for rows in (gradients, gain * gradients)]
    terms = cosine.ratio_terms(pair, "null", "one_set")
    for values in (terms.x, terms.s, terms.a):
        assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-12)


def test_an_image_without_the_arm_or_with_zero_gradients_adds_nothing() -> None:
    whole = synthetic.cell("i", (0.0, 1.0), ("src", "b"), random_gradients(0, arms=2))
    lacking = synthetic.cell("j", (0.0, 1.0), ("src",), random_gradients(1, arms=1))
    zero = synthetic.cell("k", (0.0, 1.0), ("src", "b"), np.zeros((6, 2, 10)))
    terms = cosine.ratio_terms([whole, lacking, zero], "b", "one_set")
    assert terms.present.tolist() == [True, False, True]
    for values in (terms.x, terms.s, terms.a):
        assert values[0] != 0 and not values[1:].any()
    assert np.isnan(cosine.per_image(terms)[1:]).all()


def test_halves_share_out_the_draws() -> None:
    cell = synthetic.cell("i", (0.0, 1.0), ("src", "b", "c"), random_gradients(2, draws=7))
    even, odd = cosine.half(cell, 0), cosine.half(cell, 1)
    assert (even.count, odd.count) == (4, 3)
    np.testing.assert_allclose(even.pooled()[1] + odd.pooled()[1], cell.pooled()[1])
    rows = random_gradients(2, draws=7)[1::2]
    np.testing.assert_allclose(odd.pooled()[0], rows.sum(axis=0) @ rows.sum(axis=0).T)


@pytest.mark.parametrize("rank", [8, 64, 1000, 10_000])
def test_products_are_unbiased_at_every_rank_noise_and_length(rank: int) -> None:
    rng = np.random.default_rng(rank)
    for own in (0.2, 0.8, 0.98):
        cloud = synthetic.Cloud(own, rank, norms=0.0, noisiness=0.5)
        gram, products = synthetic.products_of(cloud, np.tile([0.0, 0.3], (3000, 1)), rng)
        made = cosine.debias(gram.sum(axis=(-4, -2)), products.sum(axis=-3), cloud.draws)
        truth = np.array([[1, 1, 0.7], [1, 1, 0.7], [0.7, 0.7, 1]])
        error = made.std(axis=0) / np.sqrt(len(made))
        assert (abs(made.mean(axis=0) - truth) < 4 * error).all()
        # The self-cosine is what was asked for, so that these tables name what they test.
        square = np.diagonal(gram.sum(axis=(-4, -2)), axis1=-2, axis2=-1).mean(axis=0)
        assert cloud.draws ** 2 / square == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize("own, rank", [
    *((own, rank) for own in (0.5, 0.8, 0.98) for rank in (8, 64, 1000, 10_000)),
    *((0.2, rank) for rank in (64, 1000, 10_000))])
def test_ratio_is_within_five_thousandths_of_the_truth_under_shared_noise(own: float,
                                                                         rank: int) -> None:
    maps, cloud = 2400 if own == 0.2 else 150, synthetic.Cloud(own, rank, shared=0.7, norms=1.0)
    rng = np.random.default_rng(rank)
    x, s, a = synthetic.terms_of(cloud, np.full((maps, 40, 1), 0.05), rng)[..., 0].sum(axis=-1)
    signal = (s > 0) & (a > 0)
    assert signal.mean() > (0.99 if own == 0.2 else 1 - 1e-9)
    distances = 1 - x[signal] / np.sqrt((s * a)[signal])
    error = distances.std() / np.sqrt(maps)
    assert error < 0.003
    assert abs(distances.mean() - 0.05) < 0.005 + 2 * error


def sketched(images: int, draws: int = 8, size: int = 40, seed: int = 0,
             buckets: int = 1 << 15) -> tuple[np.ndarray, list]:
    """Gradients [images, draws, arms, size] around means that images share, and their cells."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal((2, size)) + rng.standard_normal(size)
    gradients = 2 * mean + rng.standard_normal((images, draws, 2, size))
    cells = [synthetic.cell(str(index), (0.0, 1.0), ("src", "b"), rows, buckets=buckets)
             for index, rows in enumerate(gradients)]
    return gradients, cells


def test_population_is_made_of_products_between_images_alone() -> None:
    gradients, cells = sketched(9)
    mean = gradients.mean(axis=1)
    terms = cosine.population_terms([*cells, None], "b")
    weights = np.array([1, 0, 2, 1, 1, 3, 1, 0, 1, 5.0])
    expected = sum(weights[i] * weights[j] * np.outer(mean[i, :, :], mean[j, :, :]).reshape(
        2, 40, 2, 40).trace(axis1=1, axis2=3) for i in range(9) for j in range(9) if i != j)
    x, s, a = ((weights * values[0]).sum() for values in terms.under(weights[None]))
    # Of 40 coordinates in 2^15 buckets none share one.
    assert (s, a) == pytest.approx(tuple(np.diag(expected)), rel=1e-5)
    assert x == pytest.approx((expected[0, 1] + expected[1, 0]) / 2, rel=1e-5)
    assert terms.present.tolist() == [True] * 9 + [False]


def test_population_works_with_one_draw_an_image() -> None:
    _, cells = sketched(400, draws=1, buckets=1 << 12)
    terms = cosine.population_terms(cells, "b")
    _, many = sketched(400, draws=16, buckets=1 << 12)
    deep = cosine.population_terms(many, "b")
    one, sixteen = (t.x.sum() / np.sqrt(t.s.sum() * t.a.sum()) for t in (terms, deep))
    assert one == pytest.approx(sixteen, abs=0.02)


def test_dataset_is_the_full_batch_gradient_without_its_noise() -> None:
    gradients, cells = sketched(6)
    present = np.ones(6, dtype=bool)
    sums = cosine.dataset_sums(cells, "b", present)
    mean = gradients.mean(axis=1)
    noise = sum(cosine.moments(cell, "one_set") - rows @ rows.T
                for cell, rows in zip(cells, mean, strict=True))
    full = mean.sum(axis=0) @ mean.sum(axis=0).T + noise
    assert sums.full == pytest.approx([full[0, 1], full[0, 0], full[1, 1]], rel=1e-5)
    # Without the second block (draws 1 and 5) of the fourth image.
    fewer = cells.copy()
    fewer[3] = synthetic.cell("3", (0.0, 1.0), ("src", "b"), gradients[3, [0, 2, 3, 4, 6, 7]],
                              buckets=1 << 15, blocks=3)
    again = cosine.dataset_sums([*fewer[:3], *fewer[4:]], "b", np.ones(5, dtype=bool)).full
    left = fewer[3]
    rest = mean.sum(axis=0) - mean[3]
    moved = gradients[3, [0, 2, 3, 4, 6, 7]].mean(axis=0)
    cross = moved @ rest.T
    expected = cosine.moments(left, "one_set") + cross + cross.T
    assert sums.left_out[3, 1] - again == pytest.approx(
        [expected[0, 1], expected[0, 0], expected[1, 1]], rel=1e-4)


def test_dataset_needs_four_blocks_and_products_between_images_need_sketches() -> None:
    _, shallow = sketched(4, draws=3)
    with pytest.raises(ValueError, match="measure at least 4 draws"):
        cosine.dataset_sums(shallow, "b", np.ones(4, dtype=bool))
    plain = synthetic.cell("i", (0.0, 1.0), ("src", "b"), random_gradients(0, arms=2))
    with pytest.raises(ValueError, match="measure with sketch buckets"):
        cosine.population_terms([plain], "b")


def test_half_the_buckets_is_a_sketch_too_and_a_noisier_one() -> None:
    errors = []
    for fold in (1, 2, 8):
        found = []
        for seed in range(60):
            gradients, cells = sketched(2, size=300, seed=seed, buckets=64)
            mean = gradients.mean(axis=1)
            made = cosine.population_terms(cells, "b", fold).s[0, 1]
            found.append(made - mean[0, 0] @ mean[1, 0])
        assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(60)
        errors.append(np.std(found))
    assert errors[0] < errors[1] < errors[2]


def test_effective_images_counts_those_that_matter() -> None:
    def terms(squares: list[float]) -> cosine.Terms:
        values = np.array(squares)
        return cosine.Terms(values, values, values, np.ones(len(values), dtype=bool))

    assert cosine.effective_images(terms([2.0] * 10)) == pytest.approx(10)
    assert cosine.effective_images(terms([1.0, 0.0, 0.0])) == pytest.approx(1)


def test_gains_that_differ_read_as_distance_in_power_alone() -> None:
    cloud = synthetic.Cloud(0.98, 1000, norms=0.0, gains=0.2)
    cells = synthetic.cells_of(cloud, np.zeros((2000, 1)), np.random.default_rng(2))
    found = []
    for terms in (cosine.ratio_terms(cells, "demote:192", "one_set"),
                  cosine.power_terms(cells, "demote:192", "one_set")):
        found.append(1 - terms.x.sum() / np.sqrt(terms.s.sum() * terms.a.sum()))
    assert abs(found[0]) < 0.001
    assert found[1] == pytest.approx(0.2 ** 2 / 2, abs=0.004)
