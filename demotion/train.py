"""Gated training: steps -> adapter. One loop; what differs from ordinary training is one line of
it, in `plan_sample`.

Every random number is named by (seed, step, sample), so a step does not depend on how a run got
there: a resumed run equals an uninterrupted one, two processes train what one would, and two gates
differ only in the steps they demote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from . import draws
from .gate import Course, Gate, Rule, decide
from .optimizers import OPTIMIZERS
from .probe import Velocity, predict
from .states import States

SCHEDULES = ("constant", "linear", "cosine")
# Losses are compared by their means over so many steps, and a run whose mean has grown by this
# factor is lost. A single loss differs from another by its sigma alone, but not by so much.
SPAN = 20
EXPLODED = 10.0
# Noise levels at which each held-out picture's loss is taken, evenly over sigma.
VALIDATION_SIGMAS = 8


@dataclass(frozen=True)
class Pupil:
    """One picture as the trainer sees it.

    native   model latent x [1, C, ..., H, W] on the native grid
    demoted  target tier -> model latent on that grid, for the tiers the picture is on-route to
    weights  loss weights [H, W] or None by tier; key None is the native grid
    context  whatever `velocity` needs to know of the picture (its conditioning)
    empty    the same where its caption is dropped
    image    names it in the streams of validation
    tokens   of the native grid, which some densities of sigma depend on
    """

    native: torch.Tensor
    demoted: Mapping[int, torch.Tensor]
    weights: Mapping[int | None, torch.Tensor | None]
    context: Any = None
    repeats: int = 1
    empty: Any = None
    image: str = ""
    tokens: int = 1


@dataclass(frozen=True)
class Settings:
    """How to train.

    batch_size       samples that go through the model together, where their grids allow
    accumulation     batches a step
    optimizer        a key of `optimizers.OPTIMIZERS`
    schedule         after warmup_steps of linear rise: "constant", or "linear" or "cosine" to 0
    max_norm         gradients longer than this are shortened to it
    caption_dropout  fraction of samples trained with an empty caption
    ema_decay        of a moving average of the weights
    validate_every   steps between losses on held-out pictures; 0 for never
    """

    steps: int
    learning_rate: float
    batch_size: int = 1
    accumulation: int = 1
    optimizer: str = "AdamW"
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    max_norm: float = 1.0
    caption_dropout: float = 0.0
    ema_decay: float = 0.0
    validate_every: int = 0
    seed: int = 0
    density: draws.SigmaDensity = draws.SigmaDensity()

    @property
    def samples(self) -> int:
        """Samples a step."""
        return self.batch_size * self.accumulation

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.learning_rate * shape[self.schedule]

    @property
    def course(self) -> Course:
        """The run's steps and their learning rates, which spans of a gate are laid over."""
        return Course(self.steps, [self.rate(step) for step in range(self.steps)])


@dataclass
class History:
    """What happened, an entry a step, and for validation (steps done, loss) at each look.

    losses        mean over the step's samples
    tiers         target tiers of the samples that were demoted
    cells         latent cells that went through the model; native_cells without a gate
    seconds       from a step's start to its end
    plans         (steps done, steps planned) of the run, and of each longer one that went on
    environments  (steps done, what its bits depend on) likewise, of each machine that went on
    """

    losses: list[float] = field(default_factory=list)
    tiers: list[list[int]] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    native_cells: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    plans: list[tuple[int, int]] = field(default_factory=list)
    environments: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def demoted(self) -> list[int]:
        """Samples demoted in each step."""
        return [len(tiers) for tiers in self.tiers]

    @property
    def saving(self) -> float:
        """Share of the tokens of native training that the gate spared."""
        return 1 - sum(self.cells) / sum(self.native_cells)

    def smoothed(self, end: int | None = None) -> float:
        """Mean loss of the last steps, up to `end`."""
        last = self.losses[:end][-SPAN:]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Team:
    """Processes that train together: this one's rank, how many there are, and what adds tensors up
    over all of them, in place."""

    rank: int = 0
    size: int = 1
    add: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None


ALONE = Team()


class Diverged(ValueError):
    """A loss that is not finite, or a run that is lost: nothing of it is worth keeping."""


@dataclass(frozen=True)
class Sample:
    """One sample of a step, before its noise is drawn. rule is what demotes it, or None."""

    pupil: Pupil
    sigma: float
    rule: Rule | None
    context: Any
    place: tuple[int, int, int]

    @property
    def tier(self) -> int | None:
        return self.rule.route[1] if self.rule else None

    @property
    def latent(self) -> torch.Tensor:
        return self.pupil.demoted[self.tier] if self.rule else self.pupil.native

    def noise(self) -> torch.Tensor:
        """Noise like the latent, on the CPU: the native one, or its low-frequency corner."""
        native = draws.standard_normal(
            draws.stream("train noise", *self.place), tuple(self.pupil.native.shape)
        )
        fresh = draws.stream("train carry", *self.place)
        return draws.carry_noise(native, tuple(self.latent.shape[-2:]), fresh)


def train(
    pupils: Sequence[Pupil],
    gate: Gate,
    settings: Settings,
    velocity: Velocity,
    parameters: Sequence[torch.nn.Parameter],
    states: States,
    tick: Callable[[History], None],
    save_every: int = 0,
    held_out: Sequence[Pupil] = (),
    average: Sequence[torch.Tensor] | None = None,
    team: Team = ALONE,
    environment: Mapping[str, Any] | None = None,
) -> History:
    """Train the parameters in place, and let tensors like them follow as their moving average.

    A run goes on from the newest of its states, bit for bit where the environment (what is written
    down of device, kernels and threads) is the same. One is written every save_every steps, at the
    end, and where something stops the run between two steps: tick, which is called after every step
    and may raise, or an error. Raises ValueError for a batch that the team cannot share, Diverged
    (and writes no state), and OSError for a state that cannot be written.
    """
    if settings.samples % team.size:
        raise ValueError(
            f"{settings.samples} samples a step cannot be shared by {team.size} processes: choose "
            f"a batch size that is a multiple of {team.size}"
        )
    kind = OPTIMIZERS[settings.optimizer]
    optimizer = kind.make(parameters, settings.learning_rate, settings.weight_decay)
    run = _Run(parameters, optimizer, average, settings.ema_decay)
    run.restore(states.load(settings.steps))
    history, course = run.history, settings.course
    for written, here in (
        (history.plans, settings.steps),
        (history.environments, dict(environment or {})),
    ):
        if [entry for _, entry in written][-1:] != [here]:
            written.append((len(history.losses), here))
    order = Order([pupil.repeats for pupil in pupils], settings.seed)
    together = max(1, settings.batch_size // team.size)
    run.validate(held_out, velocity, settings.validate_every)
    try:
        for step in range(len(history.losses), settings.steps):
            started = time.perf_counter()
            first = step * settings.samples
            samples = [
                plan_sample(pupils[order[first + index]], gate, settings, course, step, index)
                for index in range(settings.samples)
            ]
            loss = torch.zeros((), device=parameters[0].device)
            for batch in batches(samples[team.rank :: team.size], together, velocity):
                part = summed_loss(batch, velocity, loss.device) / settings.samples
                part.backward()
                loss += part.detach()
            team.add([loss, *(p.grad for p in parameters if p.grad is not None)])
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_norm)
            # The one place of a step where the host waits for the device.
            mean, norm = torch.stack([loss, norm]).tolist()
            if not (math.isfinite(mean) and math.isfinite(norm)):
                raise _diverged("the loss or its gradient is not finite", step, states)
            run.advance(settings.rate(step), mean, samples, started)
            if step >= 2 * SPAN and history.smoothed() > EXPLODED * history.smoothed(SPAN):
                raise _diverged(f"the mean loss has grown {EXPLODED:g}-fold", step, states)
            run.validate(held_out, velocity, settings.validate_every)
            tick(history)
            if save_every and (step + 1) % save_every == 0 and team.rank == 0:
                states.save(step + 1, run.state())
    except Diverged:
        raise
    except BaseException:
        if run.whole and history.losses and team.rank == 0:
            states.save(len(history.losses), run.state())
        raise
    if team.rank == 0:
        states.save(settings.steps, run.state())
        states.prune(settings.steps, keep=1)
    return history


def plan_sample(
    pupil: Pupil, gate: Gate, settings: Settings, course: Course, step: int, index: int
) -> Sample:
    """What a step's sample of this index is: its sigma, the rule that demotes it, its caption."""
    place = settings.seed, step, index
    density = settings.density.at(pupil.tokens)
    sigma = density.quantile(1 - draws.stream("train sigma", *place).random())
    rule = decide(gate, sigma, pupil.demoted.keys(), step, course)
    dropped = draws.stream("train caption", *place).random() < settings.caption_dropout
    return Sample(pupil, sigma, rule, pupil.empty if dropped else pupil.context, place)


def batches(samples: Sequence[Sample], size: int, velocity: Velocity) -> Iterator[list[Sample]]:
    """Samples that share a forward: of every `size` in order, those of one grid whose contexts can
    be joined. Aligned ones, whose tables depend on sigma, go alone."""
    for start in range(0, len(samples), size):
        together: dict[Any, list[Sample]] = {}
        for sample in samples[start : start + size]:
            aligned = sample.place if sample.rule and sample.rule.rotary else None
            key = velocity.signature(sample.context, sample.latent.shape), sample.tier, aligned
            together.setdefault(key, []).append(sample)
        yield from together.values()


def summed_loss(batch: Sequence[Sample], velocity: Velocity, device: torch.device) -> torch.Tensor:
    """Sum of the losses of samples that share a forward, under the rule that they share."""
    latents = [sample.latent.to(device) for sample in batch]
    noises = [sample.noise().to(device) for sample in batch]
    noised = [
        draws.noised(latent, noise, sample.sigma)
        for latent, noise, sample in zip(latents, noises, batch)
    ]
    predicted = predict(
        velocity,
        torch.cat(noised),
        [sample.sigma for sample in batch],
        [sample.context for sample in batch],
        batch[0].rule and batch[0].rule.rotary,
        batch[0].pupil.native,
    )
    return sum(
        draws.velocity_loss(
            one[None], latent, noise, _to(sample.pupil.weights[sample.tier], device)
        )
        for one, latent, noise, sample in zip(predicted, latents, noises, batch)
    )


@torch.no_grad()
def validation_loss(held_out: Sequence[Pupil], velocity: Velocity, device: torch.device) -> float:
    """Mean loss of held-out pictures on their native grids, at fixed noise levels under fixed
    noise: the same numbers in every run, so that runs can be compared."""
    losses = []
    for pupil in held_out:
        latent, weights = pupil.native.to(device), _to(pupil.weights[None], device)
        for level in range(VALIDATION_SIGMAS):
            sigma = (level + 0.5) / VALIDATION_SIGMAS
            stream = draws.stream("validation noise", pupil.image, level)
            noise = draws.standard_normal(stream, tuple(latent.shape)).to(device)
            noised = draws.noised(latent, noise, sigma)
            predicted = predict(velocity, noised, [sigma], [pupil.context], None, latent)
            losses.append(draws.velocity_loss(predicted, latent, noise, weights))
    return torch.stack(losses).mean().item()


class Order:
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


@contextmanager
def exchanged(
    parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor] | None
) -> Iterator[None]:
    """Parameters that have these values for a while; None leaves them as they are."""
    if values is None:
        yield
        return
    before = [parameter.detach().clone() for parameter in parameters]
    _copy(values, parameters)
    try:
        yield
    finally:
        _copy(before, parameters)


class _Run:
    """What changes from step to step. whole says that its parts are all of the same step."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        average: Sequence[torch.Tensor] | None,
        decay: float,
    ) -> None:
        self.parameters, self.optimizer = parameters, optimizer
        self.average, self.decay = average, decay
        self.history = History()
        self.whole = True

    def advance(self, rate: float, loss: float, samples: Sequence[Sample], started: float) -> None:
        """Take the optimiser's step, and write down what it was."""
        self.whole = False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        history = self.history
        if self.average is not None:
            # A short memory at first, so that the start is forgotten.
            decay = min(self.decay, (1 + len(history.losses)) / (10 + len(history.losses)))
            for mean, parameter in zip(self.average, self.parameters):
                mean.lerp_(parameter.detach(), 1 - decay)
        history.losses.append(loss)
        history.tiers.append([sample.tier for sample in samples if sample.rule])
        history.cells.append(_cells(sample.latent for sample in samples))
        history.native_cells.append(_cells(sample.pupil.native for sample in samples))
        history.seconds.append(time.perf_counter() - started)
        self.whole = True

    def validate(self, held_out: Sequence[Pupil], velocity: Velocity, every: int) -> None:
        """Take the validation loss, of the average if there is one, where it is due."""
        done, taken = len(self.history.losses), self.history.validation
        if held_out and every and done % every == 0 and done not in dict(taken):
            with exchanged(self.parameters, self.average):
                loss = validation_loss(held_out, velocity, self.parameters[0].device)
            taken.append((done, loss))

    def state(self) -> dict[str, Any]:
        on_cpu = [parameter.detach().cpu() for parameter in self.parameters]
        return {
            "parameters": on_cpu,
            "average": self.average and [mean.cpu() for mean in self.average],
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        _copy(state["parameters"], self.parameters)
        if self.average is not None:
            _copy(state["average"], self.average)
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])


def _diverged(what: str, step: int, states: States) -> Diverged:
    kept = states.steps()
    left = f"the last good state is that of step {kept[-1]}" if kept else "no state was kept before"
    return Diverged(
        f"{what} at step {step + 1}, so training stopped; {left}: lower the learning rate, or use "
        "a compute precision with more range"
    )


@torch.no_grad()
def _copy(values: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def _to(weights: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if weights is None else weights.to(device)


def _cells(latents: Iterable[torch.Tensor]) -> int:
    return sum(latent.shape[-2:].numel() for latent in latents)
