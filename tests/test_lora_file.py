"""A LoRA file means the same to the pack as to ComfyUI, in every naming and kind it may have."""

from __future__ import annotations

import logging

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from demotion import adapter, draws

LATENT, NOISE = torch.randn(2, 1, 16, 12, 12, generator=torch.Generator().manual_seed(1))
TARGETS = "single_blocks|img_mlp"
# ComfyUI merges W + Delta W, we add to the output: float32 rounding over the toy's depth.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model(comfy, tmp_path_factory):
    return comfy.sd.load_diffusion_model(str(toys.flux(tmp_path_factory.mktemp("toys"))))


def weights_of(model, kind: str = "LoRA", rank: int = 3) -> adapter.Weights:
    """An adapter with no zeros, large enough to be seen, and with alpha other than its rank."""
    from pack.host import families

    linears = families.linears(model.model.diffusion_model)
    targets = adapter.match_targets(linears, TARGETS)
    start = adapter.zero_weights(linears, targets, rank, 1.5, 0, kind)
    generator = torch.Generator().manual_seed(3)
    modules = {}
    for name, factors in start.modules.items():
        tensors = {}
        for key, value in factors.tensors.items():
            noise = torch.randn(value.shape, generator=generator)
            tensors[key] = value * (1 + 0.3 * noise) if key == "dora_scale" else 0.2 * noise
        modules[name] = adapter.Factors(tensors, 1.5)
    return adapter.Weights(modules)


def velocity(patcher, weights: adapter.Weights | None = None) -> torch.Tensor:
    from pack.host import session, text

    z = draws.noised(LATENT, NOISE, 0.5)
    with session.open_session(patcher) as live:
        if weights is not None:
            adapter.Adapter(live.network, weights)
        return live.velocity(z, [0.5], [text.zero_conditioning(patcher.model)]).detach()


def assert_means_the_same(model, path, caplog) -> adapter.Weights:
    """Our reading and ComfyUI's own loader give one forward, and no key is left over."""
    import comfy.sd
    from pack.host import lora_file

    with caplog.at_level(logging.WARNING):
        theirs, _ = comfy.sd.load_lora_for_models(model, None, load_file(path), 1.0, 0.0)
        weights, unused = lora_file.read(path, model.model)
        expected = velocity(theirs)
    assert unused == []
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "key not loaded" not in messages and "ERROR" not in messages
    ours = velocity(model, weights)
    assert (ours - velocity(model)).abs().max() > 0.1
    torch.testing.assert_close(ours, expected, **CLOSE)
    return weights


NAMINGS = {
    "peft": ("diffusion_model.{}", ".lora_A.weight", ".lora_B.weight"),
    "comfyui": ("diffusion_model.{}", ".lora_down.weight", ".lora_up.weight"),
    "kohya": ("lora_unet_{}", ".lora_down.weight", ".lora_up.weight"),
}


@pytest.mark.parametrize("with_alpha", [True, False])
@pytest.mark.parametrize("naming", NAMINGS)
def test_a_file_has_the_effect_it_has_in_comfyui(model, tmp_path, naming, with_alpha, caplog):
    prefix, down_key, up_key = NAMINGS[naming]
    tensors = {}
    for name, factors in weights_of(model).modules.items():
        key = prefix.format(name.replace(".", "_") if naming == "kohya" else name)
        tensors[key + down_key] = factors.tensors["lora_A.weight"]
        tensors[key + up_key] = factors.tensors["lora_B.weight"]
        if with_alpha:
            tensors[key + ".alpha"] = torch.tensor(1.5)
    save_file(tensors, tmp_path / "lora.safetensors")
    read = assert_means_the_same(model, tmp_path / "lora.safetensors", caplog)
    assert {factors.scale for factors in read.modules.values()} == {0.5 if with_alpha else 1.0}


@pytest.mark.parametrize("with_alpha", [True, False])
@pytest.mark.parametrize(
    "kind, rank", [("LoRA", 3), ("DoRA", 3), ("LoHa", 3), ("LoKr", 3), ("LoKr", 64)]
)
def test_a_file_we_write_of_every_kind_does_in_comfyui_what_we_train(
    model, tmp_path, kind, rank, with_alpha, caplog
):
    weights = weights_of(model, kind, rank)
    path = tmp_path / "lora.safetensors"
    weights.save(path, {})
    if not with_alpha:
        save_file({k: v for k, v in load_file(path).items() if not k.endswith("alpha")}, path)
    read = assert_means_the_same(model, path, caplog)
    assert read.kind == kind
    if with_alpha:
        assert read.fingerprint == weights.fingerprint
        read.save(tmp_path / "again.safetensors", {})
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("whole", ["w1", "w2", "neither"])
def test_a_lokr_file_may_hold_either_factor_whole(model, tmp_path, whole, caplog):
    generator = torch.Generator().manual_seed(4)
    tensors = {"diffusion_model.single_blocks.0.linear2.alpha": torch.tensor(3.0)}
    shapes = {"w1": (8, 16), "w2": (16, 40)}  # of linear2, 128 x 640
    for factor, (rows, columns) in shapes.items():
        key = f"diffusion_model.single_blocks.0.linear2.lokr_{factor}"
        if factor == whole:
            tensors[key] = torch.randn(rows, columns, generator=generator)
        else:
            tensors[f"{key}_a"] = torch.randn(rows, 2, generator=generator)
            tensors[f"{key}_b"] = torch.randn(2, columns, generator=generator)
    save_file(tensors, tmp_path / "lokr.safetensors")
    assert_means_the_same(model, tmp_path / "lokr.safetensors", caplog)


def slices_of_flux(alphas: dict[str, float]) -> dict[str, torch.Tensor]:
    """A diffusers file on fused weights: q and v of one qkv, q and the MLP of one linear1."""
    names = {
        "transformer.transformer_blocks.0.attn.to_q": (128, 128),
        "transformer.transformer_blocks.0.attn.to_v": (128, 128),
        "transformer.single_transformer_blocks.1.attn.to_q": (128, 128),
        "transformer.single_transformer_blocks.1.proj_mlp": (512, 128),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, (rows, columns) in names.items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
        for key, alpha in alphas.items():
            if name.endswith(key):
                tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.mark.parametrize("alphas", [{}, {"to_v": 1.0, "proj_mlp": 3.0}])
def test_slices_of_a_fused_weight_become_one_adapter_of_which_only_they_train(
    model, tmp_path, alphas, caplog
):
    from pack.host import lora_file, session, text

    tensors = slices_of_flux(alphas)
    save_file(tensors, tmp_path / "slices.safetensors")
    weights = assert_means_the_same(model, tmp_path / "slices.safetensors", caplog)
    assert sorted(weights.modules) == ["double_blocks.0.img_attn.qkv", "single_blocks.1.linear1"]
    with torch.inference_mode():  # as in a node
        weights, _ = lora_file.read(tmp_path / "slices.safetensors", model.model)
    with session.open_session(model) as live:
        made = adapter.Adapter(live.network, weights)
        z = draws.noised(LATENT, NOISE, 0.5)
        loss = live.velocity(z, [0.5], [text.zero_conditioning(model.model)]).square().mean()
        qkv, linear1 = torch.autograd.grad(loss, made.parts["B"])
    trained = torch.zeros(384, 4, dtype=torch.bool)
    trained[:128, :2] = trained[256:, 2:] = True
    assert torch.equal(qkv != 0, trained)
    # Some units of the MLP are saturated, so that theirs may be zero too.
    assert (linear1[:128, :2] != 0).all() and (linear1[384:, 2:] != 0).float().mean() > 0.5
    assert linear1[128:384].abs().max() == 0
    assert linear1[:128, 2:].abs().max() == linear1[384:, :2].abs().max() == 0


def test_a_file_for_another_model_is_refused_with_one_of_its_keys(model, tmp_path):
    from pack.host import lora_file

    save_file({"other.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors has no key .* such as other.lora_A"):
        lora_file.read(tmp_path / "other.safetensors", model.model)


def test_keys_that_comfyui_does_not_load_are_told(model, tmp_path):
    from pack.host import lora_file

    extra = {"lora_te1_mlp_fc1.lora_down.weight": torch.zeros(2, 2)}
    tensors = weights_of(model).tensors() | extra
    save_file(tensors, tmp_path / "lora.safetensors")
    assert lora_file.read(tmp_path / "lora.safetensors", model.model)[1] == list(extra)


QKV = "diffusion_model.double_blocks.0.img_attn.qkv"
LINEAR2 = "diffusion_model.single_blocks.0.linear2"
TO_Q = "transformer.transformer_blocks.0.attn.to_q"
REFUSED = {
    "OFT": {f"{QKV}.oft_blocks": (4, 8, 8)},
    "GLoRA": {f"{QKV}.{name}.weight": (2, 2) for name in ("a1", "a2", "b1", "b2")},
    "full difference": {f"{QKV}.diff": (384, 128)},
    "no low-rank adapter": {f"{QKV}.diff_b": (384,)},
    "replaced weight": {f"{QKV}.set_weight": (384, 128)},
    "lokr_w2 is missing": {f"{LINEAR2}.lokr_w1": (8, 16)},
    "Tucker": {
        **{f"{LINEAR2}.lokr_w1": (8, 16), f"{LINEAR2}.lokr_t2": (2, 2, 1, 1)},
        **{f"{LINEAR2}.lokr_w2_a": (2, 16), f"{LINEAR2}.lokr_w2_b": (2, 40)},
    },
    "DoRA of the weight's columns": {
        f"{QKV}.lora_A.weight": (2, 128),
        f"{QKV}.lora_B.weight": (384, 2),
        f"{QKV}.dora_scale": (1, 128),
    },
    "DoRA of a lokr": {
        f"{LINEAR2}.lokr_w1": (8, 16),
        f"{LINEAR2}.lokr_w2": (16, 40),
        f"{LINEAR2}.dora_scale": (128, 1),
    },
    "parts of double_blocks.0.img_attn.qkv by LoKr": {
        f"{TO_Q}.lokr_w1": (8, 8),
        f"{TO_Q}.lokr_w2": (16, 16),
    },
    "not the weight of a Linear": {
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.lora_A.weight": (2, 128),
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.lora_B.weight": (128, 2),
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_though_the_rest_fits(model, tmp_path, reason):
    from pack.host import lora_file

    refused = {key: torch.ones(shape) for key, shape in REFUSED[reason].items()}
    fits = weights_of(model).tensors()
    names = {key.rpartition(".")[0] for key in refused}
    tensors = {k: v for k, v in fits.items() if not k.startswith(tuple(names))} | refused
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=f"lora.safetensors changes .*{reason}"):
        lora_file.read(tmp_path / "lora.safetensors", model.model)
