"""How a session computes: precision, streamed weights, memory; on the toy Flux."""

from __future__ import annotations

import pytest
import torch
from family_toys import TOYS
from native import native_velocity
from test_families import SIGMA, distance, gradient, lora
from torch.nn import Linear

from demotion import adapter, draws


@pytest.fixture(scope="module")
def toy(comfy, tmp_path_factory):
    """(MODEL, latent, noise, conditioning) of the toy Flux."""
    model = TOYS["Flux"].model(tmp_path_factory.mktemp("toys"))
    generator = torch.Generator().manual_seed(2)
    latent, noise = torch.randn(2, 1, *TOYS["Flux"].latent, generator=generator)
    return model, latent, noise, TOYS["Flux"].conditioning(model)


def found(toy, compute="model", checkpointing=False):
    from pack.host import session

    model, latent, noise, conditioning = toy
    with session.open_session(model, compute, checkpointing) as live:
        live.check_additions(latent, conditioning)
        parameters = live.adapt(lora(live)).parameters
        return gradient(live, parameters, latent, noise, conditioning), live.environment["dtype"]


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_forward_in_a_precision_is_comfyuis_own_in_it(comfy, toy, compute):
    from pack.host import session

    model, latent, noise, conditioning = toy
    z = draws.noised(latent, noise, SIGMA)
    with session.open_session(model, compute) as live:
        live.check_additions(latent, conditioning)
        ours = live.velocity(z, [SIGMA], [conditioning]).detach()
    with torch.inference_mode(False):
        native = model.clone(force_deepcopy=True, disable_dynamic=True)
    native.set_model_compute_dtype(session.COMPUTE[compute])
    theirs = native_velocity(comfy, native, z, SIGMA, conditioning)
    assert (ours - theirs).abs().max() == 0


def test_precisions_below_float32_move_a_gradient_a_little(toy):
    exact, name = found(toy)
    assert name == "float32"
    moved = {compute: found(toy, compute) for compute in ("bf16", "fp16")}
    assert moved["bf16"][1] == "bfloat16" and moved["fp16"][1] == "float16"
    # 2^-8 and 2^-11 of rounding in each of some twenty operations.
    assert 0.002 < distance(moved["bf16"][0], exact) < 0.2
    assert 0.0002 < distance(moved["fp16"][0], exact) < 0.02


def test_small_gradients_do_not_vanish_in_fp16(toy):
    """The gradient of a mean over many elements is below fp16's smallest number without a scale."""
    model, latent, noise, conditioning = toy
    # A target so near the prediction that the error, and the gradient, is tiny.
    from pack.host import session

    found = {}
    for compute in ("fp16", "fp32"):
        with session.open_session(model, compute) as live:
            live.check_additions(latent, conditioning)
            parameters = live.adapt(lora(live)).parameters
            predicted = live.velocity(draws.noised(latent, noise, SIGMA), [SIGMA], [conditioning])
            loss = ((predicted - predicted.detach() + 1e-4) ** 2).mean()
            found[compute] = torch.autograd.grad(loss, parameters)
    assert distance(found["fp16"], found["fp32"]) < 0.02


def test_streamed_weights_give_the_same_gradient_to_the_bit(comfy, toy, monkeypatch):
    whole, _ = found(toy, checkpointing=True)
    management = comfy.model_management

    def load_in_part(patchers, **_):
        for patcher in patchers:
            patcher.model_patches_to(patcher.load_device)
            patcher.load(patcher.load_device, lowvram_model_memory=200_000)
            assert patcher.model.model_lowvram

    monkeypatch.setattr(management, "load_models_gpu", load_in_part)
    streamed, _ = found(toy, checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, streamed))
    with pytest.raises(ValueError, match="turn checkpointing on"):
        found(toy)


def test_streams_have_no_buffer_that_a_later_weight_would_overwrite(comfy, toy):
    from pack.host import session

    before = comfy.model_management.NUM_STREAMS
    comfy.model_management.NUM_STREAMS = 2
    try:
        with session.open_session(toy[0]):
            assert comfy.model_management.NUM_STREAMS == 0
        assert comfy.model_management.NUM_STREAMS == 2
    finally:
        comfy.model_management.NUM_STREAMS = before


def test_checkpointing_keeps_less_than_half_and_two_samples_twice_as_much(toy):
    from pack.host import families, memory, session

    model, _, _, conditioning = toy
    latent = torch.randn(1, 16, 32, 32, generator=torch.Generator().manual_seed(0))
    kept = {}
    for checkpointing, count in ((False, 1), (True, 1), (False, 2)):
        with session.open_session(model, checkpointing=checkpointing) as live:
            live.check_additions(latent, conditioning)
            formula = memory.activation_bytes(
                live.network, families.family_of(model.model), 256, torch.float32, False
            )
            live.adapt(lora(live))
            known = {value.untyped_storage()._cdata for value in live.network.parameters()}
            saved = {}

            def keep(tensor, saved=saved, known=known):
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    saved[storage._cdata] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                samples = latent.expand(count, -1, -1, -1)
                live.velocity(samples, [SIGMA] * count, [conditioning] * count)
            kept[checkpointing, count] = sum(saved.values())
    assert kept[True, 1] < kept[False, 1] / 2
    assert kept[False, 1] == pytest.approx(formula, rel=0.5)
    assert kept[False, 2] == pytest.approx(2 * kept[False, 1], rel=0.1)


def test_an_overwritten_input_of_a_checkpointed_block_is_an_error_not_a_gradient():
    from pack.host import session

    linear = Linear(4, 4)
    linear.forward = session._checkpointed(linear.forward)
    x = torch.randn(2, 4, requires_grad=True) * 1.0
    out = linear(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="overwritten before the backward"):
        out.backward()


def test_the_probes_adapter_is_of_the_same_size_whatever_the_precision(toy):
    from pack.host import session
    from test_families import targets

    norms = []
    for compute in ("bf16", "fp32"):
        with session.open_session(toy[0], compute) as live:
            weights = adapter.probe_weights(*targets(live), rank=2, seed=0)
            norms.append(weights.fingerprint)
    assert norms[0] == norms[1]
