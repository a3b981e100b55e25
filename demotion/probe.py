"""The probe: images x bins x arms x draws -> the cells of a measurement.

All arms of draw d are taken before draw d + 1, so memory is the gradient sums and the vectors of
one draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from . import arms, draws, measure, rotary, sketch

# Called as `predict` does: (z, sigmas, contexts), and rotary=Alignment where there is one.
Velocity = Callable[..., torch.Tensor]
CHUNK = 1 << 20
# Raised whenever the same settings would give other numbers, so that old cells are not continued.
PROTOCOL = 1


@dataclass(frozen=True)
class Subject:
    """One picture as the probe sees it.

    latents      arm name -> model latent x [1, C, ..., H, W] on the model's device, "src" first
    weights      arm name -> loss weights [H, W], or None
    context      whatever `velocity` needs to know of the picture (its conditioning)
    native_tier  pixels, which shifted arms take their edge ratio from
    """

    image: str
    latents: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor | None]
    context: Any = None
    native_tier: int | None = None

    def sigma(self, arm: arms.Arm, sigma: float) -> float:
        """Sigma of an arm in a draw in which src has this one."""
        if arm.kind == "shifted":
            return draws.shifted_sigma(sigma, self.native_tier / arm.tier)
        return sigma


def arm_noise(
    seed: int,
    image: str,
    sigma_bin: draws.Bin,
    draw: int,
    arm: str,
    native: torch.Size,
    grid: tuple[int, int],
    shared: bool,
) -> torch.Tensor:
    """Noise of an arm in a draw, on the CPU.

    Shared: arms on the native grid have one noise, except null; a demoted arm has its low-frequency
    corner. Not shared: every arm but src has a stream of its own. An aligned or shifted arm always
    has the noise of its plain one.
    """
    plain = str(arms.Arm.parse(arm).plain)
    if plain == "null" or (not shared and plain != "src"):
        return _noise(seed, image, sigma_bin, draw, plain, (*native[:-2], *grid))
    if tuple(grid) == tuple(native[-2:]):
        return _noise(seed, image, sigma_bin, draw, "shared", tuple(native))
    return _carried(seed, image, sigma_bin, draw, plain, tuple(native), tuple(grid))


# What the arms of a draw share is drawn and carried once, in micro-batches of up to half as many.
KEPT = 16
_noise = lru_cache(maxsize=KEPT)(draws.draw_noise)


@lru_cache(maxsize=KEPT)
def _carried(
    seed: int,
    image: str,
    sigma_bin: draws.Bin,
    draw: int,
    arm: str,
    native: tuple[int, ...],
    grid: tuple[int, int],
) -> torch.Tensor:
    noise = _noise(seed, image, sigma_bin, draw, "shared", native)
    return draws.carry_noise(noise, grid, draws.stream("carry", seed, image, *sigma_bin, draw, arm))


def measure_cell(
    subject: Subject,
    sigma_bin: draws.Bin,
    count: int,
    seed: int,
    shared: bool,
    velocity: Velocity,
    parts: Mapping[str, Sequence[torch.nn.Parameter]],
    tick: Callable[[], None],
    sketcher: sketch.CountSketch | None = None,
    micro_batch: int = 1,
) -> measure.Cell:
    """Gradients of all arms of one picture in one bin, reduced to their inner products, and with a
    sketcher to sketches as well.

    count is the number of draws. So many of them (micro_batch) share a forward, and their mean is
    what the cell counts as a draw: D = count / micro_batch is at least 2, or 1 with a sketcher.
    parts groups the trainable parameters, "A" and "B" of a LoRA, say. tick is called after every
    gradient and may raise to stop.
    """
    check_count(count, micro_batch, sketcher is not None)
    count //= micro_batch
    blocks = sketch.blocks_of(count) if sketcher else 0
    names = list(subject.latents)
    parameters = [parameter for part in parts.values() for parameter in part]
    sizes = [sum(parameter.numel() for parameter in part) for part in parts.values()]
    device = parameters[0].device
    sums = torch.zeros(2, len(names), sum(sizes), device=device)
    vectors = torch.empty(len(names), sum(sizes), device=device)
    products = np.zeros((len(sizes), 2, len(names), len(names)))
    block_products = np.zeros((blocks, len(names), len(names)))
    sketches = sketcher and sketcher.empty(blocks, len(names))
    losses = np.zeros(len(names))
    for draw in range(count):
        for index, arm in enumerate(names):
            losses[index] += (
                draw_gradient(
                    subject,
                    arm,
                    sigma_bin,
                    range(draw * micro_batch, (draw + 1) * micro_batch),
                    seed,
                    shared,
                    velocity,
                    parameters,
                    vectors[index],
                )
                / count
            )
            tick()
        sums[draw % 2] += vectors
        drawn = np.stack([inner_products(columns) for columns in vectors.split(sizes, dim=1)])
        products[:, draw % 2] += drawn
        if sketcher:
            block_products[draw % blocks] += drawn.sum(axis=0)
            for total, vector in zip(sketches[draw % blocks], vectors):
                sketcher.add(total, vector)
    gram = np.stack(
        [
            inner_products(columns.flatten(0, 1)).reshape(2, len(names), 2, len(names))
            for columns in sums.split(sizes, dim=2)
        ]
    )
    return measure.Cell(
        image=subject.image,
        bin=sigma_bin,
        arms=tuple(names),
        gram=gram,
        products=products,
        counts=((count + 1) // 2, count // 2),
        grids=tuple(tuple(latent.shape[-2:]) for latent in subject.latents.values()),
        losses=tuple(losses.tolist()),
        sketches=sketcher and sketcher.fold(sketches),
        block_products=block_products if sketcher else None,
        block_counts=(count // blocks,) * blocks if sketcher else None,
    )


def check_count(count: int, micro_batch: int, sketched: bool) -> None:
    """Raise ValueError for a number of draws that the cells cannot be measured with."""
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}: take 1 or more")
    least = micro_batch * (1 if sketched else 2)
    if count < least:
        together = f", and micro_batch {micro_batch} makes one of {micro_batch}" * (micro_batch > 1)
        raise ValueError(
            f"draws is {count}{together}: a debiased cosine needs at least 2 draws; one draw a "
            f"picture is for the population of pictures, which needs a sketch: take {least} or more"
        )
    blocks = sketch.BLOCKS if sketched and count > sketch.BLOCKS * micro_batch else 1
    unit = blocks * micro_batch
    if count % unit:
        lower = count - count % unit
        takes = " or ".join(str(n) for n in (lower, lower + unit) if n >= least)
        raise ValueError(
            f"draws is {count}: with micro_batch {micro_batch}{' and a sketch' * (blocks > 1)} "
            f"they are a multiple of {unit}, so take {takes}"
        )


def draw_gradient(
    subject: Subject,
    arm: str,
    sigma_bin: draws.Bin,
    batch: Sequence[int],
    seed: int,
    shared: bool,
    velocity: Velocity,
    parameters: Sequence[torch.nn.Parameter],
    out: torch.Tensor,
) -> float:
    """Gradient of an arm's mean loss over a micro-batch, the draws of these numbers, flattened into
    out [P]; returns the loss.

    Raises ValueError when either is not finite.
    """
    latent, native, parsed = subject.latents[arm], subject.latents["src"], arms.Arm.parse(arm)
    grid = tuple(latent.shape[-2:])
    sigmas = [
        subject.sigma(parsed, draws.draw_sigma(seed, subject.image, sigma_bin, draw))
        for draw in batch
    ]
    noises = [
        arm_noise(seed, subject.image, sigma_bin, draw, arm, native.shape, grid, shared)
        for draw in batch
    ]
    noise = torch.cat(noises).to(latent.device)
    z = torch.cat(
        [draws.noised(latent, one[None], sigma) for one, sigma in zip(noise, sigmas, strict=True)]
    )
    contexts = [subject.context] * len(batch)
    predicted = predict(velocity, z, sigmas, contexts, parsed.rotary, native)
    loss = draws.velocity_loss(predicted, latent, noise, subject.weights[arm])
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    torch.cat([gradient.reshape(-1).float() for gradient in gradients], out=out)
    if not (torch.isfinite(loss) and torch.isfinite(out.sum())):
        raise ValueError(
            f"the loss or the gradient of arm {arm} is not finite at sigma "
            f"{', '.join(f'{sigma:.3f}' for sigma in sigmas)}: use a compute precision with more "
            "range (bf16 or fp32)"
        )
    return loss.item()


def predict(
    velocity: Velocity,
    z: torch.Tensor,
    sigmas: Sequence[float],
    contexts: Sequence[Any],
    mode: str | None,
    native: torch.Tensor,
) -> torch.Tensor:
    """Velocity of z [B, C, ..., H, W], each sample at its sigma and in its context, under the
    rotary alignment of this mode, if any, to the grid of a native latent."""
    if mode is None:
        return velocity(z, sigmas, contexts)
    alignment = rotary.Alignment(mode, tuple(native.shape[-2:]))
    return velocity(z, sigmas, contexts, rotary=alignment)


def inner_products(rows: torch.Tensor) -> np.ndarray:
    """[N, P] -> [N, N] inner products in float64, a chunk of columns at a time."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for chunk in rows.split(CHUNK, dim=1):
        chunk = chunk.double()
        total += chunk @ chunk.T
    return total.cpu().numpy()
