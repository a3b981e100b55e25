"""Toy models of every family that the pack lists, and how a test talks to them.

Families whose size ComfyUI reads from the file come from toy checkpoints through its own loader;
the others are built from a configuration of its model class, with a factory that its patcher calls
for a private copy, as it calls a loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import toys as checkpoints


@dataclass(frozen=True)
class Toy:
    """A toy of one family.

    model   folder -> MODEL, as a loader node would hand it over
    latent  shape of a small model latent [C, (1,) h, w], not square
    """

    model: Callable[[Path], Any]
    latent: tuple[int, ...]

    def conditioning(self, model: Any, seed: int = 0, tokens: int = 7) -> list:
        """Random conditioning of the family's own shapes."""
        from pack.host import text

        generator = torch.Generator().manual_seed(seed)
        ((token, beside),) = text.zero_conditioning(model.model)
        return [
            [
                torch.randn(1, tokens, token.shape[-1], generator=generator),
                {
                    name: torch.randn(value.shape, generator=generator)
                    for name, value in beside.items()
                },
            ]
        ]


def from_checkpoint(build: Callable[[Path], Path]) -> Callable[[Path], Any]:
    """A MODEL that ComfyUI detects in a file."""

    def load(folder: Path) -> Any:
        import comfy.sd

        path = build(folder)
        with torch.inference_mode():
            return comfy.sd.load_diffusion_model(str(path))

    return load


def from_config(name: str, config: dict[str, Any]) -> Callable[[Path], Any]:
    """A MODEL of ComfyUI's supported_models.<name> with a network of this configuration."""

    def load(folder: Path) -> Any:
        with torch.inference_mode():
            return _configured(name, config)

    return load


def _configured(name: str, config: dict[str, Any], disable_dynamic: bool = False) -> Any:
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    settings = getattr(comfy.supported_models, name)({"dtype": torch.float32})
    # After the settings' own defaults, some of which are sizes.
    settings.unet_config |= config
    settings.set_inference_dtype(torch.float32, None)
    model = settings.get_model({}, "")
    model.diffusion_model.load_state_dict(
        checkpoints.filled(model.diffusion_model.state_dict(), checkpoints.STD)
    )
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
    patcher.cached_patcher_init = (_configured, (name, config))
    return patcher


TOYS = {
    "Flux": Toy(from_checkpoint(checkpoints.flux), (16, 16, 12)),
    "WAN21": Toy(from_checkpoint(checkpoints.wan), (16, 1, 16, 12)),
    "Anima": Toy(from_checkpoint(checkpoints.anima), (16, 1, 8, 12)),
}

# Last, since these files take their helpers from above.
import joint_toys  # noqa: E402
import other_toys  # noqa: E402

TOYS |= joint_toys.TOYS | other_toys.TOYS
