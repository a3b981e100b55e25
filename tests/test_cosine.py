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

quick = settings(max_examples=25, deadline=None)


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
    for estimator in cosine.ESTIMATORS:
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


@pytest.mark.parametrize("estimator", cosine.ESTIMATORS)
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
    assert all(abs(pooled(estimator) - 1) < 0.03 for estimator in cosine.ESTIMATORS)


def test_two_set_is_not_the_published_formula_which_reads_above_one() -> None:
    world = replace(WORLD, shared=0.0, slope=0.0, noise=1.0)
    rng = np.random.default_rng(1)
    mean = synthetic.means(world, rng)[0, 0]
    ours, published = [], []
    for _ in range(300):
        gradients = synthetic.draws(replace(world, draws=16), mean, rng)
        first, second = gradients[0::2].mean(axis=0), gradients[1::2].mean(axis=0)
        ours.append(cosine.two_set(first, second)[0, 1])
        halves = cosine.cosine(np.concatenate([first, second]) @ np.concatenate([first, second]).T)
        whole = cosine.cosine((first + second) @ (first + second).T)
        published.append(whole[0, 1] / np.sqrt(halves[0, 3] * halves[1, 4]))
    assert abs(np.mean(ours) - 1) < 0.01
    assert np.mean(published) > 1.04


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
    for estimator in cosine.ESTIMATORS:
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
