"""Conditioning reaches the model as ComfyUI's own sampler passes it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import toys
from family_toys import TOYS, from_checkpoint, from_config
from native import native_velocity
from test_families import SIGMA, distance

# What ComfyUI's text encoders and conditioning nodes put beside the tokens, by the family that
# takes it: name -> value for 7 tokens and the toy's latent.
CASES = {
    "guidance": ("Flux (guidance)", lambda latent: 1.5),
    "pooled_output": ("Flux", lambda latent: torch.ones(1, 16)),
    "reference_latents": ("Flux", lambda latent: [latent.flip(-1)]),
    "attention_mask": ("QwenImage", lambda latent: torch.tensor([[1, 1, 1, 1, 1, 0, 0]])),
}


def velocities(comfy, model, z, conditioning):
    """Ours and ComfyUI's."""
    from pack.host import session

    with session.open_session(model) as live, torch.no_grad():
        ours = live.velocity(z, [SIGMA], [conditioning])
    return ours, native_velocity(comfy, model, z, SIGMA, conditioning)


@pytest.mark.parametrize("entry", list(CASES))
def test_what_is_beside_the_tokens_is_passed(comfy, tmp_path, entry):
    kind, value = CASES[entry]
    model = TOYS[kind].model(tmp_path)
    latent = torch.randn(1, *TOYS[kind].latent, generator=torch.Generator().manual_seed(1))
    plain = TOYS[kind].conditioning(model)
    told = [[plain[0][0], {**plain[0][1], entry: value(latent)}]]
    ours, native = velocities(comfy, model, latent, told)
    assert (ours - native).abs().max() == 0
    without, _ = velocities(comfy, model, latent, plain)
    assert (ours - without).abs().max() > 1e-3


def test_animas_token_ids_go_through_its_text_adapter(comfy, tmp_path):
    """With every weight of the adapter there: the sampler runs it before the first step, the pack
    in the forward."""
    from pack.host import text

    config = {"image_model": "anima", **toys.ANIMA, "num_blocks": 2}
    model = from_config("Anima", config)(tmp_path)
    z = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(1))
    tokens = torch.randn(1, 7, 1024, generator=torch.Generator().manual_seed(2))
    found = []
    for ids in ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2]):
        beside = {
            "t5xxl_ids": torch.tensor(ids, dtype=torch.int),
            "t5xxl_weights": torch.ones(len(ids)),
        }
        text.check_plain([[tokens, beside]], "picture 1")
        ours, native = velocities(comfy, model, z, [[tokens, beside]])
        assert (ours - native).abs().max() == 0
        found.append(ours)
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_a_mean_flow_model_is_asked_for_the_velocity_at_its_own_sigma(comfy, tmp_path):
    """Its forward looks up the next step's sigma, and leaves its embedding out where sigma is in no
    schedule: the mean velocity up to sigma itself is the velocity there."""
    import joint_toys
    from pack.host import session

    model = from_checkpoint(partial(joint_toys.hunyuan_image, meanflow=True))(tmp_path)
    z = torch.randn(1, *TOYS["HunyuanImage21"].latent, generator=torch.Generator().manual_seed(1))
    conditioning = TOYS["HunyuanImage21"].conditioning(model)
    ours, native = velocities(comfy, model, z, conditioning)
    assert (ours - native).abs().max() == 0
    with session.open_session(model) as live, torch.no_grad():
        live.network.time_r_in.out_layer.weight.zero_()
        live.network.time_r_in.out_layer.bias.zero_()
        without = live.velocity(z, [SIGMA], [conditioning])
    assert (ours - without).abs().max() > 1e-2


def test_what_lies_beside_the_tokens_stays_with_its_sample(comfy, tmp_path):
    """Two samples in one forward, each entry of another value for each."""
    from pack.host import session

    values = {
        "guidance": [1.5, 4.0],
        "pooled_output": [torch.ones(1, 16), torch.zeros(1, 16)],
        "reference_latents": [[torch.ones(1, 16, 16, 12)], [torch.zeros(1, 16, 16, 12)]],
        "attention_mask": [torch.tensor([[1] * ones + [0] * (7 - ones)]) for ones in (5, 3)],
    }
    for entry, (kind, _) in CASES.items():
        model = TOYS[kind].model(tmp_path)
        z = torch.randn(2, *TOYS[kind].latent, generator=torch.Generator().manual_seed(1))
        token, beside = TOYS[kind].conditioning(model)[0]
        told = [[[token, {**beside, entry: value}]] for value in values[entry]]
        with session.open_session(model) as live, torch.no_grad():
            together = live.velocity(z, [0.4, 0.8], told)
            singles = [
                live.velocity(own[None], [sigma], [caption])
                for own, sigma, caption in zip(z, [0.4, 0.8], told)
            ]
        assert distance(together, torch.cat(singles)) < 1e-5


def test_samples_whose_conditioning_would_be_padded_have_signatures_of_their_own(comfy, tmp_path):
    from pack.host import session

    toy = TOYS["Flux"]
    model = toy.model(tmp_path)
    z = torch.randn(2, *toy.latent, generator=torch.Generator().manual_seed(1))
    captions = [toy.conditioning(model, tokens=tokens) for tokens in (4, 8)]
    with session.open_session(model) as live, torch.no_grad():
        shape = z[:1].shape
        first, second = (live.velocity.signature(caption, shape) for caption in captions)
        assert first == live.velocity.signature(toy.conditioning(model, seed=3, tokens=4), shape)
        assert first != second
        assert first != live.velocity.signature(captions[0], (1, 16, 12, 16))
        with pytest.raises(ValueError, match="2 samples of a Flux cannot share a forward"):
            live.velocity(z, [0.4, 0.8], captions)


def test_a_family_that_would_mix_its_samples_takes_them_alone(comfy, tmp_path_factory):
    """One mask and one second time stand for all samples of its forward."""
    import joint_toys
    from pack.host import session

    distilled = partial(joint_toys.hunyuan_image, meanflow=True)
    meanflow = from_checkpoint(distilled)(tmp_path_factory.mktemp("meanflow"))
    plain = TOYS["HunyuanImage21"].model(tmp_path_factory.mktemp("plain"))
    token, beside = TOYS["HunyuanImage21"].conditioning(plain)[0]
    unmasked = [[token, beside]]
    masked = [[token, {**beside, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}]]
    shape = (1, *TOYS["HunyuanImage21"].latent)
    for model, caption, alone in (
        (plain, unmasked, False),
        (plain, masked, True),
        (meanflow, unmasked, True),
    ):
        with session.open_session(model) as live:
            signatures = {live.velocity.signature(caption, shape) for _ in range(2)}
            assert (len(signatures) == 2) == alone


def test_a_grid_beyond_a_position_table_is_refused_by_the_picture(comfy, tmp_path):
    from pack.host import families

    model = TOYS["SD3"].model(tmp_path).model
    families.check_grid(model, (64, 64), "picture 1")
    with pytest.raises(ValueError, match="picture 2 has a grid of 33 tokens.*holds 32"):
        families.check_grid(model, (64, 66), "picture 2")
    families.check_grid(TOYS["Flux"].model(tmp_path).model, (64, 66), "picture 2")


@pytest.mark.parametrize("kind", list(TOYS))
def test_an_empty_caption_without_a_text_encoder_works(comfy, tmp_path, kind):
    from pack.host import families, session, text

    model = TOYS[kind].model(tmp_path)
    if families.family_of(model.model).text is None:
        with pytest.raises(ValueError, match="connect CLIP or CONDITIONING"):
            text.zero_conditioning(model.model)
        return
    z = torch.randn(1, *TOYS[kind].latent, generator=torch.Generator().manual_seed(1))
    with session.open_session(model) as live, torch.no_grad():
        out = live.velocity(z, [SIGMA], [text.zero_conditioning(model.model)])
    assert torch.isfinite(out).all() and out.std() > 1e-3
