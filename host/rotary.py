"""Where each family makes its rotary table, and how a forward is given an aligned one.

ComfyUI's `rope_options` can only scale positions, so bands need the table itself. For the length of
one forward the embedder's own `forward` is shadowed by one that makes the aligned table; nothing
stays on the model after it, however it ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import torch
from comfy.patcher_extension import WrappersMP

from ..demotion import grid, rotary
from . import families

KEY = "demotion_rotary"

Table = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Stretch:
    """One forward on a demoted grid, in tokens (rows, columns).

    frames   frames of the latent, 1 for a picture
    spacing  distance of neighbouring tokens in positions
    """

    mode: str
    sigma: float
    native: grid.Grid
    demoted: grid.Grid
    frames: int
    spacing: tuple[float, float]

    @property
    def tokens(self) -> int:
        return self.frames * self.demoted[0] * self.demoted[1]

    def scale(self, axis: int) -> float:
        """Native over demoted edge; axis 0 is y, 1 is x."""
        return self.native[axis] / self.demoted[axis]

    def kept(self, frequencies: torch.Tensor, axis: int) -> torch.Tensor:
        """Share [bands] that each band of an axis keeps of its own frequency."""
        edge = self.demoted[axis] * self.spacing[axis]
        return rotary.kept_share(frequencies, edge, self.mode, self.sigma)


@dataclass(frozen=True)
class Door:
    """Where a family's table is made.

    embedder  path of the module that makes it, inside the diffusion model
    table     (its own forward, the module, a stretch, this door) -> the aligned forward
    axes      which axes of the position ids are y and x
    text      where the text stands on those axes. "origin": at 0, where the image starts or has its
              centre. "own": at positions of its own; the image counts from its first token.
              "beside": from half the image's longer edge on, on all axes; the image is centred on 0
    first     whether the text's tokens come before the image's
    head      axis of the table that is broadcast over heads
    """

    embedder: str
    table: Callable[[Table, torch.nn.Module, Stretch, Door], Table]
    axes: tuple[int, int] = (1, 2)
    text: str = "origin"
    first: bool = True
    head: int = 1


def _angles(
    ids: torch.Tensor, module: torch.nn.Module, stretch: Stretch, door: Door
) -> torch.Tensor | None:
    """Angles [B, L, bands] of position ids [B, L, axes], float64; None when no band changes.

    Text that starts where the grid puts it moves, band by band, from the demoted grid's place to
    the native one's, as the image's own positions do.
    """
    device = ids.device if comfy.model_management.supports_fp64(ids.device) else "cpu"
    text = 0 if door.text == "origin" else ids.shape[1] - stretch.tokens
    lengths = (text, ids.shape[1] - text) if door.first else (ids.shape[1] - text, text)
    shift = 0
    if door.text == "beside":
        shift = max(edge // 2 for edge in stretch.native) - max(
            edge // 2 for edge in stretch.demoted
        )
    longer = int(stretch.demoted[1] > stretch.demoted[0])
    pieces, changed = [], False
    for axis, size in enumerate(module.axes_dim):
        exponents = torch.linspace(
            0, (size - 2) / size, steps=size // 2, dtype=torch.float64, device=device
        )
        frequencies = 1.0 / (module.theta**exponents)
        positions = ids[..., axis, None].to(device).float().double()
        words, image = positions.split(lengths, dim=1)[:: 1 if door.first else -1]
        if axis in door.axes:
            side = door.axes.index(axis)
            kept = stretch.kept(frequencies, side)
            start = image[:, :1] if door.text == "own" else 0.0
            factors = rotary.frequency_factors(kept, stretch.scale(side))
            image = start + (image - start) * factors
        else:
            kept = stretch.kept(frequencies, longer) if shift else torch.ones_like(frequencies)
        words = words + (1 - kept) * shift
        parts = [words * frequencies, image * frequencies]
        pieces.append(torch.cat(parts if door.first else parts[::-1], dim=1))
        changed = changed or bool((kept < 1).any())
    return torch.cat(pieces, dim=-1) if changed else None


def _rotations(angles: torch.Tensor) -> torch.Tensor:
    """[...] -> rotation matrices [..., 2, 2]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))


def _axial(original: Table, module: torch.nn.Module, stretch: Stretch, door: Door) -> Table:
    """A block of bands for each axis of the ids: [B, L, axes] -> [B, 1, L, bands, 2, 2]."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        angles = _angles(ids, module, stretch, door)
        if angles is None:
            return original(ids)
        return _rotations(angles).unsqueeze(door.head).to(ids.device, torch.float32)

    return forward


def _halves(original: Table, module: torch.nn.Module, stretch: Stretch, door: Door) -> Table:
    """Ernie's table: matrix j has its first row from band j // 2 and its second from that band of
    the upper half: [B, L, axes] -> [B, L, 1, bands, 2, 2]."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        angles = _angles(ids, module, stretch, door)
        if angles is None:
            return original(ids)
        first, second = (half.repeat_interleave(2, dim=-1) for half in angles.chunk(2, dim=-1))
        rows = [first.cos(), -first.sin(), second.sin(), second.cos()]
        table = torch.stack(rows, dim=-1).unflatten(-1, (2, 2))
        return table.unsqueeze(door.head).to(ids.device, torch.float32)

    return forward


def _video(original: Table, module: torch.nn.Module, stretch: Stretch, door: Door) -> Table:
    """Cosmos' table of bands of t, y, x: tokens [B, T, H, W, C] -> [T H W, bands, 2, 2]."""

    def forward(tokens: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        table = original(tokens, *args, **kwargs)
        _, frames, height, width, _ = tokens.shape
        blocks = table.view(frames, height, width, *table.shape[1:])
        exponents = module.dim_spatial_range.to(table.device)
        first = table.shape[1] - 2 * len(exponents)
        for axis, ntk in enumerate((module.h_ntk_factor, module.w_ntk_factor)):
            frequencies = 1.0 / ((10000.0 * ntk) ** exponents)
            kept = stretch.kept(frequencies, axis)
            factors = rotary.frequency_factors(kept, stretch.scale(axis)).float()
            places = torch.arange((height, width)[axis], device=table.device).float()
            rotations = _rotations(torch.outer(places, frequencies * factors))
            shape = (height, 1) if axis == 0 else (1, width)
            start = first + axis * len(exponents)
            blocks[..., start : start + len(exponents), :, :] = rotations.unflatten(0, shape)
        return table

    return forward


# By the class of ComfyUI's model (comfy/model_base.py).
DOORS = {
    "Flux": Door("pe_embedder", _axial, text="own"),
    "Flux2": Door("pe_embedder", _axial, text="own"),
    "LongCatImage": Door("pe_embedder", _axial, text="own"),
    "Chroma": Door("pe_embedder", _axial),
    "ChromaRadiance": Door("pe_embedder", _axial),
    "HunyuanVideo": Door("pe_embedder", _axial),
    "HunyuanImage21": Door("pe_embedder", _axial, axes=(0, 1)),
    "HiDream": Door("pe_embedder", _axial, head=2),
    "Krea2": Door("pe_embedder", _axial),
    "QwenImage": Door("pe_embedder", _axial, text="beside"),
    "Lens": Door("pos_embed", _axial, text="beside", first=False),
    "MageFlow": Door("pe_embedder", _axial),
    "Omnigen2": Door("rope_embedder.rope_embedder", _axial, text="own"),
    "Lumina2": Door("rope_embedder", _axial),
    "WAN21": Door("rope_embedder", _axial),
    "WAN22": Door("rope_embedder", _axial),
    "Kandinsky5": Door("rope_embedder_3d", _axial),
    "Kandinsky5Image": Door("rope_embedder_3d", _axial),
    "ErnieImage": Door("pos_embed", _halves, head=2),
    "Anima": Door("pos_embedder", _video),
    "CosmosPredict2": Door("pos_embedder", _video),
}
INLINE = "its rotary table is not made by a module of its own, and this version has no way to it"
NO_DOORS = {
    "Ideogram4": INLINE,
    "JoyImage": INLINE,
    "SD3": "its positions are a sine table cut from a fixed grid, not rotary",
    "AuraFlow": "its positions are a learned table, not rotary",
    "PixelDiTT2I": "its rotary positions span one range on every grid, so they are aligned already",
}


def reason(model: comfy.model_base.BaseModel) -> str | None:
    """Why the alignment cannot be offered for a model, or None when it can."""
    kind = type(model).__name__
    if kind not in DOORS:
        return NO_DOORS.get(kind, "where it makes its rotary table is not known")
    # Its 4096 wide models change their scale where a grid grows beyond a size.
    if kind == "Kandinsky5" and model.diffusion_model.model_dim == 4096:
        return "its rotary scale depends on the grid"
    return None


def door(model: comfy.model_base.BaseModel) -> str:
    """How alignment reaches a model, in words: the embedder's path, or "none" with the reason."""
    why = reason(model)
    return DOORS[type(model).__name__].embedder if why is None else f"none: {why}"


def check(model: comfy.model_patcher.ModelPatcher, conditionings: Sequence[list]) -> None:
    """Raise ValueError when forwards of a MODEL with these conditionings cannot be aligned."""
    why = reason(model.model)
    if why:
        raise ValueError(
            f"rotary alignment cannot be offered for a {type(model.model).__name__}: {why}. "
            "Set rotary to none"
        )
    if any(entry[1].get("reference_latents") for given in conditionings for entry in given):
        _refuse_references()


def check_unaligned(model: comfy.model_patcher.ModelPatcher) -> None:
    """Raise ValueError for a MODEL that a node has aligned, which a gradient would not see."""
    if model.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
        raise ValueError(
            "MODEL comes from Align Rotary to Native Grid, which is for sampling: connect the "
            "model before it, and set rotary in Demote Latents or in the gate"
        )


def _refuse_references() -> None:
    raise ValueError(
        "rotary alignment cannot be offered beside reference images, which have grids of their "
        "own: remove them from CONDITIONING, or set rotary to none"
    )


@contextmanager
def aligned(
    model: comfy.model_base.BaseModel,
    alignment: rotary.Alignment,
    shape: torch.Size,
    sigma: float,
) -> Iterator[None]:
    """Inside, the model's forwards on a latent of this shape [B, C, ..., h, w] are aligned.

    The same grid, or a sigma at which every band keeps its frequency, leaves the model's own table.
    Raises ValueError when the native grid is smaller than the latent's.
    """
    stretch = _stretch(model, alignment, shape, sigma)
    if stretch.native == stretch.demoted:
        yield
        return
    entrance = DOORS[type(model).__name__]
    module = operator.attrgetter(entrance.embedder)(model.diffusion_model)
    before = vars(module).get("forward")
    module.forward = entrance.table(module.forward, module, stretch, entrance)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _stretch(
    model: comfy.model_base.BaseModel,
    alignment: rotary.Alignment,
    shape: torch.Size,
    sigma: float,
) -> Stretch:
    patch = families.family_of(model).patch
    native, demoted = (
        (-(-cells[0] // patch), -(-cells[1] // patch)) for cells in (alignment.native, shape[-2:])
    )
    if native[0] < demoted[0] or native[1] < demoted[1]:
        raise ValueError(
            f"the native grid {native[0]}x{native[1]} is smaller than the latent's "
            f"{demoted[0]}x{demoted[1]} tokens (rows x columns): give a native size at least as "
            "large on both axes"
        )
    scaled = getattr(model.diffusion_model, "rope_scale_factor", (1.0, 1.0, 1.0))
    frames = shape[2] if len(shape) == 5 else 1
    spacing = 1 / scaled[1], 1 / scaled[2]
    return Stretch(alignment.mode, sigma, native, demoted, frames, spacing)


def align_model(
    model: comfy.model_patcher.ModelPatcher, mode: str, native_pixels: grid.Grid
) -> comfy.model_patcher.ModelPatcher:
    """A clone of a MODEL whose sampling is aligned to a native size in pixels (height, width).

    Raises ValueError for a model that cannot be aligned; when it is sampled, also for reference
    images in the conditioning and for latents larger than the native size.
    """
    check(model, [])
    factor = model.model.latent_format.spacial_downscale_ratio
    alignment = rotary.Alignment(mode, (native_pixels[0] // factor, native_pixels[1] // factor))

    def wrapper(executor, x: torch.Tensor, t: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if kwargs.get("ref_latents") is not None:
            _refuse_references()
        with aligned(executor.class_obj, alignment, x.shape, _sigma(executor.class_obj, t)):
            return executor(x, t, *args, **kwargs)

    clone = model.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    return clone


def _sigma(model: comfy.model_base.BaseModel, level: torch.Tensor) -> float:
    """Noise level in [0, 1] of a model's own sigma [B], which is one for the whole batch."""
    value = float(level.flatten()[0])
    if isinstance(model.model_sampling, comfy.model_sampling.COSMOS_RFLOW):
        return value / (1 + value)
    return value
