"""The processes of one machine that train together, as `run.py --processes` and `accelerate launch`
start them. Several machines are not supported: states and latents go through one disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from comfy.cli_args import args

from ..demotion import train

# How long one process waits for another, which may be encoding a large set.
PATIENCE = timedelta(hours=6)


def join() -> train.Team:
    """The team of this process: alone unless it was started as one of several.

    Sets the CUDA device, so call it before anything else of ComfyUI is imported. Raises ValueError
    for a team that is spread over several machines.
    """
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if size == "1":
        return train.ALONE
    if size != here:
        raise ValueError(
            f"there are {size} processes, {here} of them on this machine: start them all on one"
        )
    state = PartialState(cpu=args.cpu, timeout=PATIENCE)
    return train.Team(state.process_index, state.num_processes, add)


def add(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors of one type over the team, in place, in a single message."""
    total = torch.cat([tensor.reshape(-1) for tensor in tensors])
    torch.distributed.all_reduce(total)
    for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def gathered(team: train.Team, value: Any) -> list[Any]:
    """A value of every process, by rank."""
    return gather_object([value]) if team.size > 1 else [value]
