"""What the benches on toy models share: ComfyUI and the pack in this process, and ComfyUI's own
trainer on a toy."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "demo" / "models" / "diffusion_models" / "demotion_nano_flux.safetensors"


def start(comfyui: str) -> None:
    """Import ComfyUI from a folder and the pack's rooms, on the CPU, without the host's log."""
    os.environ["COMFYUI_PATH"] = comfyui
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "families"), comfyui]
    import conftest  # noqa: F401 - names the pack's rooms

    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd  # noqa: F401
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def parse(description: str) -> argparse.Namespace:
    """The command line of a bench on toys, with ComfyUI started."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("comfyui", help="folder of ComfyUI")
    parser.add_argument("families", nargs="*", help="only these")
    options = parser.parse_args()
    start(options.comfyui)
    return options


def toys(families: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Name, toy and MODEL of each family, or of all."""
    from family_toys import TOYS

    for kind in families or TOYS:
        with tempfile.TemporaryDirectory() as folder:
            yield kind, TOYS[kind], TOYS[kind].model(Path(folder))


def train_lora(
    model: Any, latents: list, conditionings: list, checkpointing: bool, steps: int = 1
) -> dict[str, Any]:
    """ComfyUI's Train LoRA in float32 on raw latents, rank 2, all latents in one batch.

    SGD with rate 1 moves a parameter by its gradient, so after one step the file holds minus the
    gradient of the matrix that starts at 0.
    """
    from comfy_extras.nodes_train import TrainLoraNode

    widgets = {
        "batch_size": len(latents),
        "steps": steps,
        "grad_accumulation_steps": 1,
        "learning_rate": 1.0,
        "rank": 2,
        "optimizer": "SGD",
        "loss_function": "MSE",
        "seed": 0,
        "training_dtype": "fp32",
        "lora_dtype": "fp32",
        "quantized_backward": False,
        "algorithm": "LoRA",
        "gradient_checkpointing": checkpointing,
        "checkpoint_depth": 1,
        "offloading": False,
        "existing_lora": "[None]",
        "bucket_mode": False,
        "bypass_mode": False,
    }
    return TrainLoraNode.execute(
        [model],
        [{"samples": latent} for latent in latents],
        conditionings,
        **{name: [value] for name, value in widgets.items()},
    ).result[0]
