"""A picture from a model in training, through ComfyUI's own sampler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.sample
import numpy as np
import torch

from ..demotion import arms, grid
from . import session, text


@dataclass(frozen=True)
class Sampling:
    """What to sample: conditioning, sampler steps, and guidance scale, where above 1 the
    training set's empty text is the negative."""

    conditioning: list
    steps: int
    cfg: float


def check(sampling: Sampling, training_set: arms.TrainingSet) -> None:
    """Raise ValueError for a sampling that cannot be done."""
    text.check_plain(sampling.conditioning, "sample_prompt")
    if sampling.cfg != 1 and training_set.empty is None:
        raise ValueError(
            f"sample_cfg is {sampling.cfg:g}, which needs an empty text: connect "
            "empty_conditioning to the training set, or set sample_cfg to 1"
        )


def picture(
    live: session.Session, training_set: arms.TrainingSet, sampling: Sampling, seed: int
) -> np.ndarray:
    """A square picture of the native tier, uint8 [H, W, 3], from the model with its adapter as it
    stands."""
    shape = training_set.latent(training_set.items[0], arms.SRC).shape
    edge = training_set.native_tier
    cells = grid.native_grid(
        (edge, edge), edge, vae_factor=training_set.vae_factor, patch=training_set.patch
    )
    latent = torch.zeros(1, *shape[:-2], *cells)
    before = torch.get_rng_state()
    with torch.no_grad():
        sampled = comfy.sample.sample(
            live.patcher,
            comfy.sample.prepare_noise(latent, seed),
            sampling.steps,
            sampling.cfg,
            "euler",
            "simple",
            text.own_copy(sampling.conditioning),
            text.own_copy(training_set.empty or sampling.conditioning),
            latent,
            seed=seed,
            disable_pbar=True,
        )
    torch.set_rng_state(before)
    # The sampler has put away what a forward needs.
    live.patcher.pre_run()
    with _not_unloaded(live):
        return training_set.codec.decode(sampled[0])


@contextmanager
def _not_unloaded(live: session.Session) -> Iterator[None]:
    """Keep the model where it is while another is loaded: the adapter's base weights are in it."""
    loaded = comfy.model_management.current_loaded_models
    own: list[Any] = [entry for entry in loaded if entry.model is live.patcher]
    loaded[:] = [entry for entry in loaded if entry.model is not live.patcher]
    try:
        yield
    finally:
        loaded.extend(own)
