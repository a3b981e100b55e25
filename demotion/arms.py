"""Arms: the variants of a picture whose gradients are compared, and the training set that carries
them.

src            the picture on its native grid: the reference
null           the same latent under noise of its own: the instrument's zero
reenc          the native latent decoded and encoded again: the price of the VAE round trip
demote:E       the picture downscaled in pixel space to tier E, then encoded: what training would
               see
demote:E+MODE  the same latent under the same noise, with a rotary alignment of its grid to the
               native one (rotary.py)
shifted:E      the demoted latent, under the same noise, at the sigma where its low frequencies
               have the native signal-to-noise ratio (draws.shifted_sigma): a diagnostic
repromote:E    that downscaled picture carried back up to the native grid, then encoded: data
               without the grid
resample:E     the native picture enlarged by the route's nominal edge ratio and brought back, then
               encoded: the price of resampling alone
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save

from . import grid, measure, resample

PIXELS = "lanczos-1"


@dataclass(frozen=True)
class Arm:
    """An arm by kind; for those of a route target tier in pixels; for demote rotary mode."""

    kind: str
    tier: int | None = None
    rotary: str | None = None

    def __str__(self) -> str:
        tier = "" if self.tier is None else f":{self.tier}"
        return f"{self.kind}{tier}+{self.rotary}" if self.rotary else f"{self.kind}{tier}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        plain, _, rotary = name.partition("+")
        kind, _, tier = plain.partition(":")
        return cls(kind, int(tier) if tier else None, rotary or None)

    @property
    def plain(self) -> Arm:
        """The arm whose latent and noise it shares: without alignment, at src's own sigma."""
        return replace(self, kind="demote" if self.kind == "shifted" else self.kind, rotary=None)


SRC, NULL, REENC = Arm("src"), Arm("null"), Arm("reenc")


class Codec(Protocol):
    """A VAE as the arms need it: pixels uint8 [H, W, 3] to a raw latent [C, ..., h, w] and back."""

    fingerprint: str

    def encode(self, pixels: np.ndarray) -> torch.Tensor: ...

    def decode(self, latent: torch.Tensor) -> np.ndarray: ...


@dataclass(frozen=True)
class Item:
    """One picture of a training set.

    image         content hash: names the picture in streams, caches and results
    name          what messages call it
    picture       PNG with the whole picture, in the cache
    mask          PNG with its loss mask, or None
    size          pixels (height, width)
    native        native grid, latent cells
    conditioning  the host's own conditioning for the caption
    """

    image: str
    name: str
    picture: Path
    mask: Path | None
    size: tuple[int, int]
    native: grid.Grid
    caption: str
    repeats: int
    conditioning: Any = None

    def pixels(self) -> np.ndarray:
        """The whole picture, uint8 [H, W, 3]."""
        return np.asarray(Image.open(self.picture))

    def box(self) -> resample.Box:
        """The crop box, in pixels, that every arm is cut with."""
        return resample.cover_box(self.size, self.native)

    def loss_weights(self, latent_grid: grid.Grid) -> torch.Tensor | None:
        """Loss weights [h, w] of the mask on a grid, or None without a mask."""
        if self.mask is None:
            return None
        mask = np.asarray(Image.open(self.mask))
        return torch.from_numpy(resample.mask_weights(mask, latent_grid, self.box()))


@dataclass(frozen=True)
class TrainingSet:
    """Pictures with the arms encoded so far. Small data and paths; never mutated, arms are added to
    a copy.

    arms lists the arms encoded for every on-route picture. Latents lie in the cache, named by what
    they are made of. empty is the conditioning of an empty caption, or None where it is not known.
    """

    items: tuple[Item, ...]
    native_tier: int
    vae_factor: int
    patch: int
    codec: Codec
    cache: Path
    arms: tuple[Arm, ...] = ()
    empty: Any = None

    def pixel_size(self, cells: grid.Grid) -> tuple[int, int]:
        """Pixels (height, width) of a grid of latent cells."""
        return cells[0] * self.vae_factor, cells[1] * self.vae_factor

    def grid_of(self, item: Item, arm: Arm) -> grid.Grid | None:
        """Grid of an item's arm in latent cells; None off-route."""
        if arm.tier is None:
            return item.native
        demoted = grid.demoted_grid(
            item.native,
            self.native_tier,
            arm.tier,
            vae_factor=self.vae_factor,
            patch=self.patch,
        )
        return demoted if demoted is None or arm.plain.kind == "demote" else item.native

    def arms_of(self, item: Item) -> list[Arm]:
        """The arms that this item has a latent for."""
        return [arm for arm in self.arms if self.grid_of(item, arm) is not None]

    def latent(self, item: Item, arm: Arm) -> torch.Tensor:
        """Raw latent of an item's arm [C, ..., h, w]: from the cache, or encoded into it.

        Raises ValueError when it is not finite.
        """
        named_by = (
            item.image,
            item.native,
            self.native_tier,
            str(arm.plain),
            self.grid_of(item, arm),
            self.codec.fingerprint,
            PIXELS,
        )
        key = hashlib.blake2b(repr(named_by).encode(), digest_size=12).hexdigest()
        path = self.cache / "latents" / f"{key}.safetensors"
        if path.exists():
            return load_file(path)["latent"]
        latent = self.codec.encode(arm_pixels(self, item, arm)).contiguous()
        if not torch.isfinite(latent).all():
            raise ValueError(
                f"the VAE gives NaN or infinite latents for {item.name} ({arm}): "
                "run the VAE in fp32 or use another VAE"
            )
        measure.write_atomically(path, save({"latent": latent}))
        return latent

    def off_route(self, tier: int) -> dict[str, str]:
        """Name -> reason of every picture without a demoted grid of this tier."""
        reasons = {
            item.name: grid.off_route_reason(
                item.native, self.native_tier, tier, vae_factor=self.vae_factor, patch=self.patch
            )
            for item in self.items
        }
        return {name: reason for name, reason in reasons.items() if reason}


def content_hash(pixels: np.ndarray) -> str:
    """16 hex digits naming a picture by its size and pixels."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).tobytes())
    return digest.hexdigest()


def store_picture(pixels: np.ndarray, cache: Path) -> Path:
    """Keep a uint8 picture or mask in the cache under its content hash."""
    path = cache / "pictures" / f"{content_hash(pixels)}.png"
    if not path.exists():
        write_picture(pixels, path)
    return path


def write_picture(pixels: np.ndarray, path: Path) -> None:
    """Write uint8 pixels as PNG, atomically."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
    measure.write_atomically(path, buffer.getvalue())


def arm_pixels(training_set: TrainingSet, item: Item, arm: Arm) -> np.ndarray:
    """What the VAE is given for an arm of a picture, uint8 [h, w, 3]."""
    native = training_set.pixel_size(item.native)
    if arm.kind == "reenc":
        return training_set.codec.decode(training_set.latent(item, SRC))
    if arm.kind == "src":
        return resample.lanczos(item.pixels(), native, item.box())
    if arm.kind == "resample":
        picture = resample.lanczos(item.pixels(), native, item.box())
        ratio = training_set.native_tier / arm.tier
        enlarged = round(native[0] * ratio), round(native[1] * ratio)
        return resample.lanczos(resample.lanczos(picture, enlarged), native)
    cells = training_set.grid_of(item, Arm("demote", arm.tier))
    demoted = resample.lanczos(item.pixels(), training_set.pixel_size(cells), item.box())
    return resample.lanczos(demoted, native) if arm.kind == "repromote" else demoted


def add_arm(training_set: TrainingSet, arm: Arm, tick: Callable[[], None]) -> TrainingSet:
    """A copy of the set with one more arm, every on-route picture encoded; tick is called per
    picture.

    Raises ValueError for a route that goes up or saves nothing, when no picture is on-route (each
    listed with its reason), and for a latent that is not finite.
    """
    if arm.tier is not None:
        grid.check_route(training_set.native_tier, arm.tier)
        reasons = training_set.off_route(arm.tier)
        if len(reasons) == len(training_set.items):
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ValueError(
                f"no picture is on the route {training_set.native_tier} -> {arm.tier}: {listed}. "
                "Use larger or squarer pictures, or another tier"
            )
    for item in training_set.items:
        if training_set.grid_of(item, arm) is not None:
            training_set.latent(item, arm)
            tick()
    arms = training_set.arms if arm in training_set.arms else (*training_set.arms, arm)
    return replace(training_set, arms=arms)
