#!/usr/bin/env python3
"""Time of a gradient per sample when samples share a forward, over that of one alone.

A forward and backward of the pack's own path with 1, 2, 4 and 8 samples at sigmas of their own, on
a native and a demoted grid. Batch sizes take turns on one thread, the processor time of the process
counts, and each ratio is of neighbours in time. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/batching.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common

SIZES = (1, 2, 4, 8)


def gradients(live: Any, parameters: list, edge: int, size: int, caption: list) -> float:
    """Processor seconds per sample of one gradient of the mean loss of so many samples."""
    import torch

    from demotion import draws

    channels = live.patcher.model.latent_format.latent_channels
    latent, noise = torch.randn(2, size, channels, edge, edge)
    sigmas = [0.4 + 0.5 * (index + 1) / (size + 1) for index in range(size)]
    rows = zip(latent.split(1), noise.split(1), sigmas)
    z = torch.cat([draws.noised(*row) for row in rows])
    began = time.process_time()
    loss = draws.velocity_loss(live.velocity(z, sigmas, [caption] * size), latent, noise)
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return (time.process_time() - began) / size


def measured(model: Any, edges: tuple[int, ...], rounds: int) -> dict[int, list[list[float]]]:
    """Edge of a grid -> rounds of seconds per sample, one for each batch size."""
    import torch
    from pack.host import families, session, text

    from demotion import adapter

    zero = text.zero_conditioning(model.model)
    caption = [[torch.randn(1, 5, zero[0][0].shape[-1]), zero[0][1]]]
    with session.open_session(model) as live:
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, live.family.targets)
        parameters = live.adapt(adapter.probe_weights(linears, targets, 8, 0)).parameters
        return {
            edge: [
                [gradients(live, parameters, edge, size, caption) for size in SIZES]
                # The first round pays for warm-up.
                for _ in range(rounds + 1)
            ][1:]
            for edge in edges
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comfyui", help="folder of ComfyUI")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    common.start(options.comfyui)
    import comfy.sd
    import torch
    import toys

    print("model       tokens  ms alone     x2      x4      x8")
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "nano Flux": (common.NANO, (32, 24)),
            "toy Flux": (toys.flux(Path(folder)), (64, 48)),
        }
        for name, (file, edges) in models.items():
            with torch.inference_mode():
                model = comfy.sd.load_diffusion_model(str(file))
            for edge, turns in measured(model, edges, options.rounds).items():
                alone = statistics.median(turn[0] for turn in turns)
                ratios = [statistics.median(turn[n] / turn[0] for turn in turns) for n in (1, 2, 3)]
                cells = "".join(f"{ratio:8.3f}" for ratio in ratios)
                print(f"{name:<10}{(edge // 2) ** 2:8,}{alone * 1e3:10.1f}{cells}", flush=True)


if __name__ == "__main__":
    main()
