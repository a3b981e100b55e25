"""A LoRA file means the same to the pack as to ComfyUI, in every naming it may have."""

from __future__ import annotations

import pytest
import torch
import toys
from safetensors.torch import save_file

from demotion import adapter, draws

LATENT, NOISE = torch.randn(2, 1, 16, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(comfy, tmp_path_factory):
    return comfy.sd.load_diffusion_model(str(toys.flux(tmp_path_factory.mktemp("toys"))))


def a_lora(model) -> adapter.Weights:
    from pack.host import families

    linears = families.linears(model.model.diffusion_model)
    targets = adapter.match_targets(linears, "single_blocks|img_mlp")
    weights = adapter.probe_weights(linears, targets, rank=3, seed=0)
    return adapter.Weights(
        {name: (down, 20 * up, 1.5) for name, (down, up, _) in weights.modules.items()}
    )


NAMINGS = {
    "peft": ("diffusion_model.{}", ".lora_A.weight", ".lora_B.weight"),
    "comfyui": ("diffusion_model.{}", ".lora_down.weight", ".lora_up.weight"),
    "kohya": ("lora_unet_{}", ".lora_down.weight", ".lora_up.weight"),
}


@pytest.mark.parametrize("with_alpha", [True, False])
@pytest.mark.parametrize("naming", NAMINGS)
def test_a_file_has_the_effect_it_has_in_comfyui(comfy, model, tmp_path, naming, with_alpha):
    import comfy.lora
    from pack.host import lora_file, session, text

    prefix, down_key, up_key = NAMINGS[naming]
    tensors = {}
    for name, (down, up, alpha) in a_lora(model).modules.items():
        key = prefix.format(name.replace(".", "_") if naming == "kohya" else name)
        tensors |= {key + down_key: down, key + up_key: up}
        if with_alpha:
            tensors[key + ".alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "lora.safetensors")

    conditioning = text.zero_conditioning(model.model)
    z = draws.noised(LATENT, NOISE, 0.5)
    with session.open_session(model) as live:
        base = live.velocity(z, 0.5, conditioning).detach()
        adapter.Adapter(live.network, lora_file.read(tmp_path / "lora.safetensors", model.model))
        ours = live.velocity(z, 0.5, conditioning).detach()
    patched = model.clone()
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(tensors, keys)
    assert len(patched.add_patches(patches, 1.0)) == len(patches) > 0
    with session.open_session(patched) as live:
        theirs = live.velocity(z, 0.5, conditioning).detach()
    assert (ours - base).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_file_for_another_model_is_refused_with_one_of_its_keys(model, tmp_path):
    from pack.host import lora_file

    save_file({"other.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors has no key .* such as other.lora_A"):
        lora_file.read(tmp_path / "other.safetensors", model.model)
