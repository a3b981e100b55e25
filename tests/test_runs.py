"""Whole runs of the probe and the trainer on real model classes with the VAEs that fit them."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import toys

from demotion import arms, cosine, draws, gap_map, gate, grid, measure, probe, train

TIER = 64
ARMS = (arms.SRC, arms.REENC, arms.Arm("demote", 48), arms.Arm("repromote", 48))
# What does not depend on the model's class.
FLUX = pytest.mark.parametrize("toy", ["flux"], indirect=True)


@pytest.fixture(scope="module", params=["flux", "wan", "anima"])
def toy(request, comfy, tmp_path_factory):
    """(MODEL, training set of two pictures, one masked, cache folder)."""
    import comfy.utils
    from pack.host import families, text
    from pack.host import vae as host_vae

    folder = tmp_path_factory.mktemp(request.param)
    make_vae = toys.taesd if request.param == "flux" else toys.wan_vae
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(getattr(toys, request.param)(folder)))
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(make_vae(folder))))
        host_vae.check_fits(vae, model.model)
        codec = host_vae.VaeCodec(vae)
        patch = families.family_of(model.model).patch
        items = []
        for index in range(2):
            generator = np.random.default_rng(index)
            pixels = generator.integers(0, 255, (80, 80, 3), dtype=np.uint8)
            mask = np.full((80, 80), 255, np.uint8)
            mask[:40] = 0
            items.append(
                arms.Item(
                    image=arms.content_hash(pixels),
                    name=f"picture {index + 1}",
                    picture=arms.store_picture(pixels, folder),
                    mask=arms.store_picture(mask, folder) if index else None,
                    size=(80, 80),
                    native=grid.native_grid((80, 80), TIER, vae_factor=codec.factor, patch=patch),
                    caption="",
                    repeats=1,
                    conditioning=tokens(text.zero_conditioning(model.model)),
                )
            )
        training_set = arms.TrainingSet(tuple(items), TIER, codec.factor, patch, codec, folder)
        for arm in ARMS:
            training_set = arms.add_arm(training_set, arm, lambda: None)
    return model, training_set, folder


def tokens(zero):
    """Conditioning of a few random tokens: to a single zero token no query or value matters."""
    width = zero[0][0].shape[-1]
    return [[torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)), zero[0][1]]]


def options(**changes):
    from pack.host import probing

    chosen = {
        "bins": ((0.4, 0.9),),
        "draws": 2,
        "seed": 0,
        "shared_noise": True,
        "rank": 2,
        "targets": "",
        "lora": None,
    }
    return probing.Options(**chosen | changes)


def counting(totals: list[int], ticks: list[int]):
    def progress(total: int):
        totals.append(total)
        return lambda *_: ticks.append(1)

    return progress


def test_a_probe_measures_every_cell_once_and_a_second_run_takes_no_gradient(toy):
    from pack.host import probing

    model, training_set, folder = toy
    totals, ticks = [], []
    # The toy Anima lacks the text adapter, whose memory ComfyUI leaves as it finds it: no two loads
    # of it are the same model.
    runs = 1 if type(model.model).__name__ == "Anima" else 2
    with torch.inference_mode():
        for _ in range(runs):
            measured, path = probing.run(
                model, training_set, options(), folder / "cells", counting(totals, ticks)
            )
    assert totals == [2 * 2 * 5, 0][:runs] and len(ticks) == 20
    assert [cell.arms for cell in measured.cells] == [
        ("src", "null", "reenc", "demote:48", "repromote:48")
    ] * 2
    assert measured.settings["protocol"] == probe.PROTOCOL
    assert path.stem == measured.key
    drawn = gap_map.gap_map(measured)
    assert {gap.verdict for gap in drawn.gaps} == {"fewer than 8 images: no verdict"}


def test_a_precision_below_float32_is_compared_with_it_once_and_told(toy):
    from pack.host import probing

    model, training_set, folder = toy
    # Whether a second run finds the first's check can be told where two loads are one model.
    runs = 1 if type(model.model).__name__ == "Anima" else 2
    chosen = options(compute="bf16", checkpointing=True)
    with torch.inference_mode():
        written = []
        for _ in range(runs):
            again, path = probing.run(
                model, training_set, chosen, folder / "bf16", counting([], [])
            )
            written.append(path.read_bytes())
    check = again.checks["precision"]
    assert check["dtype"] == "bfloat16" and len(check["cosines"]) == 2
    assert all(0.9 < value < 1 for value in check["cosines"])
    assert written == written[:1] * runs
    moved = 1 - np.mean(check["cosines"])
    said = [gap_map.summary(gap_map.gap_map(again, margin=m)) for m in (2 * moved, moved / 2)]
    assert "bfloat16 moves a gradient" in said[0] and "Warning" not in said[0]
    assert "Warning: bfloat16 moves a gradient" in said[1]


@pytest.mark.parametrize("draws_", [1, 4])
def test_a_sketched_probe_keeps_what_the_population_needs(toy, draws_, tmp_path):
    from pack.host import probing

    model, training_set, _ = toy
    chosen = options(draws=draws_, sketch=64, diagnostics=False)
    with torch.inference_mode():
        measured, path = probing.run(model, training_set, chosen, tmp_path, counting([], []))
    assert measured.settings["arms"] == ["src", "demote:48"] and measured.settings["sketch"] == 64
    for cell in measured.cells:
        assert cell.arms == ("src", "demote:48")
        assert cell.sketches.shape == (draws_, 2, 64) and cell.block_counts == (1,) * draws_
        assert np.isfinite(cell.sketches).all() and cell.sketches.any(axis=(0, 2)).all()
    assert measure.sketch_path(path).stat().st_size == 2 * 4 * draws_ * 2 * 64


@FLUX
def test_without_a_route_or_diagnostics_there_is_nothing_to_measure(toy, tmp_path):
    from pack.host import probing

    model, training_set, _ = toy
    bare = replace(training_set, arms=(arms.SRC, arms.REENC))
    with pytest.raises(ValueError, match="no demoted tier, .* add Demote Latents"):
        probing.run(model, bare, options(diagnostics=False), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="looks is 5: plan 1 to 4"):
        probing.run(model, training_set, options(looks=5), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="draws is 6: .* take 4 or 8"):
        probing.run(model, training_set, options(draws=6, sketch=64), tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="needs a sketch"):
        probing.run(model, training_set, options(draws=1), tmp_path, pytest.fail)


@pytest.fixture(scope="module")
def ten(toy):
    """Ten pictures by name, of which the set has two by content, and one route."""
    model, training_set, _ = toy
    items = tuple(
        replace(training_set.items[index % 2], image=f"{index:016x}") for index in range(10)
    )
    return model, replace(training_set, items=items, arms=(arms.SRC, arms.Arm("demote", 48)))


BINS = ((0.3, 0.6), (0.6, 0.9))


@FLUX
def test_a_micro_batched_probe_says_what_a_draw_is_and_is_a_measurement_of_its_own(toy, tmp_path):
    from pack.host import probing

    model, training_set, _ = toy
    few = options(draws=4, micro_batch=2, diagnostics=False)
    totals, ticks, said = [], [], []
    with torch.inference_mode():
        for _ in range(2):
            measured, path = probing.run(
                model, training_set, few, tmp_path, counting(totals, ticks), said.append
            )
        assert totals == [2 * 2 * 2, 0] and len(ticks) == 8
        assert said[0].startswith("8 gradients of 2 draws each, counted as one draw, about ")
        assert measured.settings["draws"] == 4 and measured.settings["micro_batch"] == 2
        assert {cell.counts for cell in measured.cells} == {(1, 1)}
        ordinary, other = probing.run(
            model, training_set, replace(few, micro_batch=1), tmp_path, counting([], [])
        )
        assert "micro_batch" not in ordinary.settings and other != path
        with pytest.raises(ValueError, match="micro_batch"):
            probing.run(
                model, training_set, replace(few, micro_batch=1), tmp_path, pytest.fail, into=path
            )
    # The same draws, to the noise that micro-batches of two leave.
    both = [cosine.debias(*m.cells[0].pooled(), m.cells[0].count) for m in (measured, ordinary)]
    assert not np.array_equal(*both)
    assert measured.cells[0].losses == pytest.approx(ordinary.cells[0].losses, rel=1e-4)


@FLUX
def test_draws_that_cannot_share_a_forward_are_refused_before_a_gradient(
    toy, tmp_path, monkeypatch
):
    from pack.host import families, probing

    model, training_set, _ = toy
    gated = arms.add_arm(training_set, arms.Arm("demote", 48, rotary="gated_yarn"), lambda: None)
    chosen = options(draws=4, micro_batch=2)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="gated_yarn, .* micro_batch is 2: set it to 1"):
            probing.run(model, gated, chosen, tmp_path, pytest.fail)
        with pytest.raises(ValueError, match="draws is 6, and micro_batch 4 .* take 8 or more"):
            probing.run(model, gated, options(draws=6, micro_batch=4), tmp_path, pytest.fail)
        alone = replace(families.FAMILIES["Flux"], alone=lambda network, given: True)
        monkeypatch.setitem(families.FAMILIES, "Flux", alone)
        with pytest.raises(ValueError, match="picture 1 cannot share .*: set micro_batch to 1"):
            probing.run(model, training_set, chosen, tmp_path, pytest.fail)
    assert not list(tmp_path.iterdir())


@FLUX
def test_with_one_route_the_others_are_left_out_and_named(toy, tmp_path):
    from pack.host import probing

    model, training_set, _ = toy
    two = arms.add_arm(training_set, arms.Arm("demote", 32), lambda: None)
    said = []
    with torch.inference_mode():
        for diagnostics, found in (
            (False, ["src", "demote:48"]),
            (True, ["src", "null", "reenc", "demote:48", "repromote:48"]),
        ):
            chosen = options(one_route=True, diagnostics=diagnostics)
            measured, _ = probing.run(model, two, chosen, tmp_path, counting([], []), said.append)
            assert measured.settings["arms"] == found
            assert said[-1].startswith("64 -> 48 only, without 64 -> 32; ")
    # Where there is one, there is nothing to tell.
    with torch.inference_mode():
        chosen = options(one_route=True, seed=1)
        probing.run(model, training_set, chosen, tmp_path, counting([], []), said.append)
    assert said[-1].startswith("20 gradients, about ")


@FLUX
def test_memory_needed_grows_by_the_activations_of_each_sample(toy):
    from pack.host import memory

    model, training_set, _ = toy
    needs = [memory.needed(model, training_set, options(), 5, False, batch) for batch in (1, 2, 3)]
    assert needs[2] - needs[1] == needs[1] - needs[0] > 0
    assert needs[0] == memory.needed(model, training_set, options(), 5, False)


def test_quick_asks_of_one_route_alone():
    from pack.host import probing

    alone = {name for name, preset in probing.PRESETS.items() if preset.one_route}
    assert alone == {"quick"} and not probing.PRESETS["quick"].diagnostics


@FLUX
def test_a_bin_that_is_decided_gets_no_more_pictures_and_a_run_that_continues_agrees(
    ten, tmp_path, monkeypatch
):
    from pack.host import probing

    model, training_set = ten
    chosen = options(bins=BINS, looks=2, diagnostics=False)
    # What is decided is the map's business; here it is the first bin.
    monkeypatch.setattr(gap_map, "decided", lambda drawn: {("demote:48", BINS[0])})
    totals, said = [], []
    with torch.inference_mode():
        measured, path = probing.run(
            model, training_set, chosen, tmp_path, counting(totals, []), said.append
        )
        assert totals == [8 * 2 * 2 * 2, 2 * 2 * 2]
        taken = [(cell.image, cell.bin) for cell in measured.cells]
        first = [f"{index:016x}" for index in range(8)]
        assert taken == [(image, edges) for image in first for edges in BINS] + [
            (f"{index:016x}", BINS[1]) for index in (8, 9)
        ]
        # What it takes is said before, from the most that it can be; then what is decided.
        assert said[0].startswith("at most 80 gradients, about ") and " on the disk" in said[0]
        assert said[1].startswith(said[0] + "\nlook 1 of 2, 8 pictures: demote:48 0.3-0.6 ")
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        assert [line[:16] == b'{"check": "look ' for line in lines].index(True) == 17
        for kept in (10, 17, 19):
            path.write_bytes(b"".join(lines[:kept]) + lines[kept][:30])
            again, _ = probing.run(model, training_set, chosen, tmp_path, counting([], []))
            assert path.read_bytes() == whole
            assert again.checks == measured.checks


@FLUX
def test_when_every_bin_is_decided_a_run_ends(ten, tmp_path):
    from pack.host import probing

    model, training_set = ten
    # Every distance is below this margin, wherever there is a signal.
    chosen = options(bins=BINS[1:], draws=4, looks=2, diagnostics=False, margin=0.99)
    totals = []
    with torch.inference_mode():
        measured, _ = probing.run(model, training_set, chosen, tmp_path, counting(totals, []))
    assert totals == [8 * 4 * 2, 0] and len(measured.cells) == 8
    assert measured.checks["look 1"] == [["demote:48", list(BINS[1]), "safe"]]


@FLUX
def test_one_look_is_exact_in_what_it_says(ten, tmp_path):
    from pack.host import probing

    model, training_set = ten
    few = replace(training_set, items=training_set.items[:2])
    totals, said = [], []
    with torch.inference_mode():
        _, path = probing.run(model, few, options(), tmp_path, counting(totals, []), said.append)
    assert totals == [2 * 2 * 3] and said[0].startswith("12 gradients, about ")
    written = path.stat().st_size - len(path.read_bytes().splitlines()[0])
    stated = float(re.search(r"([\d.]+) kB on the disk", said[0])[1]) * 1000
    assert stated == pytest.approx(written, rel=0.2)


@FLUX
def test_memory_does_not_grow_with_the_pictures(ten, tmp_path, monkeypatch):
    from pack.host import probing, velocity

    model, training_set = ten
    # The few that are kept are there from the first picture on.
    monkeypatch.setattr(velocity, "PREPARED", 2)
    # As if every picture had a caption of its own.
    items = [
        replace(item, conditioning=[list(item.conditioning[0])]) for item in training_set.items[:5]
    ]
    # So many that two pictures fill what the probe keeps of draws.
    draws = probe.KEPT // 2
    done, live = [], []

    def tick(*_):
        done.append(None)
        if len(done) % (2 * draws) == 0:
            gc.collect()
            found = [value for value in gc.get_objects() if type(value) is torch.Tensor]
            storages = {value.untyped_storage().data_ptr(): value.nbytes for value in found}
            live.append(sum(storages.values()))

    chosen = options(bins=BINS[:1], draws=draws, sketch=1 << 10, diagnostics=False)
    with torch.inference_mode():
        probing.run(
            model, replace(training_set, items=tuple(items)), chosen, tmp_path, lambda total: tick
        )
    # After the last gradient of the second picture and of the last: nothing is kept of those
    # between, not even a latent.
    assert (
        len(live) == len(items)
        and live[-1] - live[1] < training_set.latent(items[0], arms.SRC).nbytes
    )


@FLUX
def test_prepared_conditioning_does_not_grow_with_the_pictures(ten):
    from pack.host import session, velocity

    model, training_set = ten
    with torch.inference_mode(), session.open_session(model) as live:
        latent, _ = live.load_arm(training_set, training_set.items[0], arms.SRC)
        captions = [[list(training_set.items[0].conditioning[0])] for _ in range(40)]
        with torch.no_grad():
            first = live.velocity(latent, [0.5], [captions[0]])
            for caption in captions:
                live.velocity(latent, [0.5], [caption])
            assert torch.equal(live.velocity(latent, [0.5], [captions[0]]), first)
        assert len(live.velocity._prepared) == velocity.PREPARED


def test_a_bin_outside_the_models_range_is_refused(toy):
    from pack.host import families, probing

    model, training_set, folder = toy
    assert families.sigma_range(model.model) == (0.0, 1.0)
    with pytest.raises(ValueError, match="bin 0.9-1.2 leaves the model's sigma range 0-1"):
        probing.run(model, training_set, options(bins=((0.9, 1.2),)), folder, lambda total: None)


def test_training_moves_the_adapter_and_goes_through_the_gate(toy):
    from pack.host import training

    model, training_set, folder = toy
    settings = train.Settings(steps=4, learning_rate=1e-3, batch_size=2)
    opened = gate.by_hand(TIER, 48, (0.0, 1.0))
    with torch.inference_mode():
        result = training.run(
            model,
            training_set,
            opened,
            training.Options(settings, 2, 2.0, ""),
            folder,
            training.Watch(),
        )
    assert result.history.demoted == [2] * 4
    assert result.history.saving == pytest.approx(1 - 9 / 16)
    moved = [factors.delta().abs().max() > 0 for factors in result.weights.modules.values()]
    # The last block of a network may have branches that reach no output.
    assert sum(moved) >= 0.9 * len(moved)
    assert "not measured" in result.report


def test_a_gate_measured_on_something_else_is_flagged(toy):
    from pack.host import training

    model, training_set, folder = toy
    basis = {"model": "0123456789abcdef", "algorithm": "LoRA", "dtype": "bfloat16"}
    opened = gate.Gate((), True, 0.05, "feedfacefeedface", TIER, basis)
    settings = train.Settings(steps=1, learning_rate=1e-4)
    with torch.inference_mode():
        result = training.run(
            model,
            training_set,
            opened,
            training.Options(settings, 2, 2.0, "", "DoRA"),
            folder,
            training.Watch(),
        )
    notes = [line for line in result.report.splitlines() if line.startswith("Note:")]
    assert [note.split(",")[0] for note in notes] == [
        "Note: the gate was measured on model 0123456789abcdef",
        "Note: the gate was measured on algorithm LoRA",
        "Note: the gate was measured on dtype bfloat16",
    ]


@pytest.mark.parametrize("algorithm", ["DoRA", "LoHa", "LoKr"])
def test_every_algorithm_trains_to_a_file_that_comfyui_loads_and_the_probe_measures(
    toy, algorithm, tmp_path
):
    import comfy.lora
    from pack.host import lora_file, probing, training

    model, training_set, folder = toy
    settings = train.Settings(steps=2, learning_rate=1e-3, batch_size=1)
    chosen = training.Options(settings, 2, 2.0, "", algorithm)
    opened = gate.by_hand(TIER, 48, (0.0, 1.0))
    with torch.inference_mode():
        result = training.run(model, training_set, opened, chosen, tmp_path, training.Watch())
    moved = [factors.delta().abs().max() > 0 for factors in result.weights.modules.values()]
    assert sum(moved) >= 0.9 * len(moved)
    assert result.metadata["ss_network_module"] == "lycoris.kohya"
    written = {"DoRA": "lora", "LoHa": "loha", "LoKr": "lokr"}[algorithm]
    assert json.loads(result.metadata["ss_network_args"])["algo"] == written

    path = tmp_path / "trained.safetensors"
    result.weights.save(path, result.metadata)
    read, unused = lora_file.read(path, model.model)
    assert unused == [] and read.fingerprint == result.weights.fingerprint
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    assert len(comfy.lora.load_lora(result.weights.tensors(), keys)) == len(read.modules)
    with torch.inference_mode():
        measured, _ = probing.run(
            model, training_set, options(lora=path), tmp_path, lambda total: lambda: None
        )
    parts = ["A", "B", "magnitude"] if algorithm == "DoRA" else ["w1", "w2"]
    assert measured.settings["parts"] == parts
    assert measured.settings["adapter"]["algorithm"] == algorithm
    assert measured.settings["adapter"]["unused_keys"] == 0
    drawn = gap_map.gap_map(measured)
    assert set(drawn.gaps[0].parts) == set(parts)


def test_the_models_own_density_is_its_schedule(toy):
    from pack.host import families

    model, _, _ = toy
    density = families.own_density(model.model)
    assert isinstance(density, draws.SigmaDensity)
    for percent in (0.1, 0.5, 0.9):
        expected = float(model.model.model_sampling.percent_to_sigma(percent))
        assert density.quantile(1 - percent) == pytest.approx(expected, abs=1e-3)
