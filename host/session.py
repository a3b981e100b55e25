"""One context manager inside which gradients of a ComfyUI model are right, and after which nothing
is changed.

The model is a private copy loaded from its file, so the caller's is never touched. Inside,
ComfyUI's inference mode is off, its training switch on, its fused rotary kernels (which have no
backward) replaced by their eager twins, and augmented additions of activations done out of place,
so that what autograd saved is not overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import comfy.model_patcher
import comfy.quant_ops
import comfyui_version
import torch
from comfy_kitchen.backends.eager import rope
from torch.overrides import TorchFunctionMode

from ..demotion import arms
from . import families
from .fingerprint import fingerprint
from .velocity import Velocity


class OutOfPlaceAdditions(TorchFunctionMode):
    """Rebinds `a += b` to a new tensor while gradients are taken.

    Flux-like blocks write into activations that autograd has saved. Python calls Tensor.add_ for
    the statement and binds the name to what is returned, so returning a sum leaves the saved tensor
    as it was. Where a model ignores the result of add_ this would change its forward, which
    `Session.check_additions` looks for.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.add_ and torch.is_grad_enabled() and _in_graph(args):
            return torch.add(*args, **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _in_graph(tensors: tuple) -> bool:
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


@dataclass
class Session:
    """A private model, ready for gradients."""

    patcher: comfy.model_patcher.ModelPatcher
    family: families.Family
    velocity: Velocity
    fingerprint: str
    modes: ExitStack

    @property
    def network(self) -> torch.nn.Module:
        return self.patcher.model.diffusion_model

    @property
    def environment(self) -> dict[str, Any]:
        """Device, precision and kernels, of which finite-draw cosines depend."""
        device = self.patcher.load_device
        cuda = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if cuda else device.type,
            "dtype": str(self.patcher.model.get_dtype_inference()).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "comfyui": comfyui_version.__version__,
            "attention": comfy.ldm.modules.attention.optimized_attention.__name__,
        }

    def latent_in(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw VAE latent [C, ..., h, w] -> model latent x [1, C, ..., h, w] on the model's device,
        float32."""
        latent = raw[None].to(self.patcher.load_device, torch.float32)
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
            plain = self.velocity(latent, 0.5, conditioning)
        # A latent that asks for a gradient puts every activation in the graph, as an adapter would.
        converted = self.velocity(latent.clone().requires_grad_(), 0.5, conditioning).detach()
        if not torch.equal(plain, converted):
            self.modes.close()


def check_loadable(model: comfy.model_patcher.ModelPatcher) -> None:
    """Raise ValueError when a MODEL cannot be loaded a second time."""
    if model.cached_patcher_init is None:
        raise ValueError(
            "MODEL comes from a loader that ComfyUI cannot call again for a private copy: load it "
            "with Load Diffusion Model or Load Checkpoint"
        )


@contextmanager
def open_session(model: comfy.model_patcher.ModelPatcher) -> Iterator[Session]:
    """Open a session on a private copy of a MODEL.

    Raises ValueError for a model that is not of a supported family or cannot be copied.
    """
    family = families.family_of(model.model)
    check_loadable(model)
    with torch.inference_mode(False), torch.enable_grad():
        patcher = model.clone(disable_dynamic=True, force_deepcopy=True)
        patcher.model.requires_grad_(False)
        try:
            comfy.model_management.load_models_gpu(
                [patcher], memory_required=1e20, force_full_load=True
            )
            patcher.pre_run()
            with _training_switch(), _eager_rope(), ExitStack() as modes:
                modes.enter_context(OutOfPlaceAdditions())
                yield Session(
                    patcher,
                    family,
                    Velocity(patcher),
                    fingerprint(patcher.model.diffusion_model),
                    modes,
                )
        finally:
            patcher.cleanup()
            loaded = comfy.model_management.current_loaded_models
            loaded[:] = [entry for entry in loaded if entry.model is not patcher]


@contextmanager
def _training_switch() -> Iterator[None]:
    before = comfy.model_management.in_training
    comfy.model_management.in_training = True
    try:
        yield
    finally:
        comfy.model_management.in_training = before


@contextmanager
def _eager_rope() -> Iterator[None]:
    kernels = comfy.quant_ops.ck
    names = [
        name
        for name in vars(rope)
        if "rope" in name
        and not name.startswith("_")
        and callable(vars(rope)[name])
        and hasattr(kernels, name)
    ]
    before = {name: getattr(kernels, name) for name in names}
    try:
        for name in names:
            setattr(kernels, name, getattr(rope, name))
        yield
    finally:
        for name, kernel in before.items():
            setattr(kernels, name, kernel)
