"""(z, sigma, conditioning) -> predicted velocity, through ComfyUI's own sampling path."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import comfy.model_patcher
import comfy.model_sampling
import comfy.sampler_helpers
import comfy.samplers
import torch

from ..demotion import rotary as alignments
from . import rotary as doors
from . import text

# Enough for all grids of one picture, and for a small training set.
PREPARED = 16


class Velocity:
    """The velocity a flow model predicts, differentiable in the model's trainable parameters.

    Conditioning is prepared per (conditioning, latent shape), as the host's sampler prepares it
    before its first step, and the last few are kept. The model's own sigma, its x0 prediction and
    the velocity are related by v = (z - x0)/sigma. Gradients that flow back into the model are
    multiplied by gradient_scale.
    """

    def __init__(
        self, patcher: comfy.model_patcher.ModelPatcher, gradient_scale: float = 1.0
    ) -> None:
        self.model = patcher.model
        self.gradient_scale = gradient_scale
        self.device = patcher.load_device
        self.options = comfy.model_patcher.create_model_options_clone(patcher.model_options)
        self.options.setdefault("transformer_options", {})
        self.rescaled = isinstance(self.model.model_sampling, comfy.model_sampling.COSMOS_RFLOW)
        self._prepared: OrderedDict[tuple[int, torch.Size], tuple[Any, list]] = OrderedDict()

    def __call__(
        self,
        z: torch.Tensor,
        sigma: float,
        conditioning: list,
        rotary: alignments.Alignment | None = None,
    ) -> torch.Tensor:
        """z [B, C, ..., H, W] at one sigma in (0, 1] -> velocity of the same shape, float32.

        With a rotary alignment the forward is that of a demoted grid aligned to its native one.
        """
        level = torch.full((z.shape[0],), sigma, device=z.device, dtype=torch.float32)
        state = z
        if self.rescaled:
            level = level / (1 - level)
            state = z / (1 - sigma)
        conds = self._prepare(conditioning, z)
        # Mean-flow models look up the sigma of the next step; at this one's own they predict the
        # velocity at a point.
        self.options["transformer_options"]["sample_sigmas"] = level[:1].repeat(2)
        with doors.aligned(self.model, rotary, z.shape, sigma) if rotary else nullcontext():
            denoised = comfy.samplers.calc_cond_batch(
                self.model, [conds], state, level, self.options
            )[0]
        predicted = (z - denoised) / sigma
        if self.gradient_scale != 1 and predicted.requires_grad:
            predicted.register_hook(lambda gradient: gradient * self.gradient_scale)
        return predicted

    def _prepare(self, conditioning: list, z: torch.Tensor) -> list:
        key = id(conditioning), z.shape
        if key not in self._prepared:
            entries = comfy.sampler_helpers.convert_cond(text.own_copy(conditioning))
            conds = comfy.samplers.process_conds(
                self.model,
                torch.zeros_like(z),
                {"positive": entries},
                self.device,
                latent_image=torch.zeros_like(z),
                seed=0,
                latent_shapes=[z.shape],
            )
            # The conditioning is kept beside its id, so that the id cannot be reused by another.
            self._prepared[key] = conditioning, conds["positive"]
            if len(self._prepared) > PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]
