"""Gated training: steps -> adapter. One loop; what differs from ordinary training is two lines in
it.

Every random number is named by (seed, step, sample), so a step does not depend on how a run got
there: a resumed run equals an uninterrupted one, and two gates differ only in the steps they
demote.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import draws, measure
from .gate import Gate, decide
from .probe import Velocity, predict


@dataclass(frozen=True)
class Pupil:
    """One picture as the trainer sees it.

    native   model latent x [1, C, ..., H, W] on the native grid
    demoted  target tier -> model latent on that grid, for the tiers the picture is on-route to
    weights  loss weights [H, W] or None by tier; key None is the native grid
    """

    native: torch.Tensor
    demoted: Mapping[int, torch.Tensor]
    weights: Mapping[int | None, torch.Tensor | None]
    context: Any = None
    repeats: int = 1


@dataclass(frozen=True)
class Settings:
    """How to train. warmup_steps rise linearly; schedule is "constant" or "cosine" (to 0) after
    them."""

    steps: int
    learning_rate: float
    batch_size: int = 1
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    max_norm: float = 1.0
    seed: int = 0
    density: draws.SigmaDensity = draws.SigmaDensity()

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class History:
    """What happened, an entry a step: mean loss, samples demoted, latent cells computed and native,
    seconds."""

    losses: list[float] = field(default_factory=list)
    demoted: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    native_cells: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def saving(self) -> float:
        """Share of the tokens of native training that the gate spared."""
        return 1 - sum(self.cells) / sum(self.native_cells)


def train(
    pupils: Sequence[Pupil],
    gate: Gate,
    settings: Settings,
    velocity: Velocity,
    parameters: Sequence[torch.nn.Parameter],
    state_file: Path,
    tick: Callable[[float], None],
) -> History:
    """Train the parameters in place.

    tick is called with the loss after every step and may raise to stop; the run's state is then
    kept in state_file, and the next call with that file goes on from it. A finished run removes it.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    history = _restore(state_file, parameters, optimizer) if state_file.exists() else History()
    order = _Order([pupil.repeats for pupil in pupils], settings.seed)
    try:
        for step in range(len(history.losses), settings.steps):
            started = time.perf_counter()
            loss_sum, demoted, cells, native_cells = 0.0, 0, 0, 0
            for sample in range(settings.batch_size):
                pupil = pupils[order[step * settings.batch_size + sample]]
                u = draws.stream("train sigma", settings.seed, step, sample).random()
                sigma = settings.density.quantile(1 - u)
                noise = draws.standard_normal(
                    draws.stream("train noise", settings.seed, step, sample),
                    tuple(pupil.native.shape),
                )
                rule = decide(gate, sigma, pupil.demoted.keys(), step=step, steps=settings.steps)
                tier = rule.route[1] if rule else None
                latent = pupil.demoted[tier] if rule else pupil.native
                fresh = draws.stream("train carry", settings.seed, step, sample)
                noise = draws.carry_noise(noise, tuple(latent.shape[-2:]), fresh).to(latent.device)
                predicted = predict(
                    velocity,
                    draws.noised(latent, noise, sigma),
                    sigma,
                    pupil.context,
                    rule and rule.rotary,
                    pupil.native,
                )
                loss = draws.velocity_loss(predicted, latent, noise, pupil.weights[tier])
                (loss / settings.batch_size).backward()
                loss_sum += loss.item() / settings.batch_size
                demoted += rule is not None
                cells += latent.shape[-2:].numel()
                native_cells += pupil.native.shape[-2:].numel()
            if not math.isfinite(loss_sum):
                raise ValueError(
                    f"the loss is not finite at step {step + 1}: lower the learning rate "
                    "or use a compute precision with more range"
                )
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step)
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            history.losses.append(loss_sum)
            history.demoted.append(demoted)
            history.cells.append(cells)
            history.native_cells.append(native_cells)
            history.seconds.append(time.perf_counter() - started)
            tick(loss_sum)
    except BaseException:
        if history.losses:
            _keep(state_file, parameters, optimizer, history)
        raise
    state_file.unlink(missing_ok=True)
    return history


class _Order:
    """Which picture the n-th sample of a run is: every epoch a fresh permutation, repeats
    counted."""

    def __init__(self, repeats: Sequence[int], seed: int) -> None:
        self.pool = [index for index, count in enumerate(repeats) for _ in range(count)]
        self.seed = seed
        self.epoch = -1

    def __getitem__(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.pool))
        if epoch != self.epoch:
            self.epoch = epoch
            self.permutation = draws.stream("train order", self.seed, epoch).permutation(
                len(self.pool)
            )
        return self.pool[self.permutation[place]]


def _keep(
    state_file: Path,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    history: History,
) -> None:
    state = {
        "parameters": [parameter.detach().cpu() for parameter in parameters],
        "optimizer": optimizer.state_dict(),
        "history": asdict(history),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    measure.write_atomically(state_file, buffer.getvalue())


def _restore(
    state_file: Path, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> History:
    state = torch.load(state_file, weights_only=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return History(**state["history"])
