"""One context manager inside which gradients of a ComfyUI model are right, and after which nothing
is changed.

The model is a private copy loaded from its file, so the caller's is never touched. Inside,
ComfyUI's inference mode is off, its training switch on, its fused rotary kernels (which have no
backward) replaced by their eager twins, and augmented additions of activations done out of place,
so that what autograd saved is not overwritten. Weights that do not fit on the device are streamed,
each into memory of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import comfy.model_patcher
import comfy.quant_ops
import comfyui_version
import torch
from comfy_kitchen.backends.eager import rope
from torch.utils.checkpoint import checkpoint

from ..demotion import adapter, arms
from . import families, nested
from .fingerprint import fingerprint, patches_of
from .velocity import Velocity


class OutOfPlaceAdditions:
    """Rebinds `a += b` to a new tensor while gradients are taken.

    Flux-like blocks write into activations that autograd has saved. Python calls Tensor.__iadd__
    for the statement and binds the name to what is returned, so returning a sum leaves the saved
    tensor as it was. Where a model ignores the result of add_ this would change its forward, which
    `Session.check_additions` looks for.
    """

    enabled = True

    def methods(self) -> dict[str, Callable[..., torch.Tensor]]:
        """What stands in for these methods of torch.Tensor. On the class, where other operations
        pay nothing for it, and where the threads of a backward see it too."""
        in_place, scaled_in_place = torch.Tensor.add_, torch.Tensor.addcmul_

        def add(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._converts(args):
                return torch.add(*args, **kwargs).to(args[0].dtype)
            return in_place(*args, **kwargs)

        def addcmul(*args: Any, **kwargs: Any) -> torch.Tensor:
            # Saves its own factor, then writes over it.
            if args[0] is args[1] and self._converts(args):
                return torch.addcmul(*args, **kwargs)
            return scaled_in_place(*args, **kwargs)

        return {"__iadd__": add, "add_": add, "addcmul_": addcmul}

    def _converts(self, args: tuple) -> bool:
        return (
            self.enabled
            and torch.is_grad_enabled()
            and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in args)
        )


# How precisely the model computes; "model" is as ComfyUI would for inference.
COMPUTE = {
    "model": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# fp16 has gradients down to 6e-8 only, and those of a mean over many latent elements are smaller.
FP16_SCALE = 2.0**12


@dataclass
class Session:
    """A private model, ready for gradients."""

    patcher: comfy.model_patcher.ModelPatcher
    family: families.Family
    velocity: Velocity
    fingerprint: str
    additions: OutOfPlaceAdditions
    checkpointing: bool

    @property
    def network(self) -> torch.nn.Module:
        return self.patcher.model.diffusion_model

    @property
    def environment(self) -> dict[str, Any]:
        """Device, precision and kernels, of which finite-draw cosines depend."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else self.device.type,
            "dtype": str(self.patcher.model.get_dtype_inference()).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "comfyui": comfyui_version.__version__,
            "attention": comfy.ldm.modules.attention.optimized_attention.__name__,
            "checkpointing": self.checkpointing,
        }

    @property
    def device(self) -> torch.device:
        return self.patcher.load_device

    def adapt(self, weights: adapter.Weights) -> adapter.Adapter:
        """Inject an adapter. Under fp16 its gradients are scaled back after the velocity's were
        scaled up."""
        layers = adapter.Adapter(self.network, weights, self.device)
        if self.velocity.gradient_scale != 1:
            for parameter in layers.parameters:
                parameter.register_hook(lambda gradient: gradient / self.velocity.gradient_scale)
        return layers

    def latent_in(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw VAE latent [C, ..., h, w] -> model latent x [1, C, ..., h, w] on the model's device,
        float32."""
        latent = raw[None].to(self.device, torch.float32)
        return self.patcher.model.process_latent_in(latent).clone()

    def load_arm(
        self, training_set: arms.TrainingSet, item: arms.Item, arm: arms.Arm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Model latent of an item's arm, and its loss weights [h, w] or None, on the device."""
        latent = self.latent_in(training_set.latent(item, arms.SRC if arm == arms.NULL else arm))
        weights = item.loss_weights(tuple(latent.shape[-2:]))
        return latent, weights if weights is None else weights.to(latent.device)

    def check_additions(self, latent: torch.Tensor, conditioning: list) -> None:
        """Compare one forward with the additions left in place: the same to the last bit, or they
        stay in place.

        Left in place, autograd itself raises for a write that would spoil a gradient.
        """
        with torch.no_grad():
            plain = self.velocity(latent, [0.5], [conditioning])
        # A latent that asks for a gradient puts every activation in the graph, as an adapter would.
        asking = latent.clone().requires_grad_()
        converted = self.velocity(asking, [0.5], [conditioning]).detach()
        if not torch.equal(plain, converted):
            self.additions.enabled = False


def check_loadable(model: comfy.model_patcher.ModelPatcher) -> None:
    """Raise ValueError when a MODEL cannot be loaded a second time, or not as it is."""
    if model.cached_patcher_init is None:
        raise ValueError(
            "MODEL comes from a loader that ComfyUI cannot call again for a private copy: load it "
            "with Load Diffusion Model or Load Checkpoint"
        )
    if model.injections:
        raise ValueError(
            f"MODEL carries {', '.join(model.injections)}, which sits on the caller's own layers "
            "and would be missing from a private copy: load the LoRA without bypass"
        )


@contextmanager
def open_session(
    model: comfy.model_patcher.ModelPatcher,
    compute: str = "model",
    checkpointing: bool = False,
    memory: float = 0,
) -> Iterator[Session]:
    """Open a session on a private copy of a MODEL.

    compute        precision of the forward and backward, a key of COMPUTE
    checkpointing  whether a block keeps only its input and computes the rest again for the backward
    memory         bytes on the device to leave for activations and adapter; what the model then
                   lacks is streamed

    Raises ValueError for a model that is not of a supported family or cannot be copied, and for one
    that must be streamed without checkpointing.
    """
    family = families.family_of(model.model)
    check_loadable(model)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_switched(comfy.model_management, in_training=True, NUM_STREAMS=0))
        patcher = model.clone(disable_dynamic=True, force_deepcopy=True)
        # Before patches are merged: what that gives depends on the device, and streamed weights
        # are not merged at all.
        name = fingerprint(patcher.model.diffusion_model, patches_of(model))
        patcher.model.requires_grad_(False)
        if COMPUTE[compute] is not None:
            patcher.set_model_compute_dtype(COMPUTE[compute])
        stack.callback(_unload, patcher)
        comfy.model_management.load_models_gpu([patcher], memory_required=memory)
        if patcher.model.model_lowvram and not checkpointing:
            raise ValueError(
                f"MODEL does not fit on the device beside {memory / 2**30:.1f} GB of activations, "
                "and streamed weights would all be kept for the backward: turn checkpointing on"
            )
        patcher.pre_run()
        stack.enter_context(_eager_rope())
        additions = OutOfPlaceAdditions()
        stack.enter_context(_switched(torch.Tensor, **additions.methods()))
        live = Session(
            patcher,
            family,
            Velocity(patcher, FP16_SCALE if compute == "fp16" else 1.0),
            name,
            additions,
            checkpointing,
        )
        for name, module in live.network.named_modules():
            if family.overwritten and re.fullmatch(family.overwritten, name):
                module.register_forward_pre_hook(_copy_inputs)
        if checkpointing:
            for block in families.blocks(live.network).values():
                block.forward = _checkpointed(block.forward)
        yield live


def _copy_inputs(module: torch.nn.Module, inputs: tuple) -> tuple:
    return nested.mapped(inputs, torch.clone)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward that keeps its inputs only, and computes the rest again in the backward.

    The second time comes after the network has gone on to change what it passed: so dictionaries
    are kept as they were, the block is given copies it may write into, and an input that was
    written into since is an error.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        kept = nested.mapped((args, kwargs), lambda tensor: tensors.append(tensor) or tensor)
        versions = [tensor._version for tensor in tensors]

        def run() -> Any:
            if versions != [tensor._version for tensor in tensors]:
                raise RuntimeError(
                    "an input of a checkpointed block was overwritten before the backward: turn "
                    "checkpointing off for this model"
                )
            own_args, own_kwargs = nested.mapped(kept, torch.clone)
            return forward(*own_args, **own_kwargs)

        return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    return call


def _unload(patcher: comfy.model_patcher.ModelPatcher) -> None:
    patcher.cleanup()
    loaded = comfy.model_management.current_loaded_models
    loaded[:] = [entry for entry in loaded if entry.model is not patcher]


@contextmanager
def _switched(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or class set to values, and set back; one that was inherited is
    inherited again."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _eager_rope() -> AbstractContextManager[None]:
    """ComfyUI's rotary kernels as their eager twins, which have a backward."""
    kernels = comfy.quant_ops.ck
    twins = {
        name: twin
        for name, twin in vars(rope).items()
        if "rope" in name
        and not name.startswith("_")
        and callable(twin)
        and hasattr(kernels, name)
    }
    return _switched(kernels, **twins)


