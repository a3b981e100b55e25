#!/usr/bin/env python3
"""Memory of a gradient on the toy of every family: the pack, with and without checkpointing, what
its formula says, and ComfyUI's own Train LoRA.

Counted are the bytes of all tensors alive, weights of the private model apart, in float32 on 1,024
tokens: for the pack and for ComfyUI's trainer (as it comes, checkpointing on) through one forward
and backward. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/memory.py .comfyui/ComfyUI
"""

from __future__ import annotations

import weakref
from typing import Any

import common

MB = 1 << 20


def counter(network: Any) -> Any:
    """A mode that counts the bytes of the tensors made under it; those of a network's own apart."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = self.peak = 0
            self.known = {value.untyped_storage()._cdata: 0 for value in network.parameters()}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor.untyped_storage())
            return out

        def add(self, storage: Any) -> None:
            key = storage._cdata
            if key not in self.known:
                self.known[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, key)

        def gone(self, key: int) -> None:
            self.live -= self.known.pop(key)

    return Counter()


def ours(model: Any, latent: Any, conditioning: Any, checkpointing: bool) -> tuple[float, float]:
    """Peak bytes of a gradient, and the formula's."""
    import torch
    from pack.host import families, memory, session

    from demotion import adapter, draws

    with session.open_session(model, checkpointing=checkpointing) as live:
        linears = families.linears(live.network)
        targets = adapter.match_targets(linears, live.family.targets)
        tokens = latent.shape[-1] * latent.shape[-2] // live.family.patch**2
        formula = memory.activation_bytes(
            live.network, live.family, tokens, torch.float32, checkpointing
        )
        layers = live.adapt(adapter.zero_weights(linears, targets, rank=2, alpha=2, seed=0))
        live.check_additions(latent, conditioning)
        with counter(live.network) as count:
            predicted = live.velocity(latent, [0.5], [conditioning])
            loss = draws.velocity_loss(predicted, latent, torch.zeros_like(latent))
            torch.autograd.grad(loss, layers.parameters, allow_unused=True)
        return count.peak, formula


def native(model: Any, latent: Any, conditioning: Any) -> float | None:
    """Peak bytes of ComfyUI's trainer in its loop, or None when it ends in an error."""
    import comfy_extras.nodes_train as trainer
    import torch

    peaks = []
    loop = trainer._run_training_loop

    def counted(guider, *args):
        with counter(guider.model_patcher.model) as count:
            loop(guider, *args)
        peaks.append(count.peak)

    trainer._run_training_loop = counted
    try:
        with torch.inference_mode():
            raw = model.model.process_latent_out(latent)
            common.train_lora(model, [raw], [conditioning], True)
    except RuntimeError:
        return None
    finally:
        trainer._run_training_loop = loop
    return peaks[0]


def main() -> None:
    options = common.parse(__doc__)
    import torch
    from pack.host import families

    print("MB                     plain  formula  checkpointed  formula   ComfyUI's Train LoRA")
    for kind, toy, model in common.toys(options.families):
        edge = 32 * families.family_of(model.model).patch
        latent = torch.randn(1, *toy.latent[:-2], edge, edge)
        conditioning = toy.conditioning(model)
        plain = ours(model, latent, conditioning, False)
        lean = ours(model, latent, conditioning, True)
        theirs = native(model, latent, conditioning)
        last = "error" if theirs is None else f"{theirs / MB:.1f}"
        cells = [f"{value / MB:.1f}" for value in (*plain, *lean)]
        print(
            f"{kind:<20}{cells[0]:>8}{cells[1]:>9}{cells[2]:>14}{cells[3]:>9}{last:>23}",
            flush=True,
        )


if __name__ == "__main__":
    main()
