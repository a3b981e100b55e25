"""Arms of a training set, with a codec that is a known function of pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from demotion import arms, resample

REENC, SRC = arms.REENC, arms.SRC


class BlockMean:
    """A codec whose latent is the mean of each 8x8 block, and whose decoder repeats it."""

    fingerprint = "block-mean"

    def __init__(self):
        self.encoded = 0

    def encode(self, pixels):
        self.encoded += 1
        image = torch.from_numpy(pixels.astype(np.float32) / 255).movedim(-1, 0)
        return torch.nn.functional.avg_pool2d(image, 8)

    def decode(self, latent):
        image = latent.repeat_interleave(8, 1).repeat_interleave(8, 2).movedim(0, -1)
        return (image * 255).round().byte().numpy()


def item(tmp_path, size, name, mask=None):
    pixels = np.random.default_rng(len(name)).integers(0, 255, (*size, 3), dtype=np.uint8)
    from demotion import grid

    return arms.Item(
        image=arms.content_hash(pixels),
        name=name,
        picture=arms.store_picture(pixels, tmp_path),
        mask=None if mask is None else arms.store_picture(mask, tmp_path),
        size=size,
        native=grid.native_grid(size, 256),
        caption="",
        repeats=1,
    )


def made(tmp_path, sizes=((300, 300), (256, 270), (200, 200))):
    items = tuple(item(tmp_path, size, f"{'p' * (n + 1)}") for n, size in enumerate(sizes))
    return arms.TrainingSet(items, 256, 8, 2, BlockMean(), tmp_path)


def test_arms_have_the_grids_they_are_named_for(tmp_path):
    ticks = []
    training_set = made(tmp_path)
    for arm in (SRC, REENC, arms.Arm("demote", 192), arms.Arm("repromote", 192)):
        training_set = arms.add_arm(training_set, arm, lambda: ticks.append(1))
    first, _, small = training_set.items
    assert training_set.latent(first, arms.Arm("demote", 192)).shape == (3, 24, 24)
    for arm in (SRC, REENC, arms.Arm("repromote", 192)):
        assert training_set.latent(first, arm).shape == (3, 32, 32)
    assert [str(arm) for arm in training_set.arms_of(small)] == ["src", "reenc"]
    assert len(ticks) == 3 + 3 + 2 + 2


def test_resampling_at_a_routes_ratio_changes_the_picture_on_its_own_grid(tmp_path):
    arm = arms.Arm("resample", 192)
    training_set = arms.add_arm(made(tmp_path), arm, lambda: None)
    first, _, small = training_set.items
    picture = arms.arm_pixels(training_set, first, SRC)
    # Enlarged by 256/192 with the same filter and 8-bit rounding, and brought back.
    there = resample.lanczos(picture, (round(256 * 4 / 3), round(256 * 4 / 3)))
    back = arms.arm_pixels(training_set, first, arm)
    assert (back == resample.lanczos(there, (256, 256))).all() and (back != picture).mean() > 0.3
    latent = training_set.latent(first, arm)
    assert latent.shape == (3, 32, 32)
    assert 0 < (latent - training_set.latent(first, SRC)).abs().max() < 0.1
    assert training_set.grid_of(small, arm) is None


def test_resampling_at_the_native_tier_prices_nothing_and_is_refused(tmp_path):
    with pytest.raises(ValueError, match="route 256 -> 256 does not go down"):
        arms.add_arm(made(tmp_path), arms.Arm("resample", 256), lambda: None)


def test_a_shifted_arm_has_the_demoted_latent_itself(tmp_path):
    training_set = arms.add_arm(made(tmp_path), arms.Arm("demote", 192), lambda: None)
    encoded = training_set.codec.encoded
    shifted = arms.add_arm(training_set, arms.Arm("shifted", 192), lambda: None)
    assert training_set.codec.encoded == encoded
    first, _, small = shifted.items
    assert shifted.grid_of(first, shifted.arms[1]) == (24, 24)
    assert shifted.grid_of(small, shifted.arms[1]) is None
    assert torch.equal(*(shifted.latent(first, arm) for arm in shifted.arms))


def test_every_arm_is_cut_with_the_native_box(tmp_path):
    training_set = made(tmp_path, ((280, 392),))
    picture = training_set.items[0]
    box = picture.box()
    demoted = arms.arm_pixels(training_set, picture, arms.Arm("demote", 192))
    cells = training_set.grid_of(picture, arms.Arm("demote", 192))
    expected = resample.lanczos(picture.pixels(), training_set.pixel_size(cells), box)
    assert (demoted == expected).all()
    aspect = (box[2] - box[0]) / (box[3] - box[1])
    assert aspect == pytest.approx(picture.native[1] / picture.native[0])


def test_latents_are_encoded_once_and_found_again(tmp_path):
    training_set = arms.add_arm(made(tmp_path), SRC, lambda: None)
    assert training_set.codec.encoded == 3
    again = arms.add_arm(made(tmp_path), SRC, lambda: None)
    assert again.codec.encoded == 0
    assert torch.equal(
        again.latent(again.items[0], SRC), training_set.latent(training_set.items[0], SRC)
    )


def test_adding_an_arm_leaves_the_set_as_it_was(tmp_path):
    training_set = made(tmp_path)
    arms.add_arm(training_set, SRC, lambda: None)
    assert training_set.arms == ()


def test_a_route_without_pictures_lists_each_with_its_reason(tmp_path):
    with pytest.raises(
        ValueError, match="no picture is on the route 256 -> 192: p: its grid 24x24 is not of tier"
    ):
        arms.add_arm(made(tmp_path, ((200, 200),)), arms.Arm("demote", 192), lambda: None)
    with pytest.raises(ValueError, match="does not go down"):
        arms.add_arm(made(tmp_path), arms.Arm("demote", 512), lambda: None)


def test_a_latent_that_is_not_finite_names_its_picture(tmp_path):
    training_set = made(tmp_path)
    training_set.codec.encode = lambda pixels: torch.full((3, 4, 4), float("nan"))
    with pytest.raises(ValueError, match=r"NaN or infinite latents for p \(src\)"):
        arms.add_arm(training_set, SRC, lambda: None)


def test_a_mask_follows_the_crop_box_to_the_grid(tmp_path):
    mask = np.zeros((256, 400), np.uint8)
    mask[:, 200:] = 255
    training_set = arms.TrainingSet(
        (item(tmp_path, (256, 400), "masked", mask),), 256, 8, 2, BlockMean(), tmp_path
    )
    weights = training_set.items[0].loss_weights((26, 40))
    assert weights.shape == (26, 40)
    assert weights[:, :19].max() == 0 and weights[:, 21:].min() == 1


def test_lanczos_at_the_same_size_is_the_identity():
    picture = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    assert (resample.lanczos(picture, (32, 48)) == picture).all()


def test_an_arm_is_its_name():
    for name in ("src", "null", "reenc", "demote:9", "repromote:64", "resample:192", "shifted:64"):
        assert str(arms.Arm.parse(name)) == name
