"""What the table of families says, on the models themselves, and which models are refused."""

from __future__ import annotations

import pytest
import test_families
import torch
from family_toys import TOYS

from demotion import draws

SIGMA = 0.6


@pytest.fixture(scope="module", params=list(TOYS))
def toy(request, comfy, tmp_path_factory):
    """(Toy, MODEL) of one family."""
    entry = TOYS[request.param]
    return entry, entry.model(tmp_path_factory.mktemp("toys"))


def rows_seen(live, shape, conditioning):
    """Rows that each targeted Linear sees in one forward on a latent of this shape."""
    rows = {}
    linears, names = test_families.targets(live)
    hooks = [
        linears[name].register_forward_pre_hook(
            lambda _, inputs, name=name: rows.update({name: inputs[0].shape[:-1].numel()})
        )
        for name in names
    ]
    latent = torch.randn(1, *shape, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        velocity = live.velocity(latent, [SIGMA], [conditioning])
    for hook in hooks:
        hook.remove()
    assert torch.isfinite(velocity).all()
    return rows


def test_a_token_is_a_patch_and_the_empty_text_is_enough(toy):
    """Doubling a latent adds as many tokens as it had to what a Linear sees."""
    from pack.host import session, text

    entry, model = toy
    *channels, height, width = entry.latent
    height, width = 2 * height, 2 * width
    with session.open_session(model) as live:
        family = live.family
        caption = text.zero_conditioning(model.model) if family.text else entry.conditioning(model)
        once = rows_seen(live, (*channels, height, width), caption)
        twice = rows_seen(live, (*channels, 2 * height, width), caption)
    tokens = (height // family.patch) * (width // family.patch)
    assert tokens in {twice[name] - rows for name, rows in once.items()}


def test_the_mask_of_an_empty_text_counts_its_token(comfy):
    from pack.host import text

    model = TOYS["Omnigen2"].model(None).model
    token, beside = text.zero_conditioning(model)[0]
    assert beside["attention_mask"].sum().item() == token.shape[1] == 1


def test_sigma_ends_where_the_schedule_does(toy):
    """The velocity of pure noise, and the end that ComfyUI's own table has."""
    from pack.host import families, session

    entry, model = toy
    low, high = families.sigma_range(model.model)
    kind = type(model.model).__name__
    # Cosmos-Predict2 counts noise over signal, to 80: 80 / 81 of the way from picture to noise.
    assert high == pytest.approx(80 / 81 if kind == "CosmosPredict2" else 1.0)
    assert 0 <= low < 0.01
    latent, noise = torch.randn(2, 1, *entry.latent, generator=torch.Generator().manual_seed(2))
    with session.open_session(model) as live, torch.no_grad():
        z = draws.noised(latent, noise, high)
        assert torch.isfinite(live.velocity(z, [high], [entry.conditioning(model)])).all()


NOT_FLOW = {
    ("SDXL", ()): "SDXL of type EPS",
    ("SDXL", ("v_pred",)): "SDXL of type V_PREDICTION",
    ("SDXL", ("edm_mean", "edm_std")): "SDXL of type EDM",
    ("HunyuanDiT", ()): "HunyuanDiT of type V_PREDICTION",
    ("CogVideoX_T2V", ()): "CogVideoX of type V_PREDICTION_DDPM",
    ("Stable_Cascade_C", ()): "StableCascade_C of type STABLE_CASCADE",
    ("LotusD", ()): "Lotus of type IMG_TO_IMG",
    ("WAN21_FlowRVS", ()): "WAN21_FlowRVS of type IMG_TO_IMG_FLOW",
    ("HiDreamO1", ()): "HiDreamO1 whose noise has a deviation of 8",
    ("MiniMaxH3", ()): "MiniMaxH3 that makes pictures and sound together",
    ("LTXAV", ()): "LTXAV that makes pictures and sound together",
}


@pytest.mark.parametrize("name,keys", NOT_FLOW)
def test_other_kinds_of_model_are_refused_by_name(comfy, name, keys):
    """ComfyUI's own classes, built without their networks; the keys are those of a file."""
    from pack.host import families

    model = without_network(name, keys)
    with pytest.raises(ValueError, match=NOT_FLOW[name, keys]) as refusal:
        families.family_of(model)
    assert ": use one of Flux, " in str(refusal.value)


def without_network(name, keys=()):
    import comfy.supported_models

    settings = getattr(comfy.supported_models, name)(
        {"disable_unet_model_creation": True, "in_channels": 4}
    )
    settings.set_inference_dtype(torch.float32, None)
    return settings.get_model(dict.fromkeys(keys, torch.zeros(1)), "")


def test_an_unlisted_model_whose_patch_cannot_be_told_is_refused_by_name(comfy):
    from family_toys import from_config
    from pack.host import families

    config = {"attention_head_dim": 32, "num_attention_heads": 4, "num_layers": 1}
    model = from_config("LTXV", config)(None).model
    with pytest.raises(ValueError, match="MODEL is a LTXV, a family this version does not know"):
        families.family_of(model)
