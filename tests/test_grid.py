"""Grids: bands, routes, and which picture goes where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demotion import grid

TIERS = st.sampled_from([256, 384, 512, 768, 1024, 1536, 2048])
EDGES = st.integers(16, 6000)
# VAE factor and patch of the families: most, Flux 2, HunyuanImage, and pixel space.
GEOMETRIES = st.sampled_from([(8, 2), (16, 1), (32, 1), (1, 16)])


@pytest.mark.parametrize(
    ("native", "source", "target", "demoted"),
    [
        ((128, 128), 1024, 896, (112, 112)),
        ((128, 128), 1024, 768, (96, 96)),
        ((128, 128), 1024, 512, (64, 64)),
        ((32, 32), 256, 240, (30, 30)),
        ((32, 32), 256, 224, (28, 28)),
        ((32, 32), 256, 192, (24, 24)),
        ((32, 32), 256, 128, (16, 16)),
    ],
)
def test_square_grids_demote_to_the_nominal_square(native, source, target, demoted):
    assert grid.demoted_grid(native, source, target) == demoted


def test_the_search_is_the_documented_order_of_preferences():
    """Against a plain enumeration: aspect error, then token count, then more tokens."""
    for native in ((40, 26), (26, 40), (36, 28), (30, 34)):
        height, width = native
        candidates = [
            (rows * 2, columns * 2)
            for rows in range(1, 300)
            for columns in range(1, 300)
            if 0.91 * 144 <= rows * columns <= 1.03 * 144
        ]
        best = min(
            candidates,
            key=lambda g: (
                round(max(g[1] * height / (g[0] * width), g[0] * width / (g[1] * height)), 12),
                abs(grid.token_count(g) - 144),
                -grid.token_count(g),
            ),
        )
        fits = grid.aspect_error(best, native) <= 0.04 and best[0] <= height and best[1] <= width
        assert grid.demoted_grid(native, 256, 192) == (best if fits else None)


@settings(max_examples=150)
@given(EDGES, EDGES, TIERS, GEOMETRIES)
def test_a_native_grid_never_needs_enlargement_nor_padding(height, width, tier, geometry):
    factor, patch = geometry
    height, width = max(height, factor * patch), max(width, factor * patch)
    cells = grid.native_grid((height, width), tier, vae_factor=factor, patch=patch)
    assert cells[0] % patch == 0 and cells[1] % patch == 0
    assert grid.covers((height, width), cells, factor)
    most = grid.BAND[1] * grid.nominal_tokens(tier, factor, patch)
    assert grid.token_count(cells, patch) <= most


@settings(max_examples=150)
@given(EDGES, EDGES, TIERS, st.floats(0.4, grid.MAX_EDGE_RATIO), GEOMETRIES)
def test_a_demoted_grid_keeps_aspect_shrinks_and_needs_no_padding(
    height, width, tier, ratio, geometry
):
    factor, patch = geometry
    height, width = max(height, factor * patch), max(width, factor * patch)
    given_by = {"vae_factor": factor, "patch": patch}
    native = grid.native_grid((height, width), tier, **given_by)
    target = int(tier * ratio)
    demoted = grid.demoted_grid(native, tier, target, **given_by)
    if demoted is None:
        assert grid.off_route_reason(native, tier, target, **given_by)
        return
    assert grid.off_route_reason(native, tier, target, **given_by) is None
    # Multiples of the patch, in the target's band.
    assert grid.in_tier(demoted, target, **given_by)
    assert grid.aspect_error(demoted, native) <= grid.MAX_ASPECT_ERROR
    assert demoted[0] <= native[0] and demoted[1] <= native[1]


@pytest.mark.parametrize("edges", [(1009, 1013), (4093, 1021), (19997, 20011), (31, 8191)])
@pytest.mark.parametrize("tier", [256, 1024, 2048])
def test_prime_and_huge_pictures_have_a_grid(edges, tier):
    cells = grid.native_grid(edges, tier)
    assert cells[0] % 2 == 0 and cells[1] % 2 == 0 and grid.covers(edges, cells)
    for target in (192, 896, 1792):
        if target < tier * grid.MAX_EDGE_RATIO:
            demoted = grid.demoted_grid(cells, tier, target)
            assert demoted is None or grid.in_tier(demoted, target)


@settings(max_examples=60)
@given(st.integers(300, 4000), st.integers(300, 4000), st.sampled_from([256, 512, 1024]))
def test_turning_a_picture_turns_its_grid(height, width, tier):
    turned = grid.native_grid((width, height), tier)
    assert grid.native_grid((height, width), tier) == turned[::-1]


def test_a_small_picture_keeps_its_largest_grid_and_is_off_route():
    cells = grid.native_grid((250, 250), 256)
    assert cells == (30, 30)
    assert grid.demoted_grid(cells, 256, 192) is None
    assert "not of tier 256" in grid.off_route_reason(cells, 256, 192)


def test_routes_that_go_up_or_save_nothing_are_refused():
    with pytest.raises(ValueError, match="does not go down"):
        grid.demoted_grid((32, 32), 256, 512)
    with pytest.raises(ValueError, match="at most 240"):
        grid.demoted_grid((32, 32), 256, 248)


def test_a_picture_below_one_token_is_refused_by_its_size():
    with pytest.raises(ValueError, match="40x12 pixels"):
        grid.native_grid((12, 40), 256)


def test_patch_and_vae_factor_set_the_cells():
    assert grid.native_grid((1024, 1024), 1024, vae_factor=16, patch=1) == (64, 64)
    assert grid.native_grid((1024, 1024), 1024, vae_factor=8, patch=2) == (128, 128)
