"""Count-sketches: long vectors reduced to a few buckets in which inner products stay unbiased."""

from __future__ import annotations

import numpy as np
import torch

from . import draws

# Draws of a cell are sketched in so many blocks of equal size, where there are enough.
BLOCKS = 4


def blocks_of(count: int) -> int:
    """Blocks K that the draws of a cell form: draw d is in block d mod K.

    Raises ValueError for a count of more than 4 draws that is no multiple of 4.
    """
    if count > BLOCKS and count % BLOCKS:
        raise ValueError(
            f"draws is {count}: with a sketch they form {BLOCKS} blocks of equal size, so take "
            f"{count - count % BLOCKS} or {count - count % BLOCKS + BLOCKS}"
        )
    return min(count, BLOCKS)


class CountSketch:
    """A random linear map of [size] vectors to [buckets] that keeps inner products on average.

    Every coordinate has a hashed bucket and a hashed sign, and a bucket is the signed sum of its
    coordinates. Over the hash, <sketch(x), sketch(y)> has mean <x, y> and variance at most
    (|x|^2 |y|^2 + <x, y>^2)/buckets (Charikar, Chen and Farach-Colton 2002).
    """

    def __init__(self, seed: int, size: int, buckets: int, device: torch.device) -> None:
        self.buckets = buckets
        # Bucket and sign in one number: what counts negative has buckets of its own until `fold`.
        places = draws.stream("sketch", seed, buckets).integers(
            0, 2 * buckets, size, dtype=np.int32
        )
        self.places = torch.from_numpy(places).to(device)

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for sums of sketches [*shape, 2 buckets], to `add` to and to `fold`."""
        return torch.zeros(*shape, 2 * self.buckets, device=self.places.device)

    def add(self, total: torch.Tensor, vector: torch.Tensor) -> None:
        """Add a vector [size] to a sum of sketches [2 buckets]."""
        total.index_add_(0, self.places, vector)

    def fold(self, total: torch.Tensor) -> np.ndarray:
        """Sums of sketches [..., 2 buckets] as float32 sketches [..., buckets]."""
        positive, negative = total.split(self.buckets, dim=-1)
        return (positive - negative).cpu().numpy()
