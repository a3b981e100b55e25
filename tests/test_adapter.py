"""LoRA through PEFT: initial values, injection, names, files."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from demotion import adapter


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"attn": torch.nn.Linear(6, 6), "mlp": torch.nn.Linear(6, 6)})
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
    for name, (down, up, alpha) in weights.modules.items():
        norm = torch.linalg.norm(net.get_submodule(name).weight)
        assert torch.linalg.norm(alpha / 2 * up @ down) == pytest.approx(
            0.01 * norm.item(), rel=1e-5
        )
    again = adapter.probe_weights(linears(net), targets, rank=2, seed=5)
    other = adapter.probe_weights(linears(net), targets, rank=2, seed=6)
    assert weights.fingerprint == again.fingerprint != other.fingerprint


def test_a_training_adapter_starts_as_the_base():
    net = Net()
    before = net(X)
    adapter.Adapter(net, adapter.zero_weights(linears(net), ["blocks.0.mlp"], 4, 8.0, 0))
    assert torch.equal(net(X), before)


def test_injection_computes_alpha_over_rank_b_a_on_exactly_the_named_modules():
    """blocks.1 must not drag blocks.10 along, and ranks may differ from module to module."""
    net, plain = Net(), Net()
    generator = torch.Generator().manual_seed(2)
    modules = {
        "blocks.1.attn": (
            torch.randn(2, 6, generator=generator),
            torch.randn(6, 2, generator=generator),
            4.0,
        ),
        "blocks.10.mlp": (
            torch.randn(3, 6, generator=generator),
            torch.randn(6, 3, generator=generator),
            1.0,
        ),
    }
    made = adapter.Adapter(net, adapter.Weights(modules))
    for name, (down, up, alpha) in modules.items():
        plain.get_submodule(name).weight += alpha / down.shape[0] * up @ down
    torch.testing.assert_close(net(X), plain(X))
    assert [p.shape for p in made.parameters] == [(2, 6), (3, 6), (6, 2), (6, 3)]
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{part}.default.weight" for name in modules for part in "AB"
    }


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
    wrong = adapter.Weights({"blocks.0.attn": (torch.zeros(2, 7), torch.zeros(6, 2), 2.0)})
    with pytest.raises(
        ValueError, match="blocks.0.attn is for a weight of 6x7, the model's is 6x6"
    ):
        adapter.Adapter(net, wrong)
