"""The probe's time per gradient over a bare forward and backward of the same model.

Bare is the network's own forward on ready inputs, the loss, and the gradient of the same adapter;
the probe adds random numbers, noise for every grid, ComfyUI's sampling path, inner products and
sums, and with --sketch a count-sketch. The two take turns, a cell at a time, on one thread, and the
processor time of the process counts:

    .comfyui/venv/bin/python bench/probe_overhead.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

ARMS = ("src", "null", "reenc", "demote", "repromote")
BIN = (0.4, 0.9)
DRAWS = 4


def subject_of(model: Any, edge: int, small: int) -> Any:
    """A picture of random latents, native edge and demoted edge in latent cells."""
    import torch
    from pack.host import text

    from demotion import probe

    generator = torch.Generator().manual_seed(0)
    channels = model.model.latent_format.latent_channels
    latents = {}
    for arm in ARMS:
        side = small if arm == "demote" else edge
        name = f"{arm}:{small * 8}" if arm in ("demote", "repromote") else arm
        latents[name] = torch.randn(1, channels, side, side, generator=generator)
    zero = text.zero_conditioning(model.model)
    tokens = torch.randn(1, 5, zero[0][0].shape[-1], generator=generator)
    return probe.Subject("bench", latents, dict.fromkeys(latents), [[tokens, zero[0][1]]])


def bare_gradients(live: Any, subject: Any, parameters: list) -> Callable[[], None]:
    """A forward and backward of the network on each arm's grid, and nothing else."""
    import torch

    from demotion import draws

    network, calls = live.network, []
    forward = network.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, dict(kwargs)))
        return forward(*args, **kwargs)

    network.forward = recorded
    for latent in subject.latents.values():
        with torch.no_grad():
            live.velocity(latent, [0.6], [subject.context])
    network.forward = forward

    def run() -> None:
        for (args, kwargs), latent in zip(calls, subject.latents.values(), strict=True):
            predicted = network(*args, **kwargs)
            loss = draws.velocity_loss(predicted, latent, latent)
            torch.autograd.grad(loss, parameters, allow_unused=True)

    return run


def overhead(model: Any, subject: Any, rounds: int, buckets: int) -> tuple[float, float, float]:
    """Median processor seconds of a bare gradient and of the probe's, and of their ratio."""
    from pack.host import families, session

    from demotion import adapter, probe, sketch

    with session.open_session(model) as live:
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, live.family.targets)
        layers = live.adapt(adapter.probe_weights(linears, targets, 8, 0))
        live.check_additions(subject.latents["src"], subject.context)
        size = sum(parameter.numel() for parameter in layers.parameters)
        sketcher = sketch.CountSketch(0, size, buckets, live.device) if buckets else None
        bare = bare_gradients(live, subject, layers.parameters)
        times = []
        for turn in range(rounds + 1):
            began = time.process_time()
            for _ in range(DRAWS):
                bare()
            middle = time.process_time()
            probe.measure_cell(
                subject, BIN, DRAWS, turn, True, live.velocity, layers.parts, lambda: None, sketcher
            )
            ended = time.process_time()
            count = DRAWS * len(subject.latents)
            times.append(((middle - began) / count, (ended - middle) / count))
    times = times[1:]
    plain, ours = zip(*times)
    ratio = statistics.median(own / other for other, own in times)
    return statistics.median(plain), statistics.median(ours), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comfyui", help="folder of ComfyUI")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sketch", type=int, default=0, help="buckets, 0 for none")
    options = parser.parse_args()
    common.start(options.comfyui)
    import comfy.sd
    import torch
    import toys

    print("model                    bare ms   probe ms   ratio")
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "nano Flux, 256 tokens": (common.NANO, 32, 24),
            "toy Flux, 1,024 tokens": (toys.flux(Path(folder)), 64, 48),
        }
        for name, (file, edge, small) in models.items():
            with torch.inference_mode():
                model = comfy.sd.load_diffusion_model(str(file))
                subject = subject_of(model, edge, small)
            bare, ours, ratio = overhead(model, subject, options.rounds, options.sketch)
            print(f"{name:<24}{bare * 1e3:8.2f}{ours * 1e3:11.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
