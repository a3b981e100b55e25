#!/usr/bin/env python3
"""What ComfyUI's own Train LoRA does on the toy of every family, beside the pack.

One step of its trainer in float32 tells its gradient. The truth is the gradient the pack takes
of the same loss at the same noisy latent, sigma and LoRA; per family the table says how far the
pack's forward is from ComfyUI's, and what a difference quotient of ComfyUI's forward along that
gradient is over its length. Then the cosine of the trainer's gradient to it on the Linears of the
image stream, with the trainer's checkpointing as it comes (on) and off, and as it comes for a batch
of two pictures with captions of their own. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/against_native_trainer.py .comfyui/ComfyUI
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common

ROW = "{:<20}{:<9}{:<10}{:<34}{:<34}{}"


def ours(model: Any, picture: Any, noise: Any, caption: Any) -> tuple[str, str]:
    """Largest difference of the pack's forward to ComfyUI's, and quotient over gradient."""
    import comfy
    import native
    import test_families as suite
    from pack.host import session

    from demotion import draws

    z = draws.noised(picture, noise, suite.SIGMA)
    with session.open_session(model) as live:
        live.check_additions(picture, caption)
        plain = live.velocity(z, [suite.SIGMA], [caption]).detach()
        weights = suite.lora(live)
        parts = suite.gradient(live, live.adapt(weights).parameters, picture, noise, caption)
    apart = (plain - native.native_velocity(comfy, model, z, suite.SIGMA, caption)).abs().max()
    norm = suite.norm_of(parts)
    direction = [part / norm for part in parts]
    loss_at = suite.merged_loss(comfy, model, weights, z, picture, noise, caption, direction)
    quotient = suite.settled(loss_at, 8e-3, agreeing=3e-4 * norm.item())
    return f"{apart:.0g}", f"{quotient / norm.item():.5f}"


def compare(model: Any, pictures: Sequence, captions: Sequence, checkpointing: bool) -> str:
    """Cosine of the native trainer's gradient to the truth, or the error it ends with."""
    import comfy.patcher_extension
    import torch

    seen = []

    def record(execute, x, t, *args, **kwargs):
        seen.append((x.detach().clone(), t.detach().clone()))
        return execute(x, t, *args, **kwargs)

    watched = model.clone()
    watched.add_wrapper_with_key(
        comfy.patcher_extension.WrappersMP.APPLY_MODEL, "bench", record
    )
    raw = [model.model.process_latent_out(x) for x in pictures]
    try:
        with torch.inference_mode():
            lora = common.train_lora(watched, raw, list(captions), checkpointing)
    except RuntimeError as error:
        return f"error: {reason(error)}"
    states, levels = seen[0]
    truth, native = true_gradient(model, lora, pictures, captions, states, levels)
    cosine = torch.dot(truth, native) / (truth.norm() * native.norm())
    return f"{cosine:.4f}"


def reason(error: RuntimeError) -> str:
    """The few words of autograd's message that tell the case."""
    text = str(error).replace("\n", " ")
    known = {
        "inplace operation": "activation overwritten",
        "no autograd formula": "kernel without a backward",
    }
    return next((short for key, short in known.items() if key in text), text[:34])


def true_gradient(
    model: Any, lora: dict, pictures: Sequence, captions: Sequence, states: Any, levels: Any
) -> tuple[Any, Any]:
    """The gradient of the down matrices at the trainer's start, and what the trainer's file says it
    was."""
    import comfy.model_sampling
    import torch
    from pack.host import families, session

    from demotion import adapter

    with torch.inference_mode(False), session.open_session(model) as live:
        linears = families.linears(live.network)
        start, native = {}, {}
        for name in adapter.match_targets(linears, live.family.targets):
            down, up = (
                lora[f"diffusion_model.{name}.lora_{side}.weight"].clone()
                for side in ("down", "up")
            )
            start[name] = adapter.lora(torch.zeros_like(down), up, 1.0)
            native[name] = -down
        live.check_additions(pictures[0], captions[0])
        layers = live.adapt(adapter.Weights(start))
        rescaled = isinstance(live.patcher.model.model_sampling, comfy.model_sampling.COSMOS_RFLOW)
        loss = 0
        for i, x in enumerate(pictures):
            state, level = states[i : i + 1].clone(), float(levels[i])
            sigma, z = (level / (1 + level), state / (1 + level)) if rescaled else (level, state)
            denoised = z - sigma * live.velocity(z, [sigma], [captions[i]])
            loss = loss + ((denoised - x) ** 2).mean() / len(pictures)
        gradients = torch.autograd.grad(loss, layers.parts["A"], allow_unused=True)
        names = list(layers.layers)
    kept = [i for i, gradient in enumerate(gradients) if gradient is not None]
    return (
        torch.cat([gradients[i].reshape(-1).double() for i in kept]),
        torch.cat([native[names[i]].reshape(-1).double() for i in kept]),
    )


def main() -> None:
    options = common.parse(__doc__)
    import torch

    print(ROW.format("", "the pack", "", "Train LoRA", "", ""))
    print(
        ROW.format(
            "family", "forward", "gradient", "batch 1", "no checkpointing", "batch 2"
        )
    )
    for kind, toy, model in common.toys(options.families):
        generator = torch.Generator().manual_seed(0)
        pictures = list(torch.randn(2, 1, *toy.latent, generator=generator))
        captions = [toy.conditioning(model, seed) for seed in (0, 1)]
        columns = [
            *ours(model, *pictures, captions[0]),
            compare(model, pictures[:1], captions[:1], True),
            compare(model, pictures[:1], captions[:1], False),
            compare(model, pictures, captions, True),
        ]
        print(ROW.format(kind, *columns), flush=True)


if __name__ == "__main__":
    main()
