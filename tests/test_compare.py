"""Comparing LoRAs: the cosine is that of the dense weight changes, in every kind and naming."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import Linear

import run
from demotion import adapter, compare

FIRST, SECOND = compare.FIRST, compare.SECOND
SHAPES = {
    "double_blocks.2.img_attn.qkv": (12, 6),
    "double_blocks.2.img_mlp.0": (8, 6),
    "double_blocks.10.img_attn.qkv": (12, 6),
    "double_blocks.10.img_mlp.0": (8, 6),
    "single_blocks.0.linear1": (6, 10),
    "img_in": (4, 6),
}
EXACT = {"rel": 1e-12, "abs": 1e-12}
KINDS = st.sampled_from(adapter.KINDS)
RANKS = st.integers(1, 7)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40)


def numbers(shape: tuple[int, ...], *names: object) -> torch.Tensor:
    """Seeded normal values, float32."""
    seed = [int.from_bytes(str(name).encode(), "little") for name in names]
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def base(name: str) -> torch.Tensor:
    return numbers(SHAPES[name], "base", name)


def random_weights(
    kind: str = "LoRA", rank: int = 3, seed: int = 0, alpha: float = 2.5, names=tuple(SHAPES)
) -> adapter.Weights:
    modules = {}
    for name in names:
        shapes = adapter._shapes(kind, rank, *SHAPES[name])
        tensors = {key: numbers(shape, kind, seed, name, key) for key, shape in shapes.items()}
        if kind == "DoRA":
            tensors["dora_scale"] = numbers((SHAPES[name][0], 1), seed, name).exp()
        modules[name] = adapter.Factors(tensors, alpha)
    return adapter.Weights(modules)


def dense(factors: adapter.Factors, name: str) -> np.ndarray:
    """Change of the weight [out, in], written out from the formulas alone."""
    held = {key: tensor.numpy().astype("float64") for key, tensor in factors.tensors.items()}
    if factors.kind == "LoHa":
        rank = held["hada_w1_b"].shape[0]
        first = held["hada_w1_a"] @ held["hada_w1_b"]
        return factors.alpha / rank * first * (held["hada_w2_a"] @ held["hada_w2_b"])
    if factors.kind == "LoKr":
        if "lokr_w2" in held:
            return np.kron(held["lokr_w1"], held["lokr_w2"])
        scale = factors.alpha / held["lokr_w2_b"].shape[0]
        return scale * np.kron(held["lokr_w1"], held["lokr_w2_a"] @ held["lokr_w2_b"])
    down, up = held["lora_A.weight"], held["lora_B.weight"]
    change = factors.alpha / down.shape[0] * up @ down
    if factors.kind == "LoRA":
        return change
    weight = base(name).numpy().astype("float64")
    lengths = np.sqrt((weight**2).sum(axis=1, keepdims=True))
    return held["dora_scale"] * (weight + change) / lengths - weight


def compared(first: adapter.Weights, second: adapter.Weights, **more) -> compare.Comparison:
    weights = {FIRST: first, SECOND: second, **more}
    names = {role: f"{role}.safetensors" for role in weights}
    return compare.compare(names, weights, base, lambda: None)


def cosine(first: adapter.Weights, second: adapter.Weights) -> float:
    return compared(first, second).whole(SECOND).cosine


@quick
@given(kinds=st.tuples(KINDS, KINDS), ranks=st.tuples(RANKS, RANKS), seed=SEEDS)
def test_products_are_those_of_the_dense_weight_changes(kinds, ranks, seed) -> None:
    first = random_weights(kinds[0], ranks[0], seed)
    second = random_weights(kinds[1], ranks[1], seed + 1, alpha=0.7)
    found = compared(first, second)
    for name, overlap in found.overlaps[SECOND].items():
        one, two = dense(first.modules[name], name), dense(second.modules[name], name)
        scale = np.linalg.norm(one) * np.linalg.norm(two)
        assert overlap.first == pytest.approx((one**2).sum(), rel=1e-12)
        assert overlap.second == pytest.approx((two**2).sum(), rel=1e-12)
        assert overlap.dot == pytest.approx((one * two).sum(), abs=1e-12 * scale)
    whole = [
        np.concatenate([dense(held.modules[name], name).ravel() for name in SHAPES])
        for held in (first, second)
    ]
    lengths = [np.linalg.norm(vector) for vector in whole]
    found = found.whole(SECOND)
    assert found.cosine == pytest.approx(whole[0] @ whole[1] / np.prod(lengths), **EXACT)
    assert found.norm_ratio == pytest.approx(lengths[1] / lengths[0], rel=1e-12)


@quick
@given(kind=KINDS, rank=RANKS, seed=SEEDS)
def test_a_lora_is_parallel_to_itself(kind, rank, seed) -> None:
    held = random_weights(kind, rank, seed)
    found = compared(held, held)
    everywhere = [
        found.whole(SECOND),
        *found.blocks(SECOND).values(),
        *found.parts(SECOND).values(),
    ]
    assert all(overlap.cosine == pytest.approx(1, abs=1e-12) for overlap in everywhere)
    assert all(overlap.norm_ratio == pytest.approx(1, abs=1e-12) for overlap in everywhere)


@quick
@given(seed=SEEDS, factor=st.floats(1e-3, 1e3))
def test_a_factor_changes_the_norm_ratio_and_not_the_cosine(seed, factor) -> None:
    first, second = random_weights(seed=seed), random_weights(seed=seed + 1)
    before = compared(first, second).whole(SECOND)
    by_alpha = {n: replace(f, alpha=factor * f.alpha) for n, f in second.modules.items()}
    after = compared(first, adapter.Weights(by_alpha)).whole(SECOND)
    assert after.cosine == pytest.approx(before.cosine, **EXACT)
    assert after.norm_ratio == pytest.approx(factor * before.norm_ratio, rel=1e-12)


@quick
@given(seed=SEEDS)
def test_only_the_product_of_the_factors_counts(seed) -> None:
    """B R and inv(R) A, twice the rank with half of it unused: the same Delta W, the same scale."""
    held = random_weights(seed=seed)
    turned = {}
    for name, factors in held.modules.items():
        down, up = (factors.tensors[f"lora_{side}.weight"].double() for side in "AB")
        mix = torch.eye(3).double() + 0.3 * numbers((3, 3), seed, name).double().tanh() / 3
        down = torch.cat([torch.linalg.solve(mix, down), numbers(down.shape, "unused")])
        up = torch.cat([up @ mix, torch.zeros_like(up)], dim=1)
        turned[name] = adapter.lora(down, up, 2 * factors.alpha)
    found = compared(held, adapter.Weights(turned)).whole(SECOND)
    assert found.cosine == pytest.approx(1, abs=1e-12)
    assert found.norm_ratio == pytest.approx(1, rel=1e-12)


def test_changes_of_different_rows_are_orthogonal() -> None:
    pair = []
    for rows in (slice(0, 2), slice(2, 4)):
        modules = {}
        for name, factors in random_weights().modules.items():
            up = torch.zeros_like(factors.tensors["lora_B.weight"])
            up[rows] = factors.tensors["lora_B.weight"][rows]
            modules[name] = adapter.lora(factors.tensors["lora_A.weight"], up, 2.0)
        pair.append(adapter.Weights(modules))
    assert cosine(*pair) == 0


@pytest.mark.parametrize("kind", adapter.KINDS)
def test_blocks_and_parts_each_sum_up_to_the_whole(kind) -> None:
    found = compared(random_weights(kind), random_weights("LoRA", seed=1))
    for groups in (found.blocks(SECOND), found.parts(SECOND)):
        total = np.sum([astuple(overlap) for overlap in groups.values()], axis=0)
        np.testing.assert_allclose(total, astuple(found.whole(SECOND)), rtol=1e-12)


def test_a_block_is_compared_as_if_it_were_alone_and_blocks_come_in_natural_order() -> None:
    first, second = random_weights(), random_weights(seed=1)
    blocks = compared(first, second).blocks(SECOND)
    assert list(blocks) == ["double_blocks.2", "double_blocks.10", "img_in", "single_blocks.0"]
    for block, overlap in blocks.items():
        alone = [
            adapter.Weights({n: f for n, f in held.modules.items() if n.startswith(f"{block}")})
            for held in (first, second)
        ]
        assert compared(*alone).whole(SECOND) == overlap
    assert list(compared(first, second).parts(SECOND)) == [
        "img_attn.qkv",
        "img_in",
        "img_mlp.0",
        "linear1",
    ]


@pytest.mark.parametrize(
    "module, block, part",
    [
        ("double_blocks.12.img_mlp.0", "double_blocks.12", "img_mlp.0"),
        ("joint_blocks.3.x_block.attn.qkv", "joint_blocks.3", "x_block.attn.qkv"),
        ("lora_unet_double_blocks_12_img_mlp_0", "lora_unet_double_blocks_12", "img_mlp_0"),
        ("lora_te1_text_model_layers_0_mlp_fc1", "lora_te1_text_model_layers_0", "mlp_fc1"),
        ("text_embedding.0", "text_embedding.0", "text_embedding.0"),
        ("img_in", "img_in", "img_in"),
    ],
)
def test_a_block_ends_with_the_first_number_of_a_name(module, block, part) -> None:
    assert (compare.block_of(module), compare.part_of(module)) == (block, part)


def test_a_module_that_only_one_has_counts_as_zero_in_the_other() -> None:
    every, (extra, *rest) = random_weights(seed=1), SHAPES
    fewer = random_weights(names=rest)
    both = adapter.Weights({name: every.modules[name] for name in rest})
    found, shared = compared(fewer, every), compared(fewer, both).whole(SECOND)
    alone = float((dense(every.modules[extra], extra) ** 2).sum())
    whole = found.whole(SECOND)
    assert whole.dot == pytest.approx(shared.dot, rel=1e-12)
    assert whole.second == pytest.approx(shared.second + alone, rel=1e-12)
    assert astuple(found.overlaps[SECOND][extra])[:2] == (0, 0)
    assert math.isnan(found.overlaps[SECOND][extra].cosine)
    assert found.lacking(FIRST, SECOND) == [extra] and found.lacking(SECOND, FIRST) == []
    said = f"Only second.safetensors has {extra}, counted as 0 in first.safetensors."
    assert compare.summary(found).endswith(said)
    turned = compared(every, fewer).whole(SECOND)
    assert astuple(turned) == pytest.approx((whole.dot, whole.second, whole.first), rel=1e-12)


@cache
def with_references() -> compare.Comparison:
    twin = {compare.TWIN: random_weights("DoRA"), compare.OTHER_SEED: random_weights(seed=9)}
    return compared(random_weights(), random_weights(seed=1), **twin)


def test_references_are_compared_with_the_first() -> None:
    found = with_references()
    assert list(found.overlaps) == [SECOND, compare.TWIN, compare.OTHER_SEED]
    for role, other in (
        (compare.TWIN, random_weights("DoRA")),
        ("other seed", random_weights(seed=9)),
    ):
        assert found.overlaps[role] == compared(random_weights(), other).overlaps[SECOND]


def test_every_lora_has_a_row_for_the_modules_of_all() -> None:
    every, (extra, *rest) = random_weights(seed=1), SHAPES
    fewer = random_weights(names=rest)
    found = compared(fewer, fewer, **{compare.TWIN: every})
    assert list(found.overlaps[SECOND]) == list(found.overlaps[compare.TWIN]) == sorted(SHAPES)
    assert found.overlaps[SECOND][extra] == compare.Overlap(0, 0, 0)
    assert found.whole(SECOND).cosine == pytest.approx(1, abs=1e-12)
    assert found.lacking(SECOND, FIRST) == found.lacking(FIRST, SECOND) == []


def test_a_saved_comparison_is_the_same_when_loaded(tmp_path) -> None:
    found = with_references()
    found.save(tmp_path / "comparison.json")
    loaded = compare.Comparison.load(tmp_path / "comparison.json")
    assert loaded == found and compare.summary(loaded) == compare.summary(found)
    written = json.loads((tmp_path / "comparison.json").read_text())
    (tmp_path / "later.json").write_text(json.dumps(written | {"version": 99}))
    with pytest.raises(ValueError, match="later.json .* of version 99.*update the pack"):
        compare.Comparison.load(tmp_path / "later.json")
    (tmp_path / "torn.json").write_text(json.dumps(written | {"overlaps": {SECOND: {"m": {}}}}))
    with pytest.raises(ValueError, match="torn.json is damaged"):
        compare.Comparison.load(tmp_path / "torn.json")


def test_the_table_holds_every_cosine() -> None:
    found = with_references()
    lines = compare.summary(found).splitlines()
    for role in found.overlaps:
        (line,) = [line for line in lines if line.startswith(f"{role:10}  {role}.safetensors")]
        whole = found.whole(role)
        assert f"{whole.cosine:.4f}" in line and f"{whole.norm_ratio:.4f}" in line
    for block, overlap in found.blocks(SECOND).items():
        line = next(line for line in lines if line.split()[:1] == [block])
        values = [found.blocks(role)[block].cosine for role in found.overlaps]
        assert line.split()[1:] == [
            f"{value:.4f}" for value in (values[0], overlap.norm_ratio, *values[1:])
        ]


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    held = random_weights()
    other = {name: numbers((3, 5), name) for name in SHAPES}
    wide = adapter.Weights({n: adapter.lora(t, numbers((12, 3)), 1.0) for n, t in other.items()})
    with pytest.raises(ValueError, match="is 12x6 in first.safetensors and 12x5 in second"):
        compared(held, wide)
    for value, said in ((0.0, "= 0"), (math.nan, "= nan"), (math.inf, "= (nan|inf)")):
        modules = {
            n: adapter.lora(f.tensors["lora_A.weight"], f.tensors["lora_B.weight"] * value, 1.0)
            for n, f in held.modules.items()
        }
        broken = adapter.Weights(modules)
        for role, pair in (("first", (broken, held)), ("second", (held, broken))):
            with pytest.raises(ValueError, match=f"^{role}.safetensors changes nothing .*{said}"):
                compared(*pair)


@pytest.fixture(scope="module")
def model(comfy, tmp_path_factory):
    return comfy.sd.load_diffusion_model(str(toys.flux(tmp_path_factory.mktemp("toys"))))


def trained(model, kind: str = "LoRA", seed: int = 0, alpha: float = 1.5) -> adapter.Weights:
    """An adapter of rank 3 without zeros on the toy's image MLPs and single blocks."""
    from pack.host import families

    linears = families.linears(model.model.diffusion_model)
    targets = adapter.match_targets(linears, "img_mlp|single_blocks.*linear")
    modules = {}
    for name, factors in adapter.zero_weights(linears, targets, 3, alpha, 0, kind).modules.items():
        noise = {k: numbers(tuple(t.shape), seed, name, k) for k, t in factors.tensors.items()}
        if kind == "DoRA":
            noise["dora_scale"] = factors.tensors["dora_scale"] * (1 + 0.1 * noise["dora_scale"])
        modules[name] = adapter.Factors(noise, alpha)
    return adapter.Weights(modules)


def compared_files(model, *paths: Path) -> compare.Comparison:
    from pack.host import comparing

    files = {role: (path.name, path) for role, path in zip((FIRST, SECOND), paths)}
    return comparing.run(files, model and model.model, lambda total: lambda: None)


def saved(path: Path, weights: adapter.Weights) -> Path:
    weights.save(path, {})
    return path


@pytest.mark.parametrize("kinds", [(kind, "LoRA") for kind in adapter.KINDS] + [("DoRA", "LoKr")])
def test_the_cosine_of_two_files_is_that_of_the_weights_comfyui_makes_of_them(
    model, tmp_path, kinds
) -> None:
    import comfy.lora

    paths = [
        saved(tmp_path / f"{seed}.safetensors", trained(model, kind, seed))
        for seed, kind in enumerate(kinds)
    ]
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    changes = []
    for path in paths:
        changes.append([])
        for key, patch in sorted(comfy.lora.load_lora(load_file(path), keys).items()):
            weight = model.model.state_dict()[key].double()
            entry = (1.0, patch, 1.0, None, None)
            made = comfy.lora.calculate_weight([entry], weight.clone(), key, torch.float64)
            changes[-1].append((made - weight).flatten())
    one, two = map(torch.cat, changes)
    found = compared_files(model, *paths).whole(SECOND)
    # ComfyUI adds an epsilon to a DoRA's row lengths.
    assert found.cosine == pytest.approx(float(one @ two / one.norm() / two.norm()), abs=1e-9)
    assert found.norm_ratio == pytest.approx(float(two.norm() / one.norm()), rel=1e-9)


DIFFUSERS = {
    "double_blocks.{}.img_mlp.0": "transformer.transformer_blocks.{}.ff.net.0.proj",
    "double_blocks.{}.img_mlp.2": "transformer.transformer_blocks.{}.ff.net.2",
    "single_blocks.{}.linear2": "transformer.single_transformer_blocks.{}.proj_out",
}
SLICES = {"attn.to_q": (0, 128), "attn.to_k": (128, 256), "attn.to_v": (256, 384)}
SLICES["proj_mlp"] = (384, 896)


def renamed(weights: adapter.Weights, naming: str) -> dict[str, torch.Tensor]:
    """The same LoRA as other trainers write it."""
    diffusers = {ours.format(i): name.format(i) for ours, name in DIFFUSERS.items() for i in (0, 1)}
    tensors = {}
    for name, factors in weights.modules.items():
        down, up = factors.tensors["lora_A.weight"], factors.tensors["lora_B.weight"]
        if naming == "kohya":
            key, suffixes = f"lora_unet_{name.replace('.', '_')}", ("lora_down", "lora_up")
            tensors[f"{key}.alpha"] = torch.tensor(factors.alpha)
        elif naming == "PEFT":
            # It has no alpha in the file: the scale is in B.
            key, suffixes, up = f"diffusion_model.{name}", ("lora_A", "lora_B"), factors.scale * up
        elif name.endswith("linear1"):
            block = f"transformer.single_transformer_blocks.{name.split('.')[1]}"
            for part, (start, end) in SLICES.items():
                tensors[f"{block}.{part}.lora_A.weight"] = down.clone()
                tensors[f"{block}.{part}.lora_B.weight"] = factors.scale * up[start:end]
            continue
        else:
            key, suffixes, up = diffusers[name], ("lora_A", "lora_B"), factors.scale * up
        tensors |= {f"{key}.{suffixes[0]}.weight": down, f"{key}.{suffixes[1]}.weight": up}
    return tensors


@pytest.mark.parametrize("naming", ["kohya", "PEFT", "diffusers"])
def test_with_a_model_a_file_is_parallel_to_itself_in_other_names(model, tmp_path, naming) -> None:
    held = trained(model)
    ours = saved(tmp_path / "ours.safetensors", held)
    text = {"lora_te1_mlp_fc1.lora_down.weight": torch.zeros(2, 2)}
    save_file(renamed(held, naming) | text, tmp_path / "theirs.safetensors")
    found = compared_files(model, ours, tmp_path / "theirs.safetensors")
    assert found.lacking(FIRST, SECOND) == found.lacking(SECOND, FIRST) == []
    # Where the scale is multiplied into B, B is rounded to float32.
    for overlap in (found.whole(SECOND), *found.blocks(SECOND).values()):
        assert overlap.cosine == pytest.approx(1, abs=1e-12)
        assert overlap.norm_ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr"])
def test_without_a_model_files_of_one_naming_give_the_same_numbers(model, tmp_path, kind) -> None:
    pair = [saved(tmp_path / f"{n}.safetensors", trained(model, kind, n)) for n in (0, 1)]
    assert compared_files(None, *pair) == compared_files(model, *pair)


@pytest.mark.parametrize("naming", ["kohya", "PEFT", "diffusers"])
def test_without_a_model_names_of_any_one_convention_will_do(model, tmp_path, naming) -> None:
    ours, theirs = [], []
    for seed in (0, 1):
        held = trained(model, seed=seed)
        ours.append(saved(tmp_path / f"ours_{seed}.safetensors", held))
        theirs.append(tmp_path / f"theirs_{seed}.safetensors")
        save_file(renamed(held, naming), theirs[-1])
    expected, found = compared_files(None, *ours), compared_files(None, *theirs)
    # B is rounded to float32 where the scale is multiplied into it.
    cosines = [made.whole(SECOND).cosine for made in (found, expected)]
    assert cosines[0] == pytest.approx(cosines[1], abs=1e-7)
    assert len(found.blocks(SECOND)) == len(expected.blocks(SECOND)) == 4


def test_without_a_model_nothing_is_guessed(model, tmp_path) -> None:
    held = trained(model)
    ours = saved(tmp_path / "ours.safetensors", held)
    for naming in ("kohya", "diffusers"):
        theirs = tmp_path / f"{naming}.safetensors"
        save_file(renamed(held, naming), theirs)
        with pytest.raises(ValueError, match=f"ours.safetensors and {naming}.* connect MODEL"):
            compared_files(None, ours, theirs)
    fewer = adapter.Weights(dict(list(held.modules.items())[1:]))
    with pytest.raises(ValueError, match="only one has double_blocks.0.img_mlp.0.*connect MODEL"):
        compared_files(None, ours, saved(tmp_path / "fewer.safetensors", fewer))
    dora = saved(tmp_path / "dora.safetensors", trained(model, "DoRA"))
    with pytest.raises(ValueError, match="double_blocks.0.img_mlp.0 by DoRA.*connect MODEL"):
        compared_files(None, dora, dora)
    for extra, said in (
        ({"other.weight": torch.ones(2)}, "1 keys that say nothing .* other.weight: connect MODEL"),
        ({"other.diff": torch.ones(2, 2)}, "changes other .* full difference"),
    ):
        save_file(held.tensors() | extra, tmp_path / "odd.safetensors")
        with pytest.raises(ValueError, match=said):
            compared_files(None, ours, tmp_path / "odd.safetensors")


def test_a_dora_on_weights_stored_in_eight_bits_is_refused(comfy) -> None:
    from pack.host import comparing

    network = torch.nn.Sequential(Linear(4, 4)).to(torch.float8_e4m3fn)
    base = comparing._bases(SimpleNamespace(diffusion_model=network))
    with pytest.raises(ValueError, match="0 by DoRA .* torch.float8_e4m3fn: load MODEL in another"):
        base("0")


def test_every_module_of_every_pair_is_counted(model, tmp_path) -> None:
    from pack.host import comparing

    path = saved(tmp_path / "lora.safetensors", trained(model))
    fewer = adapter.Weights(dict(list(trained(model).modules.items())[2:]))
    other = saved(tmp_path / "fewer.safetensors", fewer)
    totals, ticks = [], []
    comparing.run(
        {FIRST: ("a", other), SECOND: ("b", path), compare.TWIN: ("c", other)},
        model.model,
        lambda total: totals.append(total) or (lambda: ticks.append(1)),
    )
    assert totals == [len(ticks)] == [2 * 8]


@pytest.mark.server
def test_the_node_writes_table_and_figure_and_looks_again_at_a_changed_file(
    server, model, tmp_path
) -> None:
    loras = server.base / "models" / "loras"
    for seed, name in enumerate(("native", "gated", "seed")):
        saved(loras / f"{name}.safetensors", trained(model, seed=seed))
    save_file(renamed(trained(model), "kohya"), loras / "again.safetensors")
    prompt = {
        "unet": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"},
        },
        "compare": {
            "class_type": "DemotionCompareLoras",
            "inputs": {
                "first": "native.safetensors",
                "second": "gated.safetensors",
                "twin": "again.safetensors",
                "other_seed": "seed.safetensors",
                "name": "native_gated",
                "theme": "light",
                "model": ["unet", 0],
            },
        },
        "image": {"class_type": "PreviewImage", "inputs": {"images": ["compare", 1]}},
    }

    def made() -> dict[str, Path]:
        shown = run.queue(server.url, prompt)["outputs"]["compare"]["files"]
        return {f["label"]: server.output / f["subfolder"] / f["filename"] for f in shown}

    files = made()
    assert {path.parent for path in files.values()} == {server.output / "demotion" / "comparisons"}
    found = compare.Comparison.load(files["comparison"])
    expected = compared_files(model, loras / "native.safetensors", loras / "gated.safetensors")
    assert found.overlaps[SECOND] == expected.overlaps[SECOND]
    assert found.whole(compare.TWIN).cosine == pytest.approx(1, abs=1e-12)
    assert files["comparison (table)"].read_text() == compare.summary(found) + "\n"
    assert Image.open(files["comparison (picture)"]).size == (1200, 900)
    assert files["comparison (SVG)"].read_text().startswith("<?xml")
    assert made() == files
    saved(loras / "gated.safetensors", trained(model, seed=7))
    again = made()
    assert again["comparison"].name == "native_gated_00002.json"
    assert compare.Comparison.load(again["comparison"]).whole(SECOND) != found.whole(SECOND)
