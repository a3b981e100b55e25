"""Count-sketches: inner products that are right on average, with the error that is stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from demotion import sketch

SIZE, BUCKETS = 3000, 64


def sketched(seed: int, *vectors: torch.Tensor) -> np.ndarray:
    """Sketches [n, buckets] of vectors under one hash."""
    sketcher = sketch.CountSketch(seed, SIZE, BUCKETS, torch.device("cpu"))
    totals = sketcher.empty(len(vectors))
    for total, vector in zip(totals, vectors):
        sketcher.add(total, vector)
    return sketcher.fold(totals)


def test_inner_products_are_unbiased_with_the_stated_error():
    generator = torch.Generator().manual_seed(0)
    # A mean of its own: without signs buckets would add it up.
    x = 0.5 + torch.randn(SIZE, generator=generator)
    y = 0.5 * x + torch.randn(SIZE, generator=generator)
    found = []
    for seed in range(1500):
        one, other = sketched(seed, x, y).astype(np.float64)
        found.append(one @ other)
    true, norms = float(x @ y), float((x @ x) * (y @ y))
    error = np.sqrt((norms + true**2) / BUCKETS)
    assert abs(np.mean(found) - true) < 4 * error / np.sqrt(len(found))
    assert np.std(found) == pytest.approx(error, rel=0.1)


def test_a_sum_of_sketches_is_the_sketch_of_the_sum_and_one_seed_is_one_hash():
    x, y = torch.randn(2, SIZE)
    one, other = sketched(3, x, y)
    np.testing.assert_allclose(one + other, sketched(3, x + y)[0], atol=1e-4)
    assert (sketched(3, x) == one).all() and (sketched(4, x) != one).any()


def test_a_long_vector_is_held_once_beside_its_sketch():
    sketcher = sketch.CountSketch(0, SIZE, BUCKETS, torch.device("cpu"))
    held = [value for value in vars(sketcher).values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in held) == 4 * SIZE


@pytest.mark.parametrize(("draws", "blocks"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 4), (12, 4)])
def test_blocks_are_equal_and_at_most_four(draws, blocks):
    assert sketch.blocks_of(draws) == blocks and draws % blocks == 0


def test_draws_that_do_not_form_equal_blocks_are_refused():
    with pytest.raises(ValueError, match="draws is 6: .* so take 4 or 8"):
        sketch.blocks_of(6)
