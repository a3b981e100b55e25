"""How much memory a gradient needs, from the model's blocks and the tokens of a picture.

A block keeps for its backward about what goes in and out of the Linears on the image stream; that
those are the ones a LoRA takes by default makes them easy to find. The factors are measured in
bench/memory.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Protocol

import torch

from ..demotion import adapter, arms, grid
from . import families, session

# Kept by a block, over the inputs and outputs of its Linears.
KEPT = 1.3
# At the backward of one checkpointed block, over the same.
PEAK = 2.0
# Inputs kept for each checkpointed block, over one activation of the block's width.
INPUTS = 2.0
FLOAT32 = 4


class Settings(Protocol):
    """What of a probe's or a training run's options memory depends on."""

    compute: str
    checkpointing: bool
    targets: str
    rank: int


def needed(
    model: Any,
    training_set: arms.TrainingSet,
    options: Settings,
    copies: int,
    dense: bool,
    batch: int = 1,
) -> float:
    """Bytes that a run on a MODEL needs beside its weights: the activations of its largest picture,
    once for each of the samples that share a forward (batch), the weights that its backward holds,
    and so many float32 copies of the adapter.

    dense says that the adapter forms Delta W, as LoHa and LoKr do.
    """
    network, family = model.model.diffusion_model, families.family_of(model.model)
    tokens = max(grid.token_count(item.native, training_set.patch) for item in training_set.items)
    dtype = session.COMPUTE[options.compute] or model.model.get_dtype_inference()
    linears = families.linears(network)
    targets = adapter.match_targets(linears, families.targets_of(family, options.targets))
    return (
        batch * activation_bytes(network, family, tokens, dtype, options.checkpointing)
        + weight_bytes(network, targets if dense else [], dtype, options.checkpointing)
        + FLOAT32 * copies * adapter.lora_size(linears, targets, options.rank)
    )


def weight_bytes(
    network: torch.nn.Module, dense: Collection[str], dtype: torch.dtype, checkpointing: bool
) -> float:
    """Bytes of weights made in a forward and held for its backward: those cast to the precision of
    the computation, and Delta W of the Linears named in dense."""
    held = []
    for prefix, block in families.blocks(network).items():
        total = 0
        for name, linear in families.linears(block).items():
            size = linear.in_features * linear.out_features
            if isinstance(linear, torch.nn.Linear) and linear.weight.dtype != dtype:
                total += size * dtype.itemsize
            if f"{prefix}.{name}" in dense:
                total += size * FLOAT32
        held.append(total)
    return max(held) if checkpointing else sum(held)


def activation_bytes(
    network: torch.nn.Module,
    family: families.Family,
    tokens: int,
    dtype: torch.dtype,
    checkpointing: bool,
) -> float:
    """Bytes of activations alive at most in a forward and backward of one picture.

    With T tokens, b bytes an element, and for each block w = the sum of inputs and outputs of its
    targeted Linears, u = the sum of their inputs: a block keeps k = T (1.3 b w + 4 u), the second
    term only below float32, where the adapter casts its inputs. All blocks: sum k. Checkpointed:
    T 2 b n h + 2/1.3 max k, with n blocks of width h. Families whose blocks keep more have a factor
    on k.
    """
    sizes = [
        [
            (linear.in_features, linear.out_features)
            for name, linear in families.linears(block).items()
            if re.search(family.targets, f"{prefix}.{name}")
        ]
        for prefix, block in families.blocks(network).items()
    ]
    sizes = [block for block in sizes if block]
    itemsize = dtype.itemsize
    casts = FLOAT32 if itemsize < FLOAT32 else 0
    kept = [
        family.kept
        * tokens
        * sum(KEPT * itemsize * (into + out) + casts * into for into, out in block)
        for block in sizes
    ]
    if not checkpointing:
        return sum(kept)
    width = min(into for block in sizes for into, _ in block)
    return tokens * INPUTS * itemsize * len(sizes) * width + PEAK / KEPT * max(kept)
