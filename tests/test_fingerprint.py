"""A model is known by its weights and by what is patched onto it, and by nothing else."""

from __future__ import annotations

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def path(comfy, tmp_path_factory):
    return toys.flux(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def load(comfy):
    def build(path, **options):
        with torch.inference_mode():
            return comfy.sd.load_diffusion_model(str(path), model_options=options)

    return build


def named(model) -> str:
    from pack.host import fingerprint

    return fingerprint.fingerprint(model.model.diffusion_model, fingerprint.patches_of(model))


def lora(model, scale: float = 1.0):
    """The model with a rank-2 LoRA on one Linear, as ComfyUI's loader node patches it."""
    import comfy.lora
    import comfy.sd

    key = "diffusion_model.single_blocks.0.linear1"
    weight = model.model.diffusion_model.single_blocks[0].linear1.weight
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{key}.lora_A.weight": torch.randn(2, weight.shape[1], generator=generator),
        f"{key}.lora_B.weight": scale * torch.randn(weight.shape[0], 2, generator=generator),
    }
    patched, _ = comfy.sd.load_lora_for_models(model, None, tensors, 0.5, 0)
    assert len(patched.patches) == 1
    return patched


def test_the_same_file_has_the_same_fingerprint_wherever_it_lies(path, load, tmp_path):
    again = tmp_path / "other_name.safetensors"
    save_file(load_file(path), again)
    assert named(load(path)) == named(load(again))


def test_one_value_in_ten_of_one_tensor_is_enough(path, load, tmp_path):
    state = load_file(path)
    name = "single_blocks.0.linear1.weight"
    state[name].view(-1)[::10] += 0.01
    save_file(state, tmp_path / "tuned.safetensors")
    assert named(load(tmp_path / "tuned.safetensors")) != named(load(path))


def test_weights_in_another_precision_are_another_model(path, load):
    assert named(load(path, dtype=torch.float8_e4m3fn)) != named(load(path))


def test_a_lora_its_values_and_its_strength_make_another_model(comfy, path, load):
    model = load(path)
    plain, patched = named(model), lora(model)
    weaker, other, twice = model.clone(), lora(model, 2.0), lora(patched)
    weaker.add_patches({key: entry[0][1] for key, entry in patched.patches.items()}, 0.25)
    names = [plain, *map(named, (patched, weaker, other, twice))]
    assert len(set(names)) == len(names)
    assert named(lora(load(path))) == names[1]
    assert named(model) == plain


def test_other_patches_make_another_model_and_their_owner_does_not(path, load):
    import comfy.model_sampling

    class Sampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
        pass

    model = load(path)
    made = {"plain": model}
    for shift in (1.0, 2.0):
        made[f"shift {shift}"] = model.clone()
        sampling = Sampling(model.model.model_config)
        sampling.set_parameters(shift=shift)
        made[f"shift {shift}"].add_object_patch("model_sampling", sampling)
    made["attention"] = model.clone()
    made["attention"].set_model_attn1_patch(lambda *args: args)
    assert len(set(map(named, made.values()))) == len(made)
    assert named(model.clone()) == named(model)


def test_a_session_on_a_patched_model_has_the_fingerprint_of_its_patches(load, path):
    from pack.host import session

    model = load(path)
    names = []
    for opened in (model, lora(model), lora(load(path)), model):
        with session.open_session(opened) as live:
            names.append(live.fingerprint)
            assert live.fingerprint == named(opened)
    assert names[0] == names[3] != names[1] == names[2]


def test_a_lora_that_bypasses_the_weights_is_refused(comfy, load, path):
    """It would act on the caller's layers and leave the private copy as it was."""
    from pack.host import session

    key = "diffusion_model.single_blocks.0.linear1"
    model = load(path)
    weight = model.model.diffusion_model.single_blocks[0].linear1.weight
    tensors = {
        f"{key}.lora_A.weight": torch.ones(2, weight.shape[1]),
        f"{key}.lora_B.weight": torch.ones(weight.shape[0], 2),
    }
    bypassed, _ = comfy.sd.load_bypass_lora_for_models(model, None, tensors, 1.0, 0)
    with pytest.raises(ValueError, match="MODEL carries bypass_lora"):
        with session.open_session(bypassed):
            pass


def test_a_patched_model_keeps_its_name_while_its_patches_are_merged(comfy, path, load):
    """Merged weights differ from loaded ones, so the weights are looked at before."""
    from pack.host import fingerprint

    patched = lora(load(path))
    with torch.inference_mode(False):
        private = patched.clone(disable_dynamic=True, force_deepcopy=True)
        before = fingerprint.fingerprint(private.model.diffusion_model)
        assert before == fingerprint.fingerprint(load(path).model.diffusion_model)
        comfy.model_management.load_models_gpu([private])
        assert fingerprint.fingerprint(private.model.diffusion_model) != before
        comfy.model_management.unload_all_models()
