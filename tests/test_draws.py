"""Streams, common random numbers, densities and the flow's algebra."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import draws


def test_a_stream_is_its_name_and_nothing_else():
    first = draws.stream("noise", 1, "image", 0.1).standard_normal(4)
    draws.stream("noise", 2, "image", 0.1).standard_normal(100)
    np.random.seed(0)
    assert (draws.stream("noise", 1, "image", 0.1).standard_normal(4) == first).all()
    assert (draws.stream("noise", 1, "image", 0.2).standard_normal(4) != first).all()


def test_sigma_is_uniform_inside_its_bin_and_never_zero():
    sigmas = [draws.draw_sigma(0, "image", (0.0, 0.2), draw) for draw in range(2000)]
    assert 0 < min(sigmas) and max(sigmas) <= 0.2
    assert scipy.stats.kstest(sigmas, scipy.stats.uniform(0, 0.2).cdf).pvalue > 1e-3
    assert draws.draw_sigma(5, "image", (1.0, 1.0), 3) == 1.0


@pytest.mark.parametrize("target", [(24, 24), (20, 26), (32, 30)])
def test_carried_noise_is_standard_normal_and_its_low_corner_is_the_native_one(target):
    noise = draws.standard_normal(draws.stream("test"), (400, 32, 32))
    carried = draws.carry_noise(noise, target, draws.stream("fresh"))
    assert carried.shape == (400, *target)
    assert abs(carried.mean()) < 0.01 and abs(carried.var() - 1) < 0.02
    flat = carried[:, 3, 4].numpy(), carried[:, 3, 5].numpy()
    assert abs(np.corrcoef(*flat)[0, 1]) < 0.2
    native, small = (
        scipy.fft.dctn(x.double().numpy(), axes=(-2, -1), norm="ortho") for x in (noise, carried)
    )
    np.testing.assert_allclose(small, native[:, : target[0], : target[1]], atol=1e-5)


def test_carried_noise_on_the_same_grid_is_the_noise_itself():
    noise = draws.standard_normal(draws.stream("test"), (2, 3, 8, 8))
    assert draws.carry_noise(noise, (8, 8), draws.stream("fresh")) is noise


def test_a_longer_axis_is_filled_with_fresh_numbers():
    noise = draws.standard_normal(draws.stream("test"), (300, 8, 12))
    carried = draws.carry_noise(noise, (10, 10), draws.stream("fresh"))
    assert abs(carried.var() - 1) < 0.03
    native, other = (
        scipy.fft.dctn(x.double().numpy(), axes=(-2, -1), norm="ortho") for x in (noise, carried)
    )
    np.testing.assert_allclose(other[:, :8, :10], native[:, :, :10], atol=1e-5)


def test_noising_and_target_are_those_of_rectified_flow():
    latent, noise = torch.randn(2, 1, 4, 6, 6)
    for sigma in (0.25, 1.0):
        z = draws.noised(latent, noise, sigma)
        torch.testing.assert_close(z - sigma * (noise - latent), latent)
    assert draws.velocity_loss(noise - latent, latent, noise) == 0


def test_loss_weights_make_a_weighted_mean_over_cells():
    latent, noise, predicted = torch.randn(3, 1, 4, 6, 6)
    weights = torch.zeros(6, 6)
    weights[:3] = 1
    half = draws.velocity_loss(predicted[..., :3, :], latent[..., :3, :], noise[..., :3, :])
    torch.testing.assert_close(draws.velocity_loss(predicted, latent, noise, weights), half)
    ones = draws.velocity_loss(predicted, latent, noise, torch.ones(6, 6))
    torch.testing.assert_close(ones, draws.velocity_loss(predicted, latent, noise))


DENSITIES = [
    draws.SigmaDensity(),
    draws.SigmaDensity("logit_normal", 0.5, 1.2),
    draws.SigmaDensity("shifted", shift=3.0),
    draws.SigmaDensity("dynamic_shift").at(4096),
]


@settings(max_examples=50)
@given(st.sampled_from(DENSITIES), st.floats(0.001, 0.999))
def test_quantile_and_cdf_are_inverse(density, u):
    assert density.cdf(density.quantile(u)) == pytest.approx(u, abs=1e-9)


def test_logit_normal_is_what_it_says():
    density = draws.SigmaDensity("logit_normal", 0.0, 1.0)
    assert density.cdf(0.5) == pytest.approx(0.5)
    upper = scipy.stats.norm.cdf(math.log(0.9 / 0.1))
    assert density.cdf(0.9) == pytest.approx(upper)


def test_the_dynamic_shift_is_that_of_the_published_scheduler():
    """Its logarithm is 0.5 at 256 tokens and 1.15 at 4096, and linear in between and beyond."""
    density = draws.SigmaDensity("dynamic_shift")
    for tokens, mu in ((256, 0.5), (4096, 1.15), (2176, 0.825), (8192, 1.15 + 0.65 * 4096 / 3840)):
        at = density.at(tokens)
        assert at.name == "shifted" and math.log(at.shift) == pytest.approx(mu, abs=1e-12)
    # More tokens, more noise.
    assert density.at(4096).quantile(0.5) > density.at(1024).quantile(0.5) > 0.5


@pytest.mark.parametrize("density", DENSITIES)
def test_a_density_that_does_not_depend_on_tokens_is_the_same_at_all(density):
    assert density.at(64) is density


@pytest.mark.parametrize("ask", [lambda density: density.quantile(0.5), lambda d: d.cdf(0.5)])
def test_a_density_that_depends_on_the_picture_has_no_numbers_without_one(ask):
    with pytest.raises(ValueError, match="depends on the picture"):
        ask(draws.SigmaDensity("dynamic_shift"))


def test_shifting_logits_is_shifting_sigma():
    """A logit-normal through the shift exp(mu) is the logit-normal of mean + mu."""
    plain, moved = draws.SigmaDensity("logit_normal"), draws.SigmaDensity("logit_normal", 1.15)
    shift = draws.SigmaDensity("shifted", shift=math.exp(1.15))
    for u in (0.1, 0.5, 0.8):
        assert moved.quantile(u) == pytest.approx(shift.quantile(plain.quantile(u)), abs=1e-12)


@settings(max_examples=50)
@given(st.floats(0.01, 1), st.floats(1.01, 4))
def test_shifted_sigma_keeps_the_signal_to_noise_ratio_of_what_both_grids_hold(sigma, ratio):
    shifted = draws.shifted_sigma(sigma, ratio)
    # The demoted grid holds the same coefficients, smaller by the ratio.
    assert (1 - shifted) / ratio * sigma == pytest.approx((1 - sigma) * shifted, abs=1e-12)
    assert 0 < shifted <= sigma
    assert draws.shifted_sigma(1.0, ratio) == 1.0


def test_demoting_a_smooth_latent_divides_its_coefficients_by_the_edge_ratio():
    """What the shift rests on, for a latent that both grids hold."""
    rows, columns = np.meshgrid(np.arange(32) + 0.5, np.arange(32) + 0.5, indexing="ij")
    native = np.cos(math.pi * 2 * rows / 32) * np.cos(math.pi * 3 * columns / 32)
    small = native.reshape(16, 2, 16, 2).mean((1, 3))
    ratio = [scipy.fft.dctn(grid, norm="ortho")[2, 3] for grid in (native, small)]
    assert ratio[0] / ratio[1] == pytest.approx(2, rel=0.02)


def test_at_the_endpoint_the_input_is_exactly_the_noise():
    latent, noise = torch.randn(2, 1, 4, 6, 6)
    sigma = draws.draw_sigma(0, "image", draws.ENDPOINT, 5)
    assert sigma == 1.0
    assert torch.equal(draws.noised(latent, noise, sigma), noise)


def test_bins_from_a_count_and_from_edges():
    assert draws.parse_bins("4") == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]
    assert draws.parse_bins("0.5-0.9, 0.1-0.3") == [(0.1, 0.3), (0.5, 0.9)]


def test_the_endpoint_is_a_bin_of_its_own_after_edges_or_a_count():
    assert draws.parse_bins("0.5-1, 1") == [(0.5, 1), (1, 1)]
    assert draws.parse_bins("2, 1") == [(0, 0.5), (0.5, 1), (1, 1)]
    assert draws.parse_bins("1.0") == [(1, 1)] and draws.parse_bins("1") == [(0, 1)]
    for sigma_bin in ((0.1, 0.35), (1.0, 1.0)):
        again = draws.parse_bins("0-0.05, " + draws.bin_text(sigma_bin))
        assert again[1] == sigma_bin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "at least 1"),
        ("a-b", "cannot be read"),
        ("0.5", "cannot be read"),
        ("0.5-0.2", "ascending"),
        ("0.5-1.2", "inside 0-1"),
        ("0.1-0.4, 0.3-0.5", "overlap"),
        ("0.2-0.3, 0.2-0.3", "overlap"),
        ("2, 1, 1", "overlap"),
        ("0.5-0.5", "ascending"),
        ("8, 0.1", "cannot be read"),
    ],
)
def test_bad_bins_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        draws.parse_bins(text)


def test_an_unknown_density_is_named():
    with pytest.raises(ValueError, match="'cosmap' is unknown"):
        draws.SigmaDensity("cosmap")
