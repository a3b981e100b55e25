"""What the pack knows of a model family: patch, and which Linears take a LoRA by default."""

from __future__ import annotations

import math
from dataclasses import dataclass

import comfy.model_base
import comfy.model_sampling
import torch

from ..demotion import draws

FLOW = (comfy.model_sampling.CONST, comfy.model_sampling.COSMOS_RFLOW)


@dataclass(frozen=True)
class Family:
    """A family of flow transformers.

    patch    latent cells on a token's edge
    targets  pattern of the Linears (names inside the diffusion model) that take a LoRA: the image
             stream's attention and MLP
    """

    name: str
    patch: int
    targets: str


FAMILIES = {
    "Flux": Family(
        "Flux", 2, r"^double_blocks\.\d+\.img_(attn|mlp)\.|^single_blocks\.\d+\.linear[12]$"
    ),
    "Anima": Family("Anima", 2, r"^blocks\.\d+\.(self_attn|cross_attn|mlp)\."),
    "WAN21": Family("Wan 2.1", 2, r"^blocks\.\d+\.(self_attn|cross_attn|ffn)\."),
}


def family_of(model: comfy.model_base.BaseModel) -> Family:
    """Family of a loaded model.

    Raises ValueError, naming its kind, for a model that is not flow matching or whose family is not
    supported yet.
    """
    kind = type(model).__name__
    sampling = model.model_sampling
    image_to_image = isinstance(sampling, comfy.model_sampling.IMG_TO_IMG_FLOW)
    if (
        not isinstance(sampling, FLOW)
        or image_to_image
        or getattr(sampling, "noise_scale", 1.0) != 1.0
    ):
        raise ValueError(
            f"MODEL is a {kind} of type {model.model_type.name}, which is not plain flow matching: "
            f"use a flow-matching model ({', '.join(f.name for f in FAMILIES.values())})"
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"MODEL is a {kind}, a family this version does not know: "
            f"use one of {', '.join(f.name for f in FAMILIES.values())}"
        )
    return FAMILIES[kind]


def linears(diffusion_model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """All Linears of a diffusion model by name."""
    return {
        name: module
        for name, module in diffusion_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def sigma_range(model: comfy.model_base.BaseModel) -> tuple[float, float]:
    """Range of sigma in [0, 1] that a model is made for."""
    sampling = model.model_sampling
    # Tables are float32: rounded, so that 1 is 1.
    low, high = round(float(sampling.sigma_min), 5), round(float(sampling.sigma_max), 5)
    if isinstance(sampling, comfy.model_sampling.COSMOS_RFLOW):
        return low / (1 + low), high / (1 + high)
    return 0.0, high


def own_density(model: comfy.model_base.BaseModel) -> draws.SigmaDensity:
    """The sigma density of a model's own schedule: uniform steps through its shift."""
    sampling = model.model_sampling
    shift = getattr(sampling, "shift", 1.0)
    # Flux-like schedules give the logarithm of the shift.
    if isinstance(sampling, comfy.model_sampling.ModelSamplingFlux):
        shift = math.exp(shift)
    return draws.SigmaDensity("shifted", shift=float(shift))
