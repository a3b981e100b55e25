"""Tiers, token bands, routes, and the grids of a picture.

Pictures are measured in pixels (height, width); grids in latent cells (height, width). With a VAE
factor f and a patch p a token is p x p latent cells, or an f p pixel square. A tier is named by a
nominal edge e in pixels and holds every grid whose token count lies in [.91, 1.03] (e/(f p))^2; the
band is wide enough for the grids published with arXiv 2608.04448.
"""

from __future__ import annotations

from functools import lru_cache

BAND = (0.91, 1.03)
MAX_ASPECT_ERROR = 0.04
MAX_EDGE_RATIO = 0.94

Grid = tuple[int, int]


def nominal_tokens(tier: int, vae_factor: int = 8, patch: int = 2) -> float:
    """Token count (e/(f p))^2 that a tier is named after."""
    return (tier / (vae_factor * patch)) ** 2


def token_count(grid: Grid, patch: int = 2) -> int:
    """Tokens of a grid of latent cells."""
    return (grid[0] // patch) * (grid[1] // patch)


def in_tier(grid: Grid, tier: int, vae_factor: int = 8, patch: int = 2) -> bool:
    """Whether the grid is whole in patches and its token count lies in the tier's band."""
    if grid[0] % patch or grid[1] % patch:
        return False
    nominal = nominal_tokens(tier, vae_factor, patch)
    return BAND[0] * nominal <= token_count(grid, patch) <= BAND[1] * nominal


def aspect_error(grid: Grid, reference: Grid) -> float:
    """Relative error of width/height against a reference, 0 when equal: max(r, 1/r) - 1."""
    ratio = (grid[1] * reference[0]) / (grid[0] * reference[1])
    return max(ratio, 1 / ratio) - 1


def check_route(source_tier: int, target_tier: int) -> None:
    """Raise ValueError unless a route goes down far enough to be worth a step."""
    if target_tier >= source_tier:
        raise ValueError(
            f"route {source_tier} -> {target_tier} does not go down: "
            f"choose a target tier below {source_tier}"
        )
    if target_tier / source_tier > MAX_EDGE_RATIO:
        raise ValueError(
            f"route {source_tier} -> {target_tier} saves too little (edge ratio "
            f"{target_tier / source_tier:.3f} is above {MAX_EDGE_RATIO}): choose a target tier "
            f"of at most {int(MAX_EDGE_RATIO * source_tier)}"
        )


def native_grid(picture_hw: Grid, tier: int, *, vae_factor: int = 8, patch: int = 2) -> Grid:
    """Native grid (latent cells) of a picture (pixels): the tier's grid of nearest aspect.

    A picture that does not cover it keeps its largest grid without enlargement, which `covers`
    tells. Raises ValueError for a picture smaller than one token.
    """
    grid = _search(tuple(picture_hw), tier, vae_factor, patch)
    if covers(picture_hw, grid, vae_factor):
        return grid
    return _largest_grid(picture_hw, tier, vae_factor, patch)


def covers(picture_hw: Grid, grid: Grid, vae_factor: int = 8) -> bool:
    """Whether a picture has at least the pixels of a grid on both axes."""
    return picture_hw[0] >= grid[0] * vae_factor and picture_hw[1] >= grid[1] * vae_factor


def demoted_grid(
    native_hw: Grid, source_tier: int, target_tier: int, *, vae_factor: int = 8, patch: int = 2
) -> Grid | None:
    """Demoted grid (latent cells) of a native grid on the route source_tier -> target_tier.

    The target band is searched for the grid of nearest aspect. None when the picture is off-route:
    `off_route_reason` says why. Raises ValueError when the route itself is impossible.
    """
    check_route(source_tier, target_tier)
    if off_route_reason(native_hw, source_tier, target_tier, vae_factor=vae_factor, patch=patch):
        return None
    return _search(tuple(native_hw), target_tier, vae_factor, patch)


def off_route_reason(
    native_hw: Grid, source_tier: int, target_tier: int, *, vae_factor: int = 8, patch: int = 2
) -> str | None:
    """Why a native grid has no demoted grid on a route, or None when it has one."""
    if not in_tier(native_hw, source_tier, vae_factor, patch):
        return f"its grid {native_hw[0]}x{native_hw[1]} is not of tier {source_tier}"
    grid = _search(tuple(native_hw), target_tier, vae_factor, patch)
    error = aspect_error(grid, native_hw)
    if error > MAX_ASPECT_ERROR:
        return (
            f"the nearest grid of tier {target_tier}, {grid[0]}x{grid[1]}, is {error:.1%} off its "
            f"aspect (at most {MAX_ASPECT_ERROR:.0%})"
        )
    if grid[0] > native_hw[0] or grid[1] > native_hw[1]:
        return (
            f"the grid of tier {target_tier}, {grid[0]}x{grid[1]}, is longer than its native grid"
        )
    return None


@lru_cache(maxsize=4096)
def _search(reference: Grid, tier: int, vae_factor: int, patch: int) -> Grid:
    """The band's grid of smallest |log aspect error|, then nearest token count, then more
    tokens."""
    nominal = nominal_tokens(tier, vae_factor, patch)
    low, high = BAND[0] * nominal, BAND[1] * nominal
    tokens = [
        (rows, columns)
        for rows in range(1, int(high) + 1)
        for columns in range(max(1, -int(-low // rows)), int(high // rows) + 1)
    ]
    if not tokens:
        raise ValueError(
            f"tier {tier} is smaller than one token of {vae_factor * patch} pixels: "
            "choose a larger tier"
        )

    def badness(grid: Grid) -> tuple[float, float, int]:
        count = grid[0] * grid[1]
        # Rounded, so that mirrored grids of a square tie in spite of floating point.
        return round(aspect_error(grid, reference), 12), abs(count - nominal), -count

    rows, columns = min(tokens, key=badness)
    return rows * patch, columns * patch


def _largest_grid(picture_hw: Grid, tier: int, vae_factor: int, patch: int) -> Grid:
    most_rows, most_columns = (edge // (vae_factor * patch) for edge in picture_hw)
    if not most_rows or not most_columns:
        raise ValueError(
            f"a picture of {picture_hw[1]}x{picture_hw[0]} pixels is smaller than one token "
            f"({vae_factor * patch} pixels): leave it out or use a larger one"
        )
    high = BAND[1] * nominal_tokens(tier, vae_factor, patch)

    def badness(grid: Grid) -> tuple[bool, int, float]:
        error = aspect_error(grid, picture_hw)
        return error > MAX_ASPECT_ERROR, -grid[0] * grid[1], round(error, 12)

    rows, columns = min(
        (
            (rows, columns)
            for rows in range(1, min(most_rows, int(high)) + 1)
            for columns in range(1, min(most_columns, int(high // rows)) + 1)
        ),
        key=badness,
    )
    return rows * patch, columns * patch
