"""Random numbers: sigma bins and densities, counter-based streams, common random numbers, the
flow's algebra.

Every number is drawn from a Philox stream keyed by a hash of what it is for, on the CPU. So a draw
does not depend on order, batch, other arms, other images, the machine, or where a run resumed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import scipy.fft
import scipy.special
import torch

Bin = tuple[float, float]
# Sigma is exactly 1 there, and the model's input exactly the noise.
ENDPOINT: Bin = (1.0, 1.0)
LOSS = "velocity MSE"
DENSITIES = ("uniform", "logit_normal", "shifted", "dynamic_shift")
# Flux's dynamic shift: its logarithm is linear in tokens, through these two points (the values of
# the published scheduler: base and maximum shift, base and maximum image sequence length).
DYNAMIC_SHIFT = ((256, 0.5), (4096, 1.15))


def stream(*name: object) -> np.random.Generator:
    """Generator of the stream with this name."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))


def contiguous_bins(count: int, low: float = 0.0, high: float = 1.0) -> list[Bin]:
    """Equal bins that cover (low, high)."""
    if count < 1:
        raise ValueError(f"{count} bins: ask for at least 1")
    edges = [round(float(edge), 6) for edge in np.linspace(low, high, count + 1)]
    return list(zip(edges[:-1], edges[1:]))


def parse_bins(text: str) -> list[Bin]:
    """Bins from a count ("8") or from edges ("0.1-0.3, 0.3-0.5"), in ascending order; after either
    a piece "1" adds the endpoint, which is "1.0" by itself.

    Raises ValueError for anything else, for an empty or overlapping bin, or one outside [0, 1].
    """
    first, *rest = (piece.strip() for piece in text.split(","))
    if first.isdigit():
        bins = contiguous_bins(int(first))
    else:
        bins, rest = [], [first, *rest]
    for piece in rest:
        try:
            edges = tuple(float(edge) for edge in piece.split("-"))
            low, high = ENDPOINT if edges == (1.0,) else edges
        except ValueError:
            raise ValueError(
                f"bins '{text.strip()}' cannot be read at '{piece}': give a count such as 8, or "
                "edges such as 0.1-0.3, 0.3-0.5, and 1 for the endpoint"
            ) from None
        if not (0 <= low < high <= 1 or (low, high) == ENDPOINT):
            raise ValueError(
                f"bin {low:g}-{high:g} is not inside 0-1 in ascending order: correct its edges"
            )
        bins.append((low, high))
    bins.sort()
    for one, other in zip(bins, bins[1:]):
        if other[0] < one[1] or one == other:
            raise ValueError(
                f"two bins overlap between {other[0]:g} and {one[1]:g}: correct their edges"
            )
    return bins


def bin_text(sigma_bin: Bin) -> str:
    """A bin as `parse_bins` reads it: "0.1-0.3", and "1" for the endpoint."""
    return "1" if sigma_bin == ENDPOINT else f"{sigma_bin[0]:g}-{sigma_bin[1]:g}"


def draw_sigma(seed: int, image: str, sigma_bin: Bin, draw: int) -> float:
    """Sigma of a draw, uniform in its bin, shared by all arms. 0 itself is never drawn."""
    low, high = sigma_bin
    return high - (high - low) * float(stream("sigma", seed, image, low, high, draw).random())


def shifted_sigma(sigma: float, ratio: float) -> float:
    """Sigma at which a demoted latent's low frequencies have the signal-to-noise ratio that the
    native one's have at sigma; ratio is the native edge over the demoted one.

    Demotion divides the orthonormal coefficients that it keeps by the ratio r, so that
    (1 - s)/(r s) = (1 - sigma)/sigma, s = sigma/(r - (r - 1) sigma).
    """
    return sigma / (ratio - (ratio - 1) * sigma)


def draw_noise(
    seed: int, image: str, sigma_bin: Bin, draw: int, key: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Noise N(0, I) of a draw [*shape], float32; key is "shared", "null", or an arm that has its
    own."""
    return standard_normal(stream("noise", seed, image, *sigma_bin, draw, key), shape)


def standard_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """N(0, 1) of a stream as a float32 tensor [*shape]."""
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def carry_noise(
    noise: torch.Tensor, grid: tuple[int, int], fresh: np.random.Generator
) -> torch.Tensor:
    """The same noise on another grid: [..., H, W] -> [..., h, w], exactly N(0, I) again.

    The orthonormal DCT-II coefficients that both grids hold are kept; those that only the new grid
    holds are drawn fresh. With both axes shorter or equal nothing is drawn. The same grid returns
    the noise itself.
    """
    height, width = noise.shape[-2:]
    if (height, width) == tuple(grid):
        return noise
    coefficients = scipy.fft.dctn(noise.double().numpy(), axes=(-2, -1), norm="ortho")
    rows, columns = min(height, grid[0]), min(width, grid[1])
    if grid[0] > height or grid[1] > width:
        carried = fresh.standard_normal((*noise.shape[:-2], *grid))
    else:
        carried = np.empty((*noise.shape[:-2], *grid))
    carried[..., :rows, :columns] = coefficients[..., :rows, :columns]
    return torch.from_numpy(scipy.fft.idctn(carried, axes=(-2, -1), norm="ortho")).to(noise.dtype)


def noised(latent: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """z = (1 - sigma) x + sigma eps."""
    return (1 - sigma) * latent + sigma * noise


def velocity_loss(
    predicted: torch.Tensor,
    latent: torch.Tensor,
    noise: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over latent elements of (v_hat - (eps - x))^2 in float32; weights [h, w] make it a
    weighted mean."""
    error = (predicted.float() - (noise - latent).float()) ** 2
    if weights is None:
        return error.mean()
    return (error * weights).sum() / weights.expand_as(error).sum()


@dataclass(frozen=True)
class SigmaDensity:
    """Density of sigma in training: "uniform", "logit_normal" (mean, std), "shifted" (shift) or
    "dynamic_shift".

    "shifted" maps a uniform u to shift u / (1 + (shift - 1) u), which is how a flow model's own
    schedule shift spreads its steps; shift 1 is uniform. "dynamic_shift" is "shifted" by exp(mu),
    mu linear in the tokens of a picture's native grid: `at` gives a picture's density.
    """

    name: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in DENSITIES:
            raise ValueError(
                f"sigma density '{self.name}' is unknown: use one of {', '.join(DENSITIES)}"
            )
        if self.std <= 0 or self.shift <= 0:
            raise ValueError(
                f"sigma density {self.name} needs std and shift above 0, "
                f"got {self.std:g} and {self.shift:g}"
            )

    def __str__(self) -> str:
        return {
            "uniform": "uniform",
            "logit_normal": f"logit-normal({self.mean:g}, {self.std:g})",
            "shifted": f"shifted by {self.shift:g}",
            "dynamic_shift": "shifted by the tokens of each picture",
        }[self.name]

    def at(self, tokens: int) -> SigmaDensity:
        """The density for a picture of so many native tokens: itself unless it depends on them."""
        if self.name != "dynamic_shift":
            return self
        (few, low), (many, high) = DYNAMIC_SHIFT
        mu = low + (high - low) * (tokens - few) / (many - few)
        return SigmaDensity("shifted", shift=math.exp(mu))

    def quantile(self, u: float) -> float:
        """Sigma below which a fraction u of the steps falls. Raises ValueError for a density that
        depends on the picture."""
        if self.name == "logit_normal":
            return float(scipy.special.expit(self.mean + self.std * scipy.special.ndtri(u)))
        return self._shift * u / (1 + (self._shift - 1) * u)

    def cdf(self, sigma: float) -> float:
        """Fraction of the steps below sigma. Raises ValueError as `quantile` does."""
        if not 0 < sigma < 1:
            return float(sigma >= 1)
        if self.name == "logit_normal":
            return float(scipy.special.ndtr((math.log(sigma / (1 - sigma)) - self.mean) / self.std))
        return sigma / (self._shift - (self._shift - 1) * sigma)

    @property
    def _shift(self) -> float:
        if self.name == "dynamic_shift":
            raise ValueError(
                "sigma density dynamic_shift depends on the picture: take it at(tokens)"
            )
        return self.shift if self.name == "shifted" else 1.0
