"""Quantised bases: every module is found, its norm is that of its values, and gradients are right.

Stored float8 and ComfyUI's mixed precision, whose Linear is no torch.nn.Linear. On the CPU ComfyUI
computes both in full precision, so the truth is a finite difference as for any model; int8, which
rounds its inputs everywhere, has a gradient that looks through the rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from native import native_velocity
from safetensors.torch import load_file, save_file

from demotion import adapter, draws

LATENT, NOISE = torch.randn(2, 1, 16, 12, 12, generator=torch.Generator().manual_seed(1))
Z = draws.noised(LATENT, NOISE, 0.6)
MIXED = ("float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8", "int8_tensorwise")
EXACT = ("stored float8", "float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8")


def quantised(source: Path, form: str) -> Path:
    """The toy with the Linears of its blocks in one of ComfyUI's formats, told in metadata."""
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    layout = QUANT_ALGOS[form]["comfy_tensor_layout"]
    scale = {"scale": "recalculate"} if "float8" in form else {}
    state, layers = {}, {}
    for key, value in load_file(source).items():
        if value.ndim == 2 and "blocks" in key:
            state |= QuantizedTensor.from_float(value, layout, **scale).state_dict(key)
            layers[key.removesuffix(".weight")] = {"format": form}
        else:
            state[key] = value
    path = source.with_name(f"{form}.safetensors")
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        path,
        {"_quantization_metadata": json.dumps({"layers": layers})},
    )
    return path


@pytest.fixture(scope="module")
def load(comfy, tmp_path_factory):
    """form -> MODEL, loaded as a node would load it."""
    source = toys.flux(tmp_path_factory.mktemp("toys"))
    loaded = {}

    def build(form: str):
        if form not in loaded:
            stored = form == "stored float8"
            path = quantised(source, form) if form in MIXED else source
            options = {"dtype": torch.float8_e4m3fn} if stored else {}
            with torch.inference_mode():
                loaded[form] = comfy.sd.load_diffusion_model(str(path), model_options=options)
        return loaded[form]

    return build


def targets(live):
    from pack.host import families

    linears = families.linears(live.network)
    return linears, adapter.match_targets(linears, live.family.targets)


def enlarged_probe(live) -> adapter.Weights:
    weights = adapter.probe_weights(*targets(live), rank=2, seed=3)
    modules = {}
    for name, factors in weights.modules.items():
        down, up = factors.tensors["lora_A.weight"], factors.tensors["lora_B.weight"]
        modules[name] = adapter.lora(down, 10 * up, factors.alpha)
    return adapter.Weights(modules)


def loss_and_gradient(live, conditioning, parameters):
    loss = draws.velocity_loss(live.velocity(Z, [0.6], [conditioning]), LATENT, NOISE)
    gradient = torch.autograd.grad(loss, parameters)
    return gradient, torch.sqrt(sum((part.double() ** 2).sum() for part in gradient))


@pytest.mark.parametrize("form", ["stored float8", *MIXED])
def test_every_linear_is_found_with_the_norm_of_its_values(load, form):
    from pack.host import families, session

    plain = families.linears(load("plain").model.diffusion_model)
    with session.open_session(load(form)) as live:
        linears, names = targets(live)
        assert linears.keys() == plain.keys()
        weights = adapter.probe_weights(linears, names, rank=2, seed=0)
        for name in names:
            values = linears[name].weight.detach().dequantize().float()
            norm = torch.linalg.norm(weights.modules[name].delta())
            assert norm == pytest.approx(0.01 * torch.linalg.norm(values).item(), rel=1e-4)
            # The format's error, and nothing more, from the values before it.
            torch.testing.assert_close(
                torch.linalg.norm(values), torch.linalg.norm(plain[name].weight), rtol=0.02, atol=0
            )
        assert torch.nn.Linear in type(linears[names[0]]).__mro__ or form in MIXED


@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr"])
@pytest.mark.parametrize("form", ["stored float8", *MIXED])
def test_a_training_adapter_starts_as_the_quantised_base(load, form, kind):
    from pack.host import session, text

    model = load(form)
    conditioning = text.zero_conditioning(model.model)
    with session.open_session(model) as live:
        base = live.velocity(Z, [0.6], [conditioning]).detach()
        zero = adapter.zero_weights(*targets(live), rank=2, alpha=2, seed=0, kind=kind)
        parameters = adapter.Adapter(live.network, zero).parameters
        assert {parameter.dtype for parameter in parameters} == {torch.float32}
        adapted = live.velocity(Z, [0.6], [conditioning]).detach()
        assert (adapted - base).abs().max() == 0


@pytest.mark.parametrize("form", EXACT)
def test_gradient_is_the_finite_difference_of_the_native_forward(comfy, load, form):
    from pack.host import session, text

    model = load(form)
    conditioning = text.zero_conditioning(model.model)
    with session.open_session(model) as live:
        weights = enlarged_probe(live)
        parts = adapter.Adapter(live.network, weights).parts
        gradient, norm = loss_and_gradient(live, conditioning, parts["A"] + parts["B"])
    step = dict(zip([*weights.modules], zip(gradient, gradient[len(weights.modules) :])))

    def loss_at(size: float) -> float:
        """Of ComfyUI's own forward, the moved Delta W added to each module's values."""
        with session.open_session(model) as live, torch.no_grad():
            for name, factors in weights.modules.items():
                down, up = (
                    factors.tensors[key].double() + size * move / norm
                    for key, move in zip(("lora_A.weight", "lora_B.weight"), step[name])
                )
                linear = live.network.get_submodule(name)
                values = linear.weight.detach().dequantize().double()
                moved = values + adapter.lora(down, up, factors.alpha).delta()
                linear.weight = torch.nn.Parameter(moved.float(), requires_grad=False)
            velocity = live.velocity(Z, [0.6], [conditioning]).double()
        return draws.velocity_loss(velocity, LATENT.double(), NOISE.double()).item()

    quotients = [(loss_at(h) - loss_at(-h)) / (2 * h) for h in (4e-3, 2e-3)]
    print(form, [quotient / norm.item() for quotient in quotients])
    assert quotients[1] == pytest.approx(quotients[0], rel=1e-3)
    assert quotients[1] == pytest.approx(norm.item(), rel=1e-3)


def own_quotient(live, conditioning, step: float):
    """Gradient of an enlarged probe, flat, and the difference quotient along it over its norm,
    both of the injected forward."""
    parameters = adapter.Adapter(live.network, enlarged_probe(live)).parameters
    gradient, norm = loss_and_gradient(live, conditioning, parameters)

    def loss_at(size: float) -> float:
        start = [parameter.clone() for parameter in parameters]
        for parameter, part in zip(parameters, gradient):
            parameter.add_(part / norm, alpha=size)
        velocity = live.velocity(Z, [0.6], [conditioning]).double()
        for parameter, value in zip(parameters, start):
            parameter.copy_(value)
        return draws.velocity_loss(velocity, LATENT.double(), NOISE.double()).item()

    with torch.no_grad():
        quotient = (loss_at(step) - loss_at(-step)) / (2 * step)
    return torch.cat([part.flatten() for part in gradient]), quotient / norm.item()


def test_gradient_through_rounded_inputs_is_that_of_the_smooth_model(load):
    """int8 rounds every input: the forward is a staircase, and the gradient that of what it
    rounds - near the plain model's, and near quotients over steps longer than a stair."""
    from pack.host import session, text

    gradients = []
    for form in ("plain", "int8_tensorwise"):
        model = load(form)
        with session.open_session(model) as live:
            conditioning = text.zero_conditioning(model.model)
            gradient, ratio = own_quotient(live, conditioning, step=0.03)
        print(form, ratio)
        assert ratio == pytest.approx(1, rel=0.05)
        gradients.append(gradient)
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def kept_weights(model, checkpointing: bool) -> int:
    """How many full-precision weights of blocks autograd holds between forward and backward."""
    from pack.host import families, session, text

    conditioning = text.zero_conditioning(model.model)
    saved = []
    with session.open_session(model, checkpointing=checkpointing) as live:
        sizes = {
            linear.out_features * linear.in_features
            for block in families.blocks(live.network).values()
            for linear in families.linears(block).values()
        }
        parameters = adapter.Adapter(live.network, enlarged_probe(live)).parameters
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            loss_and_gradient(live, conditioning, parameters)
    return sum(
        type(tensor) is torch.Tensor and tensor.ndim == 2 and tensor.numel() in sizes
        for tensor in saved
    )


@pytest.mark.parametrize("form", MIXED)
def test_mixed_precision_keeps_no_weight_in_full_precision(load, form):
    assert kept_weights(load(form), checkpointing=False) == 0


def test_stored_float8_keeps_no_weight_in_full_precision_when_checkpointed(load):
    # Each Linear's cast weight is held for the backward otherwise, which shows that they are seen.
    assert kept_weights(load("stored float8"), checkpointing=False) >= 18
    assert kept_weights(load("stored float8"), checkpointing=True) == 0


@pytest.mark.parametrize("form", ["stored float8", *MIXED])
def test_a_lora_does_what_comfyuis_bypass_does_on_a_quantised_base(comfy, load, form):
    """Merged instead, ComfyUI rounds W + Delta W to the base's format."""
    from pack.host import session, text

    model = load(form)
    conditioning = text.zero_conditioning(model.model)
    with session.open_session(model) as live:
        weights = enlarged_probe(live)
        adapter.Adapter(live.network, weights)
        ours = live.velocity(Z, [0.6], [conditioning]).detach()
    bypassed, _ = comfy.sd.load_bypass_lora_for_models(model, None, weights.tensors(), 1.0, 0.0)
    theirs = native_velocity(comfy, bypassed, Z, 0.6, conditioning)
    bypassed.cleanup()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_dora_is_refused_where_it_cannot_compute_and_starts_as_the_base_elsewhere(load):
    from pack.host import session, text

    model = load("float8_e4m3fn")
    conditioning = text.zero_conditioning(model.model)
    with session.open_session(model) as live:
        base = live.velocity(Z, [0.6], [conditioning]).detach()
        zero = adapter.zero_weights(*targets(live), rank=2, alpha=2, seed=0, kind="DoRA")
        adapter.Adapter(live.network, zero)
        assert (live.velocity(Z, [0.6], [conditioning]).detach() - base).abs().max() == 0
    with session.open_session(load("stored float8")) as live:
        with pytest.raises(ValueError, match="stored in torch.float8_e4m3fn: load the model in"):
            adapter.Adapter(live.network, zero)
        with pytest.raises(ValueError, match="DoRA needs the weight of .* on meta"):
            adapter.Adapter(live.network, zero, torch.device("meta"))


def test_smoothed_inputs_are_refused(load):
    from pack.host import families

    network = load("nvfp4").clone(disable_dynamic=True, force_deepcopy=True).model.diffusion_model
    linear = network.single_blocks[0].linear1
    linear.pre_quant_scale = torch.nn.Parameter(torch.ones(128), requires_grad=False)
    with pytest.raises(ValueError, match="smooths the inputs of 1 Linears, such as single_blocks"):
        families.linears(network)
