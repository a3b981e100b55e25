"""The probe's inner loop on a toy model."""

from __future__ import annotations

import nets
import numpy as np
import pytest
import torch

from demotion import cosine, draws, probe, sketch

BIN = (0.4, 0.6)


def parts(model):
    return {"A": [model.first.weight], "B": [model.second.weight]}


def cell(model, count=5, shared=True, seed=7, subject=None, tick=lambda: None, **others):
    return probe.measure_cell(
        subject or nets.subject(1), BIN, count, seed, shared, model, parts(model), tick, **others
    )


def brute_force(model, subject, count, seed):
    """[D, A, P] gradients, one at a time, from the definition."""
    native = subject.latents["src"].shape
    rows = []
    for draw in range(count):
        sigma = draws.draw_sigma(seed, subject.image, BIN, draw)
        row = []
        for arm, latent in subject.latents.items():
            noise = probe.arm_noise(
                seed, subject.image, BIN, draw, arm, native, tuple(latent.shape[-2:]), True
            )
            model.zero_grad()
            z = draws.noised(latent, noise, sigma)
            weights = subject.weights[arm]
            draws.velocity_loss(model(z, [sigma]), latent, noise, weights).backward()
            row.append(
                torch.cat([p.grad.reshape(-1).clone() for ps in parts(model).values() for p in ps])
            )
        rows.append(torch.stack(row))
    return torch.stack(rows).double().numpy()


def test_stored_products_are_those_of_the_gradients():
    model = nets.TinyFlow()
    measured = cell(model)
    gradients = brute_force(model, nets.subject(1), 5, 7)
    sums = gradients.sum(0)
    gram, products = measured.pooled()
    np.testing.assert_allclose(gram, sums @ sums.T, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(
        products, np.einsum("dap,dbp->ab", gradients, gradients), rtol=1e-5, atol=1e-9
    )
    even = gradients[::2].sum(0)
    np.testing.assert_allclose(measured.gram.sum(0)[0, :, 0], even @ even.T, rtol=1e-5, atol=1e-9)
    assert measured.counts == (3, 2)


def test_the_distance_from_vectors_is_the_distance_from_stored_products():
    model = nets.TinyFlow()
    sums = brute_force(model, nets.subject(1), 5, 7).sum(0)
    gram, _ = cell(model).pooled()
    direct = ((sums[2] - sums[0]) ** 2).sum()
    assert gram[2, 2] - 2 * gram[2, 0] + gram[0, 0] == pytest.approx(direct, rel=1e-6)


def test_parts_of_the_adapter_add_up_to_the_whole():
    model = nets.TinyFlow()
    measured = cell(model)
    for a, b in zip(measured.pooled(), zip(measured.pooled(0), measured.pooled(1))):
        np.testing.assert_allclose(a, b[0] + b[1])


def sketcher(model, buckets=1 << 12):
    size = sum(p.numel() for part in parts(model).values() for p in part)
    return sketch.CountSketch(7, size, buckets, torch.device("cpu"))


@pytest.mark.parametrize(("count", "blocks"), [(8, 4), (2, 2), (1, 1)])
def test_sketches_and_products_of_blocks_are_those_of_the_gradients(count, blocks):
    model = nets.TinyFlow()
    # Buckets enough that the few parameters do not collide: sketched products are exact.
    exact = sketcher(model)
    folded = exact.places.remainder(exact.buckets)
    assert len(folded.unique()) == len(folded)
    measured = probe.measure_cell(
        nets.subject(1), BIN, count, 7, True, model, parts(model), lambda: None, exact
    )
    gradients = brute_force(model, nets.subject(1), count, 7)
    assert measured.block_counts == (count // blocks,) * blocks
    sums = np.stack([gradients[block::blocks].sum(0) for block in range(blocks)])
    products = [
        np.einsum("dap,dbp->ab", *[gradients[block::blocks]] * 2) for block in range(blocks)
    ]
    np.testing.assert_allclose(measured.block_products, products, rtol=1e-5, atol=1e-9)
    flat = measured.sketches.reshape(-1, exact.buckets).astype(np.float64)
    sums = sums.reshape(flat.shape[0], -1)
    np.testing.assert_allclose(flat @ flat.T, sums @ sums.T, rtol=1e-4, atol=1e-8)
    # The blocks add up to what a cell has without a sketch.
    np.testing.assert_allclose(measured.block_products.sum(0), measured.pooled()[1])
    plain = measured.pooled()[0]
    whole = measured.sketches.sum(0).astype(np.float64)
    np.testing.assert_allclose(whole @ whole.T, plain, rtol=1e-4, atol=1e-8)


def test_a_sketch_changes_nothing_else_of_a_cell():
    model = nets.TinyFlow()
    with_sketch = probe.measure_cell(
        nets.subject(1), BIN, 4, 7, True, model, parts(model), lambda: None, sketcher(model, 8)
    )
    plain = cell(model, count=4)
    assert (with_sketch.gram == plain.gram).all()
    assert (with_sketch.products == plain.products).all()
    assert plain.sketches is None and plain.block_counts is None


def test_a_shifted_arm_is_the_demoted_one_at_another_sigma():
    model, asked = nets.TinyFlow(), []

    def velocity(z, sigmas, contexts):
        asked.append((z.detach(), *sigmas))
        return model(z, sigmas)

    plain = nets.subject(1)
    latents = {**plain.latents, "shifted:6": plain.latents["demote:6"]}
    subject = probe.Subject(plain.image, latents, dict.fromkeys(latents), native_tier=8)
    probe.measure_cell(subject, BIN, 2, 7, True, velocity, parts(model), lambda: None)
    _, _, (demoted, sigma), _, (shifted, lower) = asked[:5]
    assert lower == pytest.approx(draws.shifted_sigma(sigma, 8 / 6))
    # The noise is the same.
    latent = latents["demote:6"]
    torch.testing.assert_close(
        (demoted - (1 - sigma) * latent) / sigma, (shifted - (1 - lower) * latent) / lower
    )


def test_at_the_endpoint_the_model_is_given_the_noise_and_sigma_one():
    model, asked = nets.TinyFlow(), []

    def velocity(z, sigmas, contexts):
        asked.append((z.detach(), *sigmas))
        return model(z, sigmas)

    subject = nets.subject(1)
    probe.measure_cell(subject, draws.ENDPOINT, 2, 7, True, velocity, parts(model), lambda: None)
    assert {sigma for _, sigma in asked} == {1.0}
    native = subject.latents["src"].shape
    for (z, _), arm in zip(asked, subject.latents):
        grid = tuple(subject.latents[arm].shape[-2:])
        noise = probe.arm_noise(7, subject.image, draws.ENDPOINT, 0, arm, native, grid, True)
        assert torch.equal(z, noise)


@pytest.mark.parametrize("masked", [False, True])
def test_a_micro_batch_counts_as_one_draw_of_the_mean_of_its_gradients(masked):
    model, subject, calls = nets.TinyFlow(), nets.subject(1), []
    if masked:
        weights = {arm: torch.rand(latent.shape[-2:]) for arm, latent in subject.latents.items()}
        subject = probe.Subject(subject.image, subject.latents, weights)

    def velocity(z, sigmas, contexts):
        calls.append((len(z), len(sigmas), len(contexts)))
        return model(z, sigmas, contexts)

    measured = probe.measure_cell(
        subject, BIN, 12, 7, True, velocity, parts(model), lambda: None, micro_batch=3
    )
    singles = brute_force(model, subject, 12, 7)
    means = singles.reshape(4, 3, *singles.shape[1:]).mean(1)
    assert measured.counts == (2, 2)
    assert calls == [(3, 3, 3)] * 4 * len(subject.latents)
    gram, products = measured.pooled()
    np.testing.assert_allclose(gram, means.sum(0) @ means.sum(0).T, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(
        products, np.einsum("dap,dbp->ab", means, means), rtol=1e-5, atol=1e-9
    )
    assert measured.losses == pytest.approx(
        probe.measure_cell(subject, BIN, 12, 7, True, model, parts(model), lambda: None).losses
    )


def test_micro_batches_leave_the_debiased_products_unbiased():
    """They are the mean over all pairs of draws from different micro-batches, so no draw is
    multiplied with itself or with one that shared its forward."""
    model = nets.TinyFlow()
    measured = cell(model, 12, micro_batch=3)
    gradients = brute_force(model, nets.subject(1), 12, 7)
    pairs = [(i, j) for i in range(12) for j in range(12) if i // 3 != j // 3]
    products = np.mean([gradients[i] @ gradients[j].T for i, j in pairs], axis=0)
    found = cosine.debias(*measured.pooled(), measured.count)
    np.testing.assert_allclose(found, products, rtol=1e-4, atol=1e-9)


def test_a_sketch_of_micro_batches_is_that_of_their_means():
    model = nets.TinyFlow()
    exact = sketcher(model)
    measured = cell(model, 8, sketcher=exact, micro_batch=2)
    assert measured.block_counts == (1, 1, 1, 1)
    whole = measured.sketches.sum(0).astype(np.float64)
    np.testing.assert_allclose(whole @ whole.T, measured.pooled()[0], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("count", "micro_batch", "sketched", "refusal"),
    [
        (4, 4, False, "draws is 4, .* makes one of 4: .* at least 2 draws; .*: take 8 or more"),
        (6, 4, False, "draws is 6, .*: take 8 or more"),
        (10, 4, False, "draws is 10: with micro_batch 4 they are a multiple of 4, so take 8 or 12"),
        (4, 0, False, "micro_batch is 0: take 1 or more"),
        (3, 4, True, "draws is 3, .*: take 4 or more"),
        (20, 4, True, "draws is 20: .* and a sketch they are a multiple of 16, so take 16 or 32"),
    ],
)
def test_a_number_of_draws_that_makes_no_equal_micro_batches_is_refused_with_the_remedy(
    count, micro_batch, sketched, refusal
):
    model = nets.TinyFlow()
    used = sketcher(model, 8) if sketched else None
    with pytest.raises(ValueError, match=refusal):
        cell(model, count, sketcher=used, micro_batch=micro_batch)


def test_an_arm_equal_to_src_shares_its_noise_and_null_does_not():
    measured = cell(nets.TinyFlow())
    gram, _ = measured.pooled()
    src, null, again = 0, 1, 3
    assert gram[src, again] == gram[src, src]
    assert gram[src, null] != gram[src, src]


def test_a_cell_does_not_depend_on_other_arms_or_what_ran_before():
    model = nets.TinyFlow()
    whole = cell(model)
    cell(model, subject=nets.subject(2))
    fewer = nets.subject(1)
    fewer = probe.Subject(
        fewer.image, {k: fewer.latents[k] for k in ("src", "demote:6")}, fewer.weights
    )
    again = cell(model, subject=fewer)
    keep = np.ix_([0, 2], [0, 2])
    # The same numbers up to the summation order of differently shaped matrix products.
    np.testing.assert_allclose(whole.pooled()[0][keep], again.pooled()[0], rtol=1e-12)
    assert (whole.gram == cell(model).gram).all()


def test_independent_noise_gives_every_arm_a_stream_of_its_own():
    arguments = (0, "image", BIN, 0)
    native = torch.Size((1, 4, 8, 8))
    src = probe.arm_noise(*arguments, "src", native, (8, 8), False)
    assert torch.equal(src, probe.arm_noise(*arguments, "src", native, (8, 8), True))
    for arm in ("reenc", "repromote:6"):
        assert not torch.equal(src, probe.arm_noise(*arguments, arm, native, (8, 8), False))
        assert torch.equal(src, probe.arm_noise(*arguments, arm, native, (8, 8), True))


def test_a_mask_of_ones_changes_nothing_and_a_half_mask_does():
    model, subject = nets.TinyFlow(), nets.subject(1)
    ones = {arm: torch.ones(latent.shape[-2:]) for arm, latent in subject.latents.items()}
    half = {arm: mask.clone().index_fill_(0, torch.tensor([0, 1]), 0) for arm, mask in ones.items()}
    plain = cell(model).pooled()[0]
    masked = cell(model, subject=probe.Subject(subject.image, subject.latents, ones)).pooled()[0]
    halved = cell(model, subject=probe.Subject(subject.image, subject.latents, half)).pooled()[0]
    np.testing.assert_allclose(masked, plain, rtol=1e-4)
    assert not np.allclose(halved, plain, rtol=1e-2)


def test_fewer_than_two_draws_and_a_loss_that_is_not_finite_are_refused():
    model = nets.TinyFlow()
    with pytest.raises(ValueError, match="at least 2 draws; one draw .* needs a sketch"):
        cell(model, count=1)
    model.second.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="arm src is not finite"):
        cell(model)


def test_a_stop_comes_within_one_gradient():
    calls = []

    def tick():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell(nets.TinyFlow(), tick=tick)
    assert len(calls) == 3


def test_null_and_a_copy_read_zero_and_a_different_grid_does_not():
    """End to end on the toy: many draws, so the debiased distances are sharp."""
    measured = cell(nets.TinyFlow(), count=64)
    cosines = cosine.cosine(cosine.debias(*measured.pooled(), measured.count))
    assert abs(1 - cosines[0, 1]) < 0.05
    assert abs(1 - cosines[0, 3]) < 1e-6
    assert 1 - cosines[0, 2] > 0.001
