"""Adapters through PEFT: initial values, injection, names, files."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import Linear

from demotion import adapter


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"attn": Linear(6, 6), "mlp": Linear(6, 6)})
            for _ in range(11)
        )
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block["mlp"](torch.tanh(block["attn"](x))))
        return x


def linears(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, torch.nn.Linear)}


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def test_targets_are_a_pattern_and_its_faults_are_named():
    net = Net()
    assert adapter.match_targets(linears(net), r"^blocks\.1\.") == ["blocks.1.attn", "blocks.1.mlp"]
    assert len(adapter.match_targets(linears(net), "attn")) == 11
    with pytest.raises(ValueError, match="matches none of the model's 22 Linears"):
        adapter.match_targets(linears(net), "decoder")
    with pytest.raises(ValueError, match="not a regular expression"):
        adapter.match_targets(linears(net), "(")


def test_a_probe_adapter_is_one_percent_of_each_weight_and_seeded():
    net = Net()
    targets = adapter.match_targets(linears(net), "attn")
    weights = adapter.probe_weights(linears(net), targets, rank=2, seed=5)
    for name, factors in weights.modules.items():
        norm = torch.linalg.norm(net.get_submodule(name).weight)
        assert torch.linalg.norm(factors.delta()) == pytest.approx(0.01 * norm.item(), rel=1e-5)
    again = adapter.probe_weights(linears(net), targets, rank=2, seed=5)
    other = adapter.probe_weights(linears(net), targets, rank=2, seed=6)
    assert weights.fingerprint == again.fingerprint != other.fingerprint


def random_factors(kind: str, seed: int = 2) -> adapter.Factors:
    """Factors of a kind for a 6x6 weight, nothing of them zero."""
    # Of rank 1, so that a LoKr's second factor is a product.
    rank = 1 if kind == "LoKr" else 2
    start = adapter.zero_weights(linears(Net()), ["blocks.0.attn"], rank, 3.0, 0, kind)
    generator = torch.Generator().manual_seed(seed)
    noise = {
        key: torch.randn(value.shape, generator=generator)
        for key, value in start.modules["blocks.0.attn"].tensors.items()
    }
    return adapter.Factors(noise, 3.0)


@pytest.mark.parametrize("kind", adapter.KINDS)
def test_a_training_adapter_starts_as_the_base_with_a_gradient(kind):
    net = Net()
    before = net(X)
    start = adapter.zero_weights(linears(net), ["blocks.0.mlp"], 1, 8.0, 0, kind)
    assert start.kind == kind and start.modules["blocks.0.mlp"].delta().abs().max() == 0
    again = adapter.zero_weights(linears(net), ["blocks.0.mlp"], 1, 8.0, 0, kind)
    other = adapter.zero_weights(linears(net), ["blocks.0.mlp"], 1, 8.0, 1, kind)
    assert start.fingerprint == again.fingerprint != other.fingerprint
    made = adapter.Adapter(net, start)
    assert torch.equal(net(X), before)
    assert list(made.parts) == start.parts
    gradients = torch.autograd.grad(net(X).square().sum(), made.parameters)
    assert sum(gradient.abs().max() > 0 for gradient in gradients) >= 1


@pytest.mark.parametrize("kind", adapter.KINDS)
def test_every_kind_changes_a_module_by_its_formula_and_touches_no_global_state(kind):
    net, plain = Net(), Net()
    factors = random_factors(kind)
    state = torch.random.get_rng_state()
    made = adapter.Adapter(net, adapter.Weights({"blocks.0.attn": factors}))
    out = net(X)
    assert torch.equal(torch.random.get_rng_state(), state)
    weight = plain.get_submodule("blocks.0.attn").weight
    changed = weight + factors.delta()
    if kind == "DoRA":
        changed = factors.tensors["dora_scale"] * changed / weight.norm(dim=1, keepdim=True)
    weight.copy_(changed)
    torch.testing.assert_close(out, plain(X))
    trained = [id(p) for p in net.parameters() if p.requires_grad]
    assert sorted(trained) == sorted(map(id, made.parameters))


@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr"])
def test_gradient_is_that_of_delta_w(kind):
    net, factors = Net(), random_factors(kind)
    made = adapter.Adapter(net, adapter.Weights({"blocks.0.attn": factors}))
    gradient = torch.autograd.grad(net(X).square().sum(), made.parameters)
    leaves = {key: value.clone().requires_grad_() for key, value in factors.tensors.items()}
    plain = Net()
    weight = plain.get_submodule("blocks.0.attn").weight + adapter.Factors(leaves, 3.0).delta()
    out = torch.func.functional_call(plain, {"blocks.0.attn.weight": weight}, X)
    expected = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_kinds_may_differ_between_modules_and_parts_are_told_apart():
    net, plain = Net(), Net()
    modules = {f"blocks.{n}.mlp": random_factors(kind) for n, kind in enumerate(adapter.KINDS)}
    modules.pop("blocks.1.mlp")
    made = adapter.Adapter(net, adapter.Weights(modules))
    for name, factors in modules.items():
        plain.get_submodule(name).weight += factors.delta()
    torch.testing.assert_close(net(X), plain(X))
    assert {part: len(tensors) for part, tensors in made.parts.items()} == {
        "A": 1,
        "B": 1,
        "w1": 3,
        "w2": 4,
    }
    gradients = torch.autograd.grad(net(X).square().sum(), made.parameters)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr"])
def test_parameters_lie_where_they_are_asked_for_in_float32_and_the_base_stays(kind):
    net = Net().bfloat16()
    weights = adapter.Weights({"blocks.0.attn": random_factors(kind)})
    made = adapter.Adapter(net, weights, torch.device("meta"))
    assert {(p.device.type, p.dtype) for p in made.parameters} == {("meta", torch.float32)}
    base = net.get_submodule("blocks.0.attn").base_layer.weight
    assert torch.equal(base, Net().get_submodule("blocks.0.attn").weight.bfloat16())


def test_what_a_mask_leaves_out_has_no_gradient():
    net, factors = Net(), random_factors("LoRA")
    mask = torch.zeros(6, 2)
    mask[:3, 0] = 1
    masked = adapter.Factors(factors.tensors, factors.alpha, mask)
    made = adapter.Adapter(net, adapter.Weights({"blocks.0.attn": masked}))
    (gradient,) = torch.autograd.grad(net(X).square().sum(), made.parts["B"])
    assert torch.equal(gradient != 0, mask.bool())


def test_injection_computes_alpha_over_rank_b_a_on_exactly_the_named_modules():
    """blocks.1 must not drag blocks.10 along, and ranks may differ from module to module."""
    net, plain = Net(), Net()
    generator = torch.Generator().manual_seed(2)
    modules = {
        "blocks.1.attn": adapter.lora(
            torch.randn(2, 6, generator=generator),
            torch.randn(6, 2, generator=generator),
            4.0,
        ),
        "blocks.10.mlp": adapter.lora(
            torch.randn(3, 6, generator=generator),
            torch.randn(6, 3, generator=generator),
            1.0,
        ),
    }
    made = adapter.Adapter(net, adapter.Weights(modules))
    for name, factors in modules.items():
        down, up = factors.tensors["lora_A.weight"], factors.tensors["lora_B.weight"]
        plain.get_submodule(name).weight += factors.alpha / down.shape[0] * up @ down
    torch.testing.assert_close(net(X), plain(X))
    assert [p.shape for p in made.parameters] == [(2, 6), (3, 6), (6, 2), (6, 3)]
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{part}.default.weight" for name in modules for part in "AB"
    }


@pytest.mark.parametrize("kind", adapter.KINDS)
def test_values_of_every_kind_survive_injection(kind):
    weights = adapter.Weights({"blocks.0.attn": random_factors(kind)})
    back = adapter.Adapter(Net(), weights).weights()
    for key, value in weights.modules["blocks.0.attn"].tensors.items():
        found = back.modules["blocks.0.attn"].tensors[key]
        # A DoRA's magnitude is converted to PEFT's and back.
        if key == "dora_scale":
            torch.testing.assert_close(found, value, rtol=1e-6, atol=0)
        else:
            assert torch.equal(found, value)


def test_values_survive_injection_and_the_file_bit_for_bit(tmp_path):
    net = Net()
    weights = adapter.probe_weights(linears(net), ["blocks.0.attn", "blocks.3.mlp"], 2, 0)
    back = adapter.Adapter(net, weights).weights()
    assert back.fingerprint == weights.fingerprint
    back.save(tmp_path / "lora.safetensors", {"ss_steps": "3"})
    loaded = load_file(tmp_path / "lora.safetensors")
    assert set(loaded) == {
        f"diffusion_model.{name}.{key}"
        for name in ("blocks.0.attn", "blocks.3.mlp")
        for key in ("lora_A.weight", "lora_B.weight", "alpha")
    }
    assert all(torch.equal(loaded[key], value) for key, value in weights.tensors().items())


def test_the_same_lora_and_metadata_are_the_same_bytes(tmp_path):
    weights = adapter.zero_weights(linears(Net()), ["blocks.0.attn"], 2, 2.0, 0)
    metadata = {f"key{n}": str(n) for n in range(12)}
    contents = set()
    for n in range(5):
        weights.save(tmp_path / f"{n}.safetensors", dict(sorted(metadata.items(), reverse=n % 2)))
        contents.add((tmp_path / f"{n}.safetensors").read_bytes())
    assert len(contents) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == metadata


def test_a_lora_for_another_shape_is_refused_by_module():
    net = Net()
    factors = adapter.lora(torch.zeros(2, 7), torch.zeros(6, 2), 2.0)
    wrong = adapter.Weights({"blocks.0.attn": factors})
    with pytest.raises(
        ValueError, match="blocks.0.attn is for a weight of 6x7, the model's is 6x6"
    ):
        adapter.Adapter(net, wrong)
