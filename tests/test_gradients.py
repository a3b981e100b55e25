"""ComfyUI's real model classes at toy size: its forward is theirs, its gradients are the truth.

The truth is a central finite difference of the loss through ComfyUI's own forward, inference
mode, fused kernels and all, with the LoRA merged into the weights.
"""

from __future__ import annotations

import pytest
import torch
import toys

from demotion import adapter, draws

FAMILIES = {
    "flux": (toys.flux, (16, 16, 12)),
    "wan": (toys.wan, (16, 1, 16, 12)),
    "anima": (toys.anima, (16, 1, 8, 12)),
}
SIGMA = 0.6


@pytest.fixture(scope="module", params=list(FAMILIES))
def toy(request, comfy, tmp_path_factory):
    """(MODEL loaded as a node would load it, latent, noise, conditioning) of one family."""
    build, shape = FAMILIES[request.param]
    path = build(tmp_path_factory.mktemp("toys"))
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(path))
    generator = torch.Generator().manual_seed(2)
    latent, noise = torch.randn(2, 1, *shape, generator=generator)
    from pack.host import text

    zero = text.zero_conditioning(model.model)
    tokens = torch.randn(1, 7, zero[0][0].shape[-1], generator=generator)
    conditioning = [
        [
            tokens,
            {
                key: torch.randn(value.shape, generator=generator)
                for key, value in zero[0][1].items()
            },
        ]
    ]
    return model, latent, noise, conditioning


def lora(session, rank: int = 2) -> adapter.Weights:
    from pack.host import families

    linears = families.linears(session.network)
    targets = adapter.match_targets(linears, session.family.targets)
    weights = adapter.probe_weights(linears, targets, rank, seed=3)
    # A larger Delta W than a probe's: the difference quotient must see curvature if it is there.
    return adapter.Weights(
        {name: (down, 10 * up, alpha) for name, (down, up, alpha) in weights.modules.items()}
    )


def native_velocity(comfy, model, z, sigma, conditioning):
    """ComfyUI's own forward, as its sampler calls it."""
    import comfy.sampler_helpers
    import comfy.samplers

    with torch.inference_mode():
        comfy.model_management.load_models_gpu([model])
        model.pre_run()
        conds = comfy.samplers.process_conds(
            model.model,
            torch.zeros_like(z),
            {"positive": comfy.sampler_helpers.convert_cond(conditioning)},
            model.load_device,
            latent_image=torch.zeros_like(z),
            seed=0,
            latent_shapes=[z.shape],
        )
        denoised = comfy.samplers.calc_cond_batch(
            model.model, [conds["positive"]], z.clone(), torch.tensor([sigma]), model.model_options
        )[0]
        return (z - denoised) / sigma


def test_forward_is_comfyuis_own(comfy, toy):
    from pack.host import session

    model, latent, noise, conditioning = toy
    z = draws.noised(latent, noise, SIGMA)
    with session.open_session(model) as live:
        live.check_additions(latent, conditioning)
        plain = live.velocity(z, SIGMA, conditioning).detach()
        zero = adapter.zero_weights(*_targets(live), rank=2, alpha=2, seed=0)
        adapter.Adapter(live.network, zero)
        adapted = live.velocity(z, SIGMA, conditioning).detach()
    native = native_velocity(comfy, model, z, SIGMA, conditioning)
    assert (plain - native).abs().max() == 0
    assert (adapted - native).abs().max() == 0


def test_gradient_is_the_finite_difference_of_the_native_forward(comfy, toy):
    from pack.host import session

    model, latent, noise, conditioning = toy
    z = draws.noised(latent, noise, SIGMA)
    with session.open_session(model) as live:
        live.check_additions(latent, conditioning)
        weights = lora(live)
        parameters = adapter.Adapter(live.network, weights).parameters
        loss = draws.velocity_loss(live.velocity(z, SIGMA, conditioning), latent, noise)
        gradient = torch.autograd.grad(loss, parameters)
    norm = torch.sqrt(sum((part.double() ** 2).sum() for part in gradient))
    direction = [part / norm for part in gradient]

    def loss_at(step: float) -> float:
        merged = merge(model, weights, direction, step)
        velocity = native_velocity(comfy, merged, z, SIGMA, conditioning)
        return draws.velocity_loss(velocity.double(), latent.double(), noise.double()).item()

    quotients = [(loss_at(h) - loss_at(-h)) / (2 * h) for h in (4e-3, 2e-3)]
    print([q / norm.item() for q in quotients])
    assert quotients[1] == pytest.approx(quotients[0], rel=1e-3)
    assert quotients[1] == pytest.approx(norm.item(), rel=1e-3)


def merge(model, weights, direction, step):
    """A MODEL whose Linears hold W + Delta W, the adapter moved by step along a direction."""
    with torch.inference_mode(False):
        merged = model.clone(force_deepcopy=True, disable_dynamic=True)
    count = len(weights.modules)
    for index, (name, (down, up, alpha)) in enumerate(sorted(weights.modules.items())):
        moved_down = down.double() + step * direction[index].double()
        moved_up = up.double() + step * direction[count + index].double()
        linear = merged.model.diffusion_model.get_submodule(name)
        delta = alpha / down.shape[0] * moved_up @ moved_down
        linear.weight.data = (linear.weight.data.double() + delta).float()
    return merged


def _targets(live):
    from pack.host import families

    linears = families.linears(live.network)
    return linears, adapter.match_targets(linears, live.family.targets)
