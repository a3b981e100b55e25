"""(z, sigmas, conditionings) -> predicted velocity, through ComfyUI's own sampling path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import comfy.conds
import comfy.model_patcher
import comfy.model_sampling
import comfy.sampler_helpers
import comfy.samplers
import torch

from ..demotion import rotary as alignments
from . import families, text
from . import rotary as doors

# Enough for all grids of one picture, and for a small training set.
PREPARED = 16
# The alignment that is another at every sigma.
GATED = "gated_yarn"


class Velocity:
    """The velocity a flow model predicts, differentiable in the model's trainable parameters.

    Conditioning is prepared per (conditioning, latent shape), as the host's sampler prepares it
    before its first step, and the last few are kept. The samples of a forward have theirs joined
    as the host joins conditional and unconditional. The model's own sigma, its x0 prediction and
    the velocity are related by v = (z - x0)/sigma. Gradients that flow back into the model are
    multiplied by gradient_scale.
    """

    def __init__(
        self, patcher: comfy.model_patcher.ModelPatcher, gradient_scale: float = 1.0
    ) -> None:
        self.model = patcher.model
        self.family = families.family_of(patcher.model)
        self.gradient_scale = gradient_scale
        self.device = patcher.load_device
        self.options = comfy.model_patcher.create_model_options_clone(patcher.model_options)
        self.options.setdefault("transformer_options", {})
        self.rescaled = isinstance(self.model.model_sampling, comfy.model_sampling.COSMOS_RFLOW)
        self._prepared: OrderedDict[tuple[int, tuple[int, ...]], tuple[Any, list]] = OrderedDict()

    def __call__(
        self,
        z: torch.Tensor,
        sigmas: Sequence[float],
        contexts: Sequence[list],
        rotary: alignments.Alignment | None = None,
    ) -> torch.Tensor:
        """z [B, C, ..., H, W], the samples' sigmas in (0, 1] and their conditionings -> velocity of
        the same shape, float32.

        With a rotary alignment the forward is that of a demoted grid aligned to its native one.
        Raises ValueError for samples of different signatures, and for an alignment that depends on
        sigma where theirs differ.
        """
        shape = (1, *z.shape[1:])
        if len(contexts) > 1 and len({self.signature(one, shape) for one in contexts}) > 1:
            raise ValueError(
                f"{len(contexts)} samples of a {self.family.name} cannot share a forward: give "
                "each signature a forward of its own"
            )
        if rotary and rotary.mode == GATED and len(set(sigmas)) > 1:
            raise ValueError(
                f"rotary alignment {GATED} depends on sigma, and the samples of one forward have "
                "several: give one sample a forward"
            )
        level = torch.tensor(sigmas, dtype=torch.float32).to(z.device, non_blocking=True)
        state = z
        if self.rescaled:
            level = level / (1 - level)
            state = torch.stack([one / (1 - sigma) for one, sigma in zip(z, sigmas)])
        conds = _joined([self._prepare(context, shape) for context in contexts])
        # Mean-flow models look up the sigma of the next step; at this one's own they predict the
        # velocity at a point.
        self.options["transformer_options"]["sample_sigmas"] = level[:1].repeat(2)
        with doors.aligned(self.model, rotary, z.shape, sigmas[0]) if rotary else nullcontext():
            denoised = comfy.samplers.calc_cond_batch(
                self.model, [conds], state, level, self.options
            )[0]
        predicted = torch.stack(
            [(one - x0) / sigma for one, x0, sigma in zip(z, denoised, sigmas, strict=True)]
        )
        if self.gradient_scale != 1 and predicted.requires_grad:
            predicted.register_hook(lambda gradient: gradient * self.gradient_scale)
        return predicted

    def signature(self, context: list, shape: tuple[int, ...]) -> Hashable:
        """What the samples of one forward have in common, for one with this conditioning and latent
        shape [1, C, ..., H, W]: the shapes, and what of the conditioning is no tensor.

        A sample that the family takes alone has another at every call.
        """
        (entry,) = self._prepare(context, tuple(shape))
        conds = entry["model_conds"]
        if self.family.alone(self.model.diffusion_model, conds):
            return object()
        return tuple(shape), tuple((name, _common(conds[name])) for name in sorted(conds))

    def _prepare(self, conditioning: list, shape: tuple[int, ...]) -> list[dict]:
        key = id(conditioning), shape
        if key not in self._prepared:
            entries = comfy.sampler_helpers.convert_cond(text.own_copy(conditioning))
            empty = torch.zeros(shape, device=self.device)
            conds = comfy.samplers.process_conds(
                self.model,
                empty,
                {"positive": entries},
                self.device,
                latent_image=empty.clone(),
                seed=0,
                latent_shapes=[torch.Size(shape)],
            )
            # The conditioning is kept beside its id, so that the id cannot be reused by another.
            self._prepared[key] = conditioning, conds["positive"]
            if len(self._prepared) > PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]


def _joined(prepared: Sequence[list[dict]]) -> list[dict]:
    """Prepared conditionings of one entry each as one entry of a batch."""
    (first, *others) = (entry for (entry,) in prepared)
    conds = {
        name: type(cond)(cond.concat([other["model_conds"][name] for other in others]))
        for name, cond in first["model_conds"].items()
    }
    return [{**first, "model_conds": conds}]


def _common(cond: comfy.conds.CONDRegular) -> Hashable:
    """What a part of prepared conditioning has in common with those that it can be joined with,
    nothing padded or repeated."""
    if isinstance(cond, comfy.conds.CONDConstant):
        return text.conditioning_hash(cond.cond)
    if isinstance(cond, comfy.conds.CONDList):
        return tuple(tuple(tensor.shape) for tensor in cond.cond)
    return tuple(cond.cond.shape)
