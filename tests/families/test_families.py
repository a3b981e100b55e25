"""Every family at toy size: its forward is ComfyUI's, its gradient is the truth, and nothing else
moves.

The truth is a central finite difference of the loss through ComfyUI's own forward, inference mode,
fused kernels and all, with the LoRA merged into the weights. One line a family is printed at the
end.
"""

from __future__ import annotations

import contextlib
import hashlib

import numpy as np
import pytest
import torch
from family_toys import TOYS
from native import native_velocity

from demotion import adapter, draws, gate, probe, states, train

SIGMA = 0.6


@pytest.fixture(scope="module", params=list(TOYS))
def toy(request, comfy, tmp_path_factory):
    """(kind, MODEL, latent, noise, conditioning) of one family."""
    entry = TOYS[request.param]
    model = entry.model(tmp_path_factory.mktemp("toys"))
    generator = torch.Generator().manual_seed(2)
    latent, noise = torch.randn(2, 1, *entry.latent, generator=generator)
    return request.param, model, latent, noise, entry.conditioning(model)


@pytest.fixture
def line(toy, family_lines):
    """What the printed line of the family says, by column."""
    return family_lines.setdefault(toy[0], {})


def lora(session, rank: int = 2) -> adapter.Weights:
    weights = adapter.probe_weights(*targets(session), rank, seed=3)
    # A larger Delta W than a probe's: the difference quotient must see curvature if it is there.
    return enlarged(weights, 10)


def enlarged(weights: adapter.Weights, factor: float) -> adapter.Weights:
    return adapter.Weights(
        {
            name: adapter.lora(
                made.tensors["lora_A.weight"], factor * made.tensors["lora_B.weight"], made.alpha
            )
            for name, made in weights.modules.items()
        }
    )


def _matrices(factors: adapter.Factors, up_scale: float = 1.0):
    return factors.tensors["lora_A.weight"], up_scale * factors.tensors["lora_B.weight"]


def targets(session):
    from pack.host import families

    linears = families.linears(session.network)
    return linears, adapter.match_targets(linears, session.family.targets)


def gradient(live, parameters, latent, noise, conditioning, sigma=SIGMA):
    z = draws.noised(latent, noise, sigma)
    loss = draws.velocity_loss(live.velocity(z, [sigma], [conditioning]), latent, noise)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def norm_of(gradients) -> torch.Tensor:
    return torch.sqrt(sum((part.double() ** 2).sum() for part in gradients))


def distance(gradients, others) -> float:
    """Relative L2 distance."""
    difference = norm_of([a - b for a, b in zip(gradients, others, strict=True)])
    return float(difference / norm_of(others))


def test_forward_is_comfyuis_own(comfy, toy, line):
    from pack.host import session

    _, model, latent, noise, conditioning = toy
    z = draws.noised(latent, noise, SIGMA)
    with session.open_session(model) as live:
        live.check_additions(latent, conditioning)
        plain = live.velocity(z, [SIGMA], [conditioning]).detach()
        zero = adapter.zero_weights(*targets(live), rank=2, alpha=2, seed=0)
        live.adapt(zero)
        adapted = live.velocity(z, [SIGMA], [conditioning]).detach()
    native = native_velocity(comfy, model, z, SIGMA, conditioning)
    line["forward"] = f"{max((v - native).abs().max() for v in (plain, adapted)):.0g}"
    assert native.std() > 0.01
    assert (plain - native).abs().max() == 0
    assert (adapted - native).abs().max() == 0


def test_no_grid_of_whole_patches_is_padded(comfy, toy, monkeypatch):
    """Odd numbers of patches on both axes, as a demoted grid may have."""
    import comfy.ldm.common_dit
    from pack.host import families, session

    _, model, latent, _, conditioning = toy
    pad = comfy.ldm.common_dit.pad_to_patch_size

    def watched(x, *args, **kwargs):
        out = pad(x, *args, **kwargs)
        assert out.shape == x.shape
        return out

    monkeypatch.setattr(comfy.ldm.common_dit, "pad_to_patch_size", watched)
    patch = families.family_of(model.model).patch
    z = torch.randn(
        *latent.shape[:-2], 7 * patch, 5 * patch, generator=torch.Generator().manual_seed(1)
    )
    with session.open_session(model) as live, torch.no_grad():
        assert live.velocity(z, [SIGMA], [conditioning]).shape == z.shape


def test_gradient_is_the_finite_difference_of_the_native_forward(comfy, toy, line):
    from pack.host import families, session

    _, model, latent, noise, conditioning = toy
    z = draws.noised(latent, noise, SIGMA)
    with session.open_session(model) as live:
        live.check_additions(latent, conditioning)
        weights = lora(live)
        parameters = live.adapt(weights).parameters
        parts = gradient(live, parameters, latent, noise, conditioning)
    norm = norm_of(parts)
    at = (comfy, model, weights, z, latent, noise, conditioning)
    along = merged_loss(*at, [part / norm for part in parts])
    quotient = settled(along, 8e-3, agreeing=3e-4 * norm.item())
    line["gradient"] = f"{quotient / norm.item():.5f}"
    assert quotient == pytest.approx(norm.item(), rel=1e-3)
    # Along the gradient itself an error at right angles to it would hardly show. In a random
    # direction, every tensor's share the size of its gradient, it does.
    if toy[0] in families.FAMILIES:
        assert all(part.norm() > 0 for part in parts), "a target is not on the image's path"
    generator = torch.Generator().manual_seed(6)
    direction = []
    for part in parts:
        random = torch.randn(part.shape, generator=generator)
        direction.append(random * part.norm() / random.norm() / norm)
    slope = sum((a.double() * b.double()).sum() for a, b in zip(parts, direction)).item()
    across = settled(merged_loss(*at, direction), 8e-2, agreeing=1e-5 * norm.item())
    line["across"] = f"{abs(across - slope) / norm.item():.0e}"
    assert across == pytest.approx(slope, abs=1e-5 * norm.item())


def settled(loss_at, largest: float, agreeing: float) -> float:
    """Slope of the loss at 0, from steps that are halved until halving changes nothing.

    The first error of a central difference falls with the square of the step, so two of them tell
    it away.
    """
    quotients = []
    before = None
    for h in (largest / 2**halving for halving in range(6)):
        quotients.append((loss_at(h) - loss_at(-h)) / (2 * h))
        if len(quotients) > 1:
            slope = (4 * quotients[-1] - quotients[-2]) / 3
            if before is not None and abs(slope - before) <= agreeing:
                return slope
            before = slope
    raise AssertionError("no step of the difference quotient is settled")


def merged_loss(comfy, model, weights, z, latent, noise, conditioning, direction):
    """Loss of the native forward with W + Delta W, the adapter moved by a step along a
    direction."""
    with torch.inference_mode(False):
        merged = model.clone(force_deepcopy=True, disable_dynamic=True)
    network = merged.model.diffusion_model
    plain = {name: network.get_submodule(name).weight.data.double() for name in weights.modules}
    count = len(weights.modules)

    def loss_at(step: float) -> float:
        for index, (name, made) in enumerate(sorted(weights.modules.items())):
            moved_down = made.tensors["lora_A.weight"] + step * direction[index].double()
            moved_up = made.tensors["lora_B.weight"] + step * direction[count + index].double()
            delta = adapter.lora(moved_down, moved_up, made.alpha).delta()
            network.get_submodule(name).weight.data = (plain[name] + delta).float()
        velocity = native_velocity(comfy, merged, z, SIGMA, conditioning)
        # Not in float32, whose rounding of the mean is as large as what a small step does.
        return ((velocity.double() - (noise - latent).double()) ** 2).mean().item()

    return loss_at


def test_checkpointing_changes_a_gradient_by_rounding_at_most(toy, line):
    from pack.host import session

    _, model, latent, noise, conditioning = toy
    found = {}
    for checkpointing in (False, True):
        with session.open_session(model, checkpointing=checkpointing) as live:
            live.check_additions(latent, conditioning)
            parameters = live.adapt(lora(live)).parameters
            found[checkpointing] = gradient(live, parameters, latent, noise, conditioning)
    apart = distance(found[True], found[False])
    line["checkpoint"] = f"{apart:.0g}"
    assert apart < 1e-5


def test_samples_that_share_a_forward_have_the_velocities_and_the_mean_gradient_of_singles(
    toy, line
):
    """Of a batch at three sigmas, with three noises and captions of one length."""
    from pack.host import families, session

    kind, model, *_ = toy
    sigmas = [0.3, 0.6, 0.85]
    generator = torch.Generator().manual_seed(7)
    latents, noises = torch.randn(2, 3, 1, *TOYS[kind].latent, generator=generator)
    captions = [TOYS[kind].conditioning(model, seed) for seed in range(3)]
    z = torch.cat([draws.noised(*sample) for sample in zip(latents, noises, sigmas)])
    with session.open_session(model) as live:
        live.check_additions(latents[0], captions[0])
        parameters = live.adapt(lora(live)).parameters
        signatures = {live.velocity.signature(caption, z[:1].shape) for caption in captions}
        if kind not in families.FAMILIES and live.family.alone(live.network, ()):
            assert len(signatures) == 3
            with pytest.raises(ValueError, match="3 samples of a .* cannot share a forward"):
                live.velocity(z, sigmas, captions)
            line["batch"] = "one sample a forward"
            return
        assert len(signatures) == 1
        together = live.velocity(z, sigmas, captions)
        loss = draws.velocity_loss(together, latents.flatten(0, 1), noises.flatten(0, 1))
        batch = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        singles, apart = [], []
        for index, (own, alone) in enumerate(zip(z, together.detach())):
            sample = latents[index], noises[index], captions[index], sigmas[index]
            singles.append(gradient(live, parameters, *sample))
            velocity = live.velocity(own[None], [sigmas[index]], [captions[index]]).detach()[0]
            apart.append(((alone - velocity).norm() / velocity.norm()).item())
    mean = [sum(parts) / 3 for parts in zip(*singles)]
    line["batch"] = f"{max(apart):.0e}, {distance(batch, mean):.0e}"
    assert max(apart) < 1e-5
    assert distance(batch, mean) < 1e-4
    assert distance(singles[0], singles[1]) > 0.1


def test_a_batch_is_the_mean_of_its_singles_and_captions_stay_with_their_pictures(toy, tmp_path):
    """A step of the trainer on two pictures against the gradients of its two samples."""
    from pack.host import session

    kind, model, latent, noise, conditioning = toy
    pictures = [latent, noise]
    captions = [conditioning, TOYS[kind].conditioning(model, seed=5, tokens=4)]
    pupils = [train.Pupil(*pair) for pair in zip(pictures, [{}] * 2, [{None: None}] * 2, captions)]
    closed = gate.Gate((), measured=False, margin=None, source="none", native_tier=256)
    settings = train.Settings(steps=1, learning_rate=1e-6, batch_size=2, seed=4)
    with session.open_session(model) as live:
        live.check_additions(latent, conditioning)
        parameters = live.adapt(lora(live)).parameters
        batch = [torch.zeros_like(parameter) for parameter in parameters]
        order = train.Order([1, 1], settings.seed)
        singles = []
        for sample in range(2):
            sigma = 1 - draws.stream("train sigma", settings.seed, 0, sample).random()
            own_noise = draws.standard_normal(
                draws.stream("train noise", settings.seed, 0, sample), tuple(latent.shape)
            )
            which = order[sample]
            singles.append(
                gradient(live, parameters, pictures[which], own_noise, captions[which], sigma)
            )
        for parameter, total in zip(parameters, batch):
            parameter.register_hook(total.add_)
        train.train(
            pupils,
            closed,
            settings,
            live.velocity,
            parameters,
            states.States(tmp_path, keep=1),
            lambda history: None,
        )
    mean = [(a + b) / 2 for a, b in zip(*singles)]
    assert distance(batch, mean) < 1e-6
    assert distance(singles[0], singles[1]) > 0.1


def test_neither_the_order_of_pictures_nor_another_run_changes_a_bit(toy):
    from pack.host import session

    kind, model, latent, noise, conditioning = toy
    subjects = [
        probe.Subject(name, {"src": x, "null": x}, {"src": None, "null": None}, caption)
        for name, x, caption in (
            ("one", latent, conditioning),
            ("two", noise, TOYS[kind].conditioning(model, seed=5, tokens=4)),
        )
    ]
    found = []
    for order in (subjects, subjects[::-1]):
        with session.open_session(model) as live:
            live.check_additions(latent, conditioning)
            parts = live.adapt(lora(live)).parts
            cells = {
                subject.image: probe.measure_cell(
                    subject, (0.4, 0.6), 2, 0, True, live.velocity, parts, lambda: None
                )
                for subject in order
            }
            found.append(cells)
    for name in ("one", "two"):
        assert np.array_equal(found[0][name].gram, found[1][name].gram)
    assert not np.array_equal(found[0]["one"].gram, found[0]["two"].gram)


def state_of(model):
    """Bytes, hooks, attributes and classes of a MODEL."""
    digest = hashlib.sha256()
    for name, value in sorted(model.model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    modules = [
        (
            name,
            type(module),
            sorted(vars(type(module))),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            {key for key in vars(module) if not key.startswith("_")},
            "forward" in vars(module),
        )
        for name, module in model.model.named_modules()
    ]
    return digest.hexdigest(), modules, sorted(model.object_patches), sorted(model.patches)


class Cancelled(BaseException):
    """What ComfyUI's interrupt is: no Exception."""


@pytest.mark.parametrize("ending", ["ended", "raised", "cancelled in the forward"])
def test_the_callers_model_is_as_it_was(comfy, toy, ending):
    from pack.host import families, session

    _, model, latent, noise, conditioning = toy
    native_velocity(comfy, model, latent, SIGMA, conditioning)
    before = state_of(model)
    with contextlib.suppress(Cancelled), session.open_session(model, checkpointing=True) as live:
        parameters = live.adapt(lora(live)).parameters
        if ending == "raised":
            raise Cancelled
        if ending != "ended":
            next(iter(families.blocks(live.network).values())).register_forward_hook(_cancel)
        gradient(live, parameters, latent, noise, conditioning)
        assert ending == "ended"
    assert state_of(model) == before


def _cancel(*_):
    raise Cancelled
