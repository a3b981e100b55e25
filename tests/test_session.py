"""Sessions: the caller's model and ComfyUI's globals are the same after, however a run ends."""

from __future__ import annotations

import hashlib

import pytest
import torch
import toys

from demotion import adapter, draws


@pytest.fixture(scope="module")
def model(comfy, tmp_path_factory):
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(toys.flux(tmp_path_factory.mktemp("toys"))))


@pytest.fixture(scope="module")
def conditioning():
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(1, 5, 32, generator=generator),
            {"pooled_output": torch.randn(1, 16, generator=generator)},
        ]
    ]


LATENT = torch.randn(1, 16, 12, 12, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(1, 16, 12, 12, generator=torch.Generator().manual_seed(2))


def state_of(comfy, model):
    """Bytes, hooks and attributes of the caller's model, and ComfyUI's globals."""
    import comfy.quant_ops

    digest = hashlib.sha256()
    for name, value in sorted(model.model.state_dict().items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    modules = [
        (
            name,
            type(module),
            len(module._forward_hooks),
            len(module._backward_hooks),
            sorted(vars(module)),
        )
        for name, module in model.model.named_modules()
    ]
    kernels = {name: value for name, value in vars(comfy.quant_ops.ck).items() if "rope" in name}
    loaded = [id(entry.model) for entry in comfy.model_management.current_loaded_models]
    return (
        digest.hexdigest(),
        modules,
        kernels,
        comfy.model_management.in_training,
        dict(vars(torch.Tensor)),
        loaded,
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        sorted(model.object_patches),
        sorted(model.patches),
        torch.overrides._get_current_function_mode(),
    )


def gradients(live, conditioning):
    weights = adapter.probe_weights(*_targets(live), rank=2, seed=0)
    parameters = adapter.Adapter(live.network, weights).parameters
    return _gradient(live, parameters, conditioning)


def _gradient(live, parameters, conditioning, latent=LATENT, noise=NOISE):
    predicted = live.velocity(draws.noised(latent, noise, 0.5), [0.5], [conditioning])
    return torch.autograd.grad(draws.velocity_loss(predicted, latent, noise), parameters)


def _targets(live):
    from pack.host import families

    linears = families.linears(live.network)
    return linears, adapter.match_targets(linears, live.family.targets)


class Cancelled(BaseException):
    """What ComfyUI's interrupt is: no Exception."""


def cancel_in(live):
    """Raise in the middle of the network's forward."""

    def hook(*_):
        raise Cancelled

    list(live.network.single_blocks)[-1].register_forward_hook(hook)


@pytest.mark.parametrize("ending", ["ended", "raised", "cancelled in the forward"])
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "inference mode"])
def test_nothing_is_changed_afterwards(comfy, model, conditioning, ending, inside):
    from pack.host import session

    with torch.inference_mode(inside):
        before = state_of(comfy, model)
        try:
            with session.open_session(model) as live:
                assert comfy.model_management.in_training
                gradients(live, conditioning)
                if ending == "raised":
                    raise Cancelled
                if ending != "ended":
                    cancel_in(live)
                    _gradient(live, [torch.nn.Parameter(torch.zeros(1))], conditioning)
        except Cancelled:
            assert ending != "ended"
        assert state_of(comfy, model) == before


def test_two_sessions_give_the_same_bits_whatever_ran_between(model, conditioning):
    from pack.host import session

    def first():
        with session.open_session(model) as live:
            return gradients(live, conditioning), live.fingerprint

    once, name = first()
    with session.open_session(model) as live:
        weights = adapter.probe_weights(*_targets(live), rank=2, seed=0)
        parameters = adapter.Adapter(live.network, weights).parameters
        for size in (8, 16, 10, 12, 8):
            generator = torch.Generator().manual_seed(size)
            latent, noise = torch.randn(2, 1, 16, size, size, generator=generator)
            _gradient(live, parameters, conditioning, latent, noise)
        within = _gradient(live, parameters, conditioning)
    again, same_name = first()
    assert name == same_name
    for a, b, c in zip(once, within, again):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_without_the_sessions_additions_these_blocks_have_no_gradient(model, conditioning):
    """The reason for OutOfPlaceAdditions: left in place, autograd refuses to differentiate."""
    from pack.host import session

    with session.open_session(model) as live:
        live.additions.enabled = False
        with pytest.raises(RuntimeError, match="inplace operation"):
            gradients(live, conditioning)


def test_a_model_that_ignores_the_result_of_an_addition_keeps_it(
    model, conditioning, monkeypatch
):
    from pack.host import session

    with session.open_session(model) as live:
        network = live.network
        plain = network.forward

        def ignoring(*args, **kwargs):
            out = plain(*args, **kwargs) * 1.0
            out.add_(1.0)
            return out

        monkeypatch.setattr(network, "forward", ignoring)
        live.check_additions(LATENT, conditioning)
        assert not live.additions.enabled


def test_models_that_cannot_be_right_are_refused_by_name(comfy, model):
    import comfy.model_sampling
    from pack.host import session

    clone = model.clone()
    clone.cached_patcher_init = None
    with pytest.raises(ValueError, match="Load Diffusion Model"):
        with session.open_session(clone):
            pass

    class NotFlow:
        class model_type:
            name = "EPS"

        model_sampling = comfy.model_sampling.EPS()

    from pack.host import families

    with pytest.raises(ValueError, match="NotFlow of type EPS, which is not plain flow matching"):
        families.family_of(NotFlow())


def test_conditioning_with_places_or_schedules_is_refused():
    from pack.host import text

    plain = [torch.zeros(1, 2, 4), {}]
    text.check_plain([plain], "picture 1")
    with pytest.raises(ValueError, match="picture 1 has 2 entries"):
        text.check_plain([plain, plain], "picture 1")
    with pytest.raises(ValueError, match="carries area"):
        text.check_plain([[plain[0], {"area": (1, 1, 0, 0)}]], "picture 1")
