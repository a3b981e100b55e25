"""Whole runs of the probe and the trainer on real model classes with the VAEs that fit them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import toys

from demotion import arms, draws, gap_map, gate, grid, probe, train

TIER = 64
ARMS = (arms.SRC, arms.REENC, arms.Arm("demote", 48), arms.Arm("repromote", 48))


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
            counting([], []),
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
            counting([], []),
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
        result = training.run(model, training_set, opened, chosen, tmp_path, counting([], []))
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
