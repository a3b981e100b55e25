"""Rotary doors, family by family, on ComfyUI's own model classes at toy size."""

from __future__ import annotations

import math
import operator

import family_toys
import pytest
import torch
from test_families import distance

from demotion import rotary

SIGMA = 0.6
WITHOUT = ("SD3", "AuraFlow", "PixelDiTT2I", "Ideogram4", "JoyImage")
WITH_DOORS = [name for name in family_toys.TOYS if name not in WITHOUT]
# Where the tokens of the text lie in the sequence; elsewhere the table has none of its own.
TEXT_FIRST = (
    "Flux",
    "Flux2",
    "LongCatImage",
    "Chroma",
    "ChromaRadiance",
    "MageFlow",
    "HunyuanVideo",
    "HunyuanImage21",
    "Krea2",
    "QwenImage",
    "Omnigen2",
)
TEXT_LAST = ("HiDream", "ErnieImage", "Lens")
CENTRED = ("QwenImage", "Lens", "MageFlow")
ROPE_OPTIONS = (
    "Flux",
    "Flux2",
    "LongCatImage",
    "Lumina2",
    "WAN21",
    "WAN22",
    "ErnieImage",
    "Kandinsky5",
    "Kandinsky5Image",
)
BY_SHAPE = ("Anima", "CosmosPredict2")  # their embedder is given the grid, not positions


def only(*kinds):
    """Toys of these classes; a toy is named by its class and what tells it from others of it."""
    return [name for name in WITH_DOORS if name.partition(" (")[0] in kinds]


def without(*kinds):
    return [name for name in WITH_DOORS if name not in only(*kinds)]


class Family:
    """A toy in a session, with a demoted grid (that of its latent) and a native one."""

    def __init__(self, name, model, live):
        from pack.host import rotary as doors

        self.name, self.model, self.live = name, model, live
        self.kind = type(model.model).__name__
        self.toy = family_toys.TOYS[name]
        self.patch = live.family.patch
        # Large enough that some bands of every family turn more than once over an edge.
        self.shape = (*self.toy.latent[:-2], *(2 * edge for edge in self.toy.latent[-2:]))
        height, width = (edge // self.patch for edge in self.shape[-2:])
        self.tokens = height, width
        self.native_tokens = math.ceil(1.5 * height), math.ceil(1.4 * width)
        self.native = tuple(edge * self.patch for edge in self.native_tokens)
        self.scale = tuple(a / b for a, b in zip(self.native_tokens, self.tokens))
        self.conditioning = self.toy.conditioning(model)
        self.door = doors.DOORS[self.kind]
        self.embedder = operator.attrgetter(self.door.embedder)(live.network)

    def latent(self, grid=None):
        shape = self.shape if grid is None else (*self.shape[:-2], *grid)
        return torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))

    def velocity(self, mode=None, sigma=SIGMA, native=None):
        alignment = mode and rotary.Alignment(mode, native or self.native)
        with torch.no_grad():
            return self.live.velocity(self.latent(), [sigma], [self.conditioning], rotary=alignment)

    def calls(self, mode=None, grid=None):
        """(first argument, table) of every call of the embedder in a forward, the image's last."""
        seen = []
        handle = self.embedder.register_forward_hook(
            lambda module, inputs, table: seen.append((inputs[0], table.clone()))
        )
        alignment = mode and rotary.Alignment(mode, self.native)
        try:
            with torch.no_grad():
                self.live.velocity(
                    self.latent(grid), [SIGMA], [self.conditioning], rotary=alignment
                )
        finally:
            handle.remove()
        return seen

    def split(self, rows, tokens, axis=1):
        """(text, image) of something that has a row for each token of a sequence."""
        image = tokens[0] * tokens[1]
        if self.kind in TEXT_FIRST:
            start = rows.shape[axis] - image
        else:
            start = 0
        rest = [
            rows.narrow(axis, 0, start),
            rows.narrow(axis, start + image, rows.shape[axis] - start - image),
        ]
        return torch.cat(rest, axis), rows.narrow(axis, start, image)


@pytest.fixture(scope="module", params=WITH_DOORS)
def family(request, comfy, tmp_path_factory):
    from pack.host import session

    model = family_toys.TOYS[request.param].model(tmp_path_factory.mktemp("toys"))
    with session.open_session(model) as live:
        yield Family(request.param, model, live)


def test_the_same_grid_and_no_noise_leave_the_native_forward_to_the_last_bit(family):
    plain = family.velocity()
    for mode in rotary.MODES:
        assert torch.equal(plain, family.velocity(mode, native=family.shape[-2:]))
    clean = 1e-5
    assert torch.equal(family.velocity(sigma=clean), family.velocity("gated_yarn", clean))


def test_samples_of_a_forward_are_aligned_as_they_are_alone(family):
    if family.live.family.alone(family.live.network, ()):
        pytest.skip("takes one sample a forward")
    z = torch.cat([family.latent(), family.latent().flip(1)])
    captions = [family.conditioning, family.toy.conditioning(family.model, seed=5)]

    def velocity(mode, sigmas, which=slice(None)):
        alignment = rotary.Alignment(mode, family.native)
        with torch.no_grad():
            return family.live.velocity(z[which], sigmas[which], captions[which], rotary=alignment)

    for mode, sigmas in (("pi", [0.3, SIGMA]), ("yarn", [0.3, SIGMA]), ("gated_yarn", [SIGMA] * 2)):
        singles = [velocity(mode, sigmas, slice(n, n + 1)) for n in range(2)]
        assert distance(velocity(mode, sigmas), torch.cat(singles)) < 1e-5
    with pytest.raises(ValueError, match="gated_yarn depends on sigma, .* one sample a forward"):
        velocity("gated_yarn", [0.3, SIGMA])


def test_each_mode_changes_the_forward_in_its_own_way(family, family_lines):
    from pack.host import rotary as doors

    found = [family.velocity(mode) for mode in (None, *rotary.MODES)]
    for index, first in enumerate(found):
        for second in found[:index]:
            assert not torch.allclose(first, second, rtol=1e-3)
    family_lines.setdefault(family.name, {})["rotary"] = doors.door(family.model.model)


def test_bands_that_are_all_aligned_are_interpolation(family, monkeypatch):
    interpolated = family.velocity("pi")
    monkeypatch.setattr(rotary, "ALPHA", 1e9)
    monkeypatch.setattr(rotary, "BETA", 2e9)
    assert torch.equal(interpolated, family.velocity("yarn"))


def test_bands_that_all_keep_their_frequency_are_the_native_table(family, monkeypatch):
    plain = family.calls()
    monkeypatch.setattr(rotary, "ALPHA", -2.0)
    monkeypatch.setattr(rotary, "BETA", -1.0)
    for (_, table), (_, same) in zip(plain, family.calls("yarn"), strict=True):
        assert torch.equal(table, same)


@pytest.mark.parametrize("family", without(*BY_SHAPE), indirect=True)
def test_interpolation_is_the_models_own_table_at_fractional_positions(family):
    """Image tokens at i s from the native origin, text where the native grid has it."""
    demoted, native = family.calls(), family.calls(grid=family.native)
    aligned = family.calls("pi")
    for (ids, _), (native_ids, _), (_, table) in zip(demoted, native, aligned, strict=True):
        expected = fractional(family, ids, native_ids)
        own = type(family.embedder).forward(family.embedder, expected)
        assert table.shape == own.shape and table.dtype == own.dtype
        torch.testing.assert_close(table, own, rtol=0, atol=2e-5)


def fractional(family, ids, native_ids):
    if not ids[..., list(family.door.axes)].any():
        return ids  # a call for the caption alone
    rest, image = family.split(ids, family.tokens)
    native_text, native_image = family.split(native_ids, family.native_tokens)
    image = image.float().clone()
    for axis, edge, scale in zip(family.door.axes, (0, 1), family.scale):
        steps = torch.arange(family.tokens[edge]).float()
        if family.kind in CENTRED:
            places = (steps - family.tokens[edge] // 2) * scale
        else:
            spacing = native_image[0, :, axis].float().unique().diff()[0]
            places = native_image[0, 0, axis].float() + steps * scale * spacing
        grid = places[:, None] if edge == 0 else places[None]
        image[..., axis] = grid.expand(family.tokens).reshape(-1)
    if family.kind in TEXT_FIRST + TEXT_LAST:
        rest = native_text  # elsewhere what is left is padding, which depends on the grid
    parts = [rest.float(), image]
    return torch.cat(parts if family.kind in TEXT_FIRST else parts[::-1], dim=1)


@pytest.mark.parametrize("family", only(*TEXT_FIRST, *TEXT_LAST), indirect=True)
def test_the_text_stands_where_the_native_grid_has_it(family):
    ((_, native),) = family.calls(grid=family.native)
    ((_, aligned),) = family.calls("pi")
    axis = 3 - family.door.head
    text, _ = family.split(aligned, family.tokens, axis)
    native_text, _ = family.split(native, family.native_tokens, axis)
    torch.testing.assert_close(text, native_text, rtol=0, atol=1e-6)
    assert text.shape[axis] > 0


@pytest.mark.parametrize("family", only(*ROPE_OPTIONS), indirect=True)
def test_interpolation_is_that_of_rope_options_where_the_family_has_them(family):
    options = family.live.velocity.options["transformer_options"]
    spread = getattr(family.live.network, "rope_scale_factor", (1.0, 1.0, 1.0))
    options["rope_options"] = {
        "scale_y": family.scale[0] / spread[1],
        "scale_x": family.scale[1] / spread[2],
    }
    try:
        by_options = family.velocity()
    finally:
        del options["rope_options"]
    aligned = family.velocity("pi")
    error = (aligned - by_options).norm() / (aligned - family.velocity()).norm()
    assert error < 2e-3


@pytest.mark.parametrize("family", only(*BY_SHAPE), indirect=True)
def test_cosmos_bands_turn_by_position_times_scale(family):
    ((tokens, plain),) = family.calls()
    ((_, aligned),) = family.calls("pi")
    own = plain.view(*tokens.shape[1:4], -1, 2, 2)
    found = aligned.view(own.shape)
    bands = len(family.embedder.dim_spatial_range)
    time = own.shape[3] - 2 * bands
    assert torch.equal(found[..., :time, :, :], own[..., :time, :, :])
    for axis, start in ((0, time), (1, time + bands)):
        step = found.movedim(1 + axis, 0)[1].reshape(-1, own.shape[3], 2, 2)[
            0, start : start + bands
        ]
        once = own.movedim(1 + axis, 0)[1].reshape(-1, own.shape[3], 2, 2)[0, start : start + bands]
        angle, base = (torch.atan2(m[:, 1, 0], m[:, 0, 0]) for m in (step, once))
        torch.testing.assert_close(angle, base * family.scale[axis], rtol=1e-5, atol=1e-6)


def test_nothing_stays_on_the_model_however_a_forward_ends(family):
    family.velocity("yarn")
    assert "forward" not in vars(family.embedder)

    class Cancelled(BaseException):
        pass

    def cancel(*_):
        assert "forward" in vars(family.embedder)
        raise Cancelled

    handle = family.embedder.register_forward_hook(cancel)
    try:
        with pytest.raises(Cancelled):
            family.velocity("yarn")
    finally:
        handle.remove()
    assert "forward" not in vars(family.embedder)


def test_a_native_grid_smaller_than_the_latents_is_refused(family):
    smaller = tuple(edge - family.patch for edge in family.shape[-2:])
    with pytest.raises(ValueError, match="is smaller than the latent's"):
        family.velocity("pi", native=smaller)


def sample(model, family, grid):
    import comfy.sample

    latent = torch.zeros(1, *family.shape[:-2], *grid)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(2))
    given = family.conditioning
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, 2, 1.0, "euler", "simple", given, given, latent, disable_pbar=True
        )


def state_of(network):
    attributes = {name: sorted(vars(module)) for name, module in network.named_modules()}
    weights = {name: value.numpy().tobytes() for name, value in network.state_dict().items()}
    return attributes, {name: hash(value) for name, value in weights.items()}


def test_sampling_with_the_nodes_model_is_aligned_and_leaves_the_users_as_it_was(family):
    from pack.host import rotary as doors

    factor = family.model.model.latent_format.spacial_downscale_ratio
    pixels = tuple(edge * factor for edge in family.native)
    network = family.model.model.diffusion_model
    embedder = operator.attrgetter(family.door.embedder)(network)
    plain = sample(family.model, family, family.shape[-2:])
    before = state_of(network)
    made = doors.align_model(family.model, "yarn", pixels)
    aligned = sample(made, family, family.shape[-2:])
    assert not torch.allclose(plain, aligned, rtol=1e-3)
    assert torch.equal(sample(family.model, family, family.shape[-2:]), plain)
    assert torch.equal(
        sample(made, family, family.native), sample(family.model, family, family.native)
    )
    assert "forward" not in vars(embedder)
    assert state_of(network) == before
    doors.check_unaligned(family.model)
    with pytest.raises(ValueError, match="which is for sampling"):
        doors.check_unaligned(made)


def test_the_nodes_noise_level_is_that_of_the_gate(family):
    from pack.host import rotary as doors

    level = SIGMA / (1 - SIGMA) if family.live.velocity.rescaled else SIGMA
    assert doors._sigma(family.model.model, torch.tensor([level])) == pytest.approx(SIGMA)


@pytest.mark.parametrize("name", WITHOUT)
def test_families_without_a_door_say_why(comfy, tmp_path, name, family_lines):
    from pack.host import rotary as doors

    model = family_toys.TOYS[name].model(tmp_path)
    sentence = doors.door(model.model)
    assert sentence.startswith("none: ")
    with pytest.raises(ValueError, match=f"cannot be offered for a {name}: {sentence[6:]}"):
        doors.check(model, [])
    with pytest.raises(ValueError, match="Set rotary to none"):
        doors.align_model(model, "pi", (1024, 1024))
    family_lines.setdefault(name, {})["rotary"] = "none"


def test_every_listed_family_has_a_door_or_a_reason(comfy):
    from pack.host import families
    from pack.host import rotary as doors

    assert set(families.FAMILIES) <= set(doors.DOORS) | set(doors.NO_DOORS)
    assert not set(doors.DOORS) & set(doors.NO_DOORS)


def test_models_whose_table_is_not_known_and_references_are_refused(comfy, tmp_path):
    from pack.host import rotary as doors

    class SomethingElse:
        pass

    assert doors.door(SomethingElse()) == "none: where it makes its rotary table is not known"
    model = family_toys.TOYS["Flux"].model(tmp_path)
    doors.check(model, [[[torch.zeros(1, 1, 32), {}]]])
    with pytest.raises(ValueError, match="beside reference images"):
        doors.check(model, [[[torch.zeros(1, 1, 32), {"reference_latents": [torch.zeros(1)]}]]])


def test_a_model_whose_scale_depends_on_the_grid_is_refused(comfy):
    from pack.host import rotary as doors

    class Kandinsky5:
        class diffusion_model:
            model_dim = 4096

    assert doors.door(Kandinsky5()) == "none: its rotary scale depends on the grid"


def input_gradient(live, family, mode):
    z = family.latent().requires_grad_()
    alignment = mode and rotary.Alignment(mode, family.native)
    velocity = live.velocity(z, [SIGMA], [family.conditioning], rotary=alignment)
    return torch.autograd.grad(velocity.square().mean(), z)[0]


def test_a_checkpointed_backward_computes_the_aligned_forward_again(family):
    """The backward runs when the model's own table is back."""
    from pack.host import session

    plain, aligned = (input_gradient(family.live, family, mode) for mode in (None, "yarn"))
    with session.open_session(family.model, checkpointing=True) as live:
        again = input_gradient(live, family, "yarn")
    assert (aligned - plain).norm() > 1e-2 * plain.norm()
    assert (again - aligned).norm() < 1e-4 * aligned.norm()


@pytest.mark.parametrize("family", without(*BY_SHAPE, "ErnieImage"), indirect=True)
def test_slow_bands_are_interpolated_and_fast_ones_left_for_image_and_text(family, monkeypatch):
    monkeypatch.setattr(rotary, "ALPHA", 0.2)
    monkeypatch.setattr(rotary, "BETA", 0.5)
    plain, interpolated, banded = (family.calls(mode)[-1][1] for mode in (None, "pi", "yarn"))
    spread = getattr(family.live.network, "rope_scale_factor", (1.0, 1.0, 1.0))
    start = 0
    for axis, size in enumerate(family.embedder.axes_dim):
        bands = slice(start, start + size // 2)
        start = bands.stop
        if axis not in family.door.axes:
            continue
        side = family.door.axes.index(axis)
        turns = family.embedder.theta ** -(torch.arange(0, size, 2) / size)
        turns = turns * family.tokens[side] / spread[1 + side] / (2 * math.pi)
        slow, fast = turns <= 0.2, turns >= 0.5
        assert slow.any() and fast.any()
        own, stretched, found = (
            table[..., bands, :, :].movedim(-3, 0) for table in (plain, interpolated, banded)
        )
        torch.testing.assert_close(found[slow], stretched[slow])
        assert torch.equal(found[fast], own[fast])
        assert not torch.allclose(own[slow], stretched[slow])
