"""A live ComfyUI server: API JSON in, files and history out, cache, cancel, resume, bad input."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import run
from demotion import gap_map, gate, measure

pytestmark = pytest.mark.server
TIER = 64


def pictures(base: Path, name: str, count: int = 9, size: int = 96) -> str:
    """An input folder of seeded smooth pictures with captions."""
    folder = base / "input" / name
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for index in range(count):
        coarse = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
        picture.save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture {index}")
    return name


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def graph(name: str, **changes) -> dict:
    """The whole job on the toy models, small; changes are {node id: {input: value}}."""
    prompt = {
        "unet": node("UNETLoader", unet_name="toy_flux.safetensors", weight_dtype="default"),
        "vae": node("VAELoader", vae_name="toy_taesd.safetensors"),
        "folder": node("DemotionLoadTrainingFolder", folder=name),
        "set": node(
            "DemotionTrainingSet",
            model=["unet", 0],
            images=["folder", 0],
            vae=["vae", 0],
            native_tier=TIER,
            captions=["folder", 1],
            masks=["folder", 2],
            repeats=["folder", 3],
        ),
        "reenc": node("DemotionReencodeControl", training_set=["set", 0]),
        "demote": node("DemotionDemoteLatents", training_set=["reenc", 0], target_tier=48),
        "repromote": node("DemotionRepromoteLatents", training_set=["demote", 0], from_tier=48),
        "probe": node(
            "DemotionGradientProbe",
            model=["unet", 0],
            training_set=["repromote", 0],
            bins="0.2-0.5,0.5-0.9",
            draws=4,
            seed=0,
            noise="shared",
            adapter="[fresh adapter]",
            rank=2,
            targets="",
            compute="model",
            checkpointing=False,
        ),
        "cosine": node(
            "DemotionDebiasedCosine",
            measurement=["probe", 0],
            estimator="one_set",
            control="none",
            margin=0.05,
        ),
        "plot": node("DemotionPlotGapMap", gap_map=["cosine", 0], name="map"),
        "save_map": node("DemotionSaveGapMap", gap_map=["cosine", 0], name="map"),
        "gate": node("DemotionGateFromGapMap", gap_map=["cosine", 0]),
        "save_gate": node("DemotionSaveGate", gate=["gate", 0], name="gate"),
        "train": node(
            "DemotionTrainLora",
            model=["unet", 0],
            training_set=["repromote", 0],
            gate=["gate", 0],
            steps=4,
            learning_rate=1e-4,
            rank=2,
            alpha=2.0,
            batch_size=2,
            seed=0,
            sigma_density="logit_normal",
            density_mean=0.0,
            density_std=1.0,
            density_shift=3.0,
            schedule="constant",
            warmup_steps=0,
            targets="",
            name="lora",
            algorithm="LoRA",
            compute="model",
            checkpointing=True,
        ),
    }
    for name, inputs in changes.items():
        prompt[name]["inputs"].update(inputs)
    return prompt


def gate_by_hand(native: int, target: int) -> dict:
    return node(
        "DemotionGateByHand",
        native_tier=native,
        target_tier=target,
        sigma_low=0.5,
        sigma_high=1.0,
        span="always",
        span_fraction=0.5,
    )


def only(prompt: dict, *outputs: str) -> dict:
    """The part of a prompt that these nodes need."""
    needed, todo = {}, list(outputs)
    while todo:
        name = todo.pop()
        if name not in needed:
            needed[name] = prompt[name]
            todo += [v[0] for v in prompt[name]["inputs"].values() if isinstance(v, list)]
    return needed


def files(server, entry: dict) -> dict[str, Path]:
    """Label -> path of every file that a run names."""
    return {
        made["label"]: server.output / made["subfolder"] / made["filename"]
        for output in entry["outputs"].values()
        for made in output.get("files", [])
    }


def executed(entry_events: list[tuple[str, dict]]) -> set[str]:
    return {data["node"] for kind, data in entry_events if kind == "executing" and data.get("node")}


def post(server, path: str, body: dict) -> None:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()


@pytest.fixture(scope="module")
def whole(server):
    """The whole job, once: (prompt, history entry, files)."""
    prompt = graph(pictures(server.base, "whole"))
    entry = run.queue(server.url, prompt)
    return prompt, entry, files(server, entry)


def test_the_whole_job_leaves_every_file_it_names(whole):
    _, _, made = whole
    assert set(made) == {
        "measurement",
        "gap map (picture)",
        "gap map (SVG)",
        "gap map",
        "gate",
        "LoRA",
        "loss curve",
        "report",
        "history",
    }
    assert all(path.is_file() and path.stat().st_size for path in made.values())
    measured = measure.Measurement.load(made["measurement"])
    assert len(measured.cells) == 9 * 2
    loaded = gap_map.GapMap.load(made["gap map"])
    assert set(loaded.arms) == {"null", "reenc", "demote:48", "repromote:48"}
    assert loaded.key == measured.key and loaded.margin == 0.05
    assert gate.Gate.load(made["gate"]).source == loaded.hash
    assert Image.open(made["gap map (picture)"]).size == (1200, 900)


def test_every_key_of_the_lora_is_used_by_comfyuis_loader(whole, comfy):
    import comfy.lora
    import comfy.sd

    _, _, made = whole
    lora = load_file(made["LoRA"])
    flux = made["LoRA"].parents[2] / "models" / "diffusion_models" / "toy_flux.safetensors"
    model = comfy.sd.load_diffusion_model(str(flux))
    patches = comfy.lora.load_lora(lora, comfy.lora.model_lora_keys_unet(model.model, {}))
    assert len(patches) * 3 == len(lora) > 0
    assert len(model.add_patches(patches, 1.0)) == len(patches)


def test_the_lora_says_what_it_is(whole):
    from safetensors import safe_open

    with safe_open(whole[2]["LoRA"], "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_network_dim"] == "2" and metadata["ss_steps"] == "4"
    assert json.loads(metadata["demotion_gate"])["measured"] is True
    assert len(metadata["demotion_base_fingerprint"]) == 16


def test_the_same_queue_again_runs_nothing_and_still_names_its_files(server, whole):
    prompt, entry, made = whole
    events = []
    again = run.queue(server.url, prompt, lambda kind, data: events.append((kind, data)))
    assert executed(events) <= {None}
    assert files(server, again) == made


def test_a_changed_seed_measures_again_and_reuses_the_latents(server, whole):
    prompt, _, made = whole
    latents = sorted((server.output / "demotion" / "cache" / "latents").iterdir())
    events = []
    entry = run.queue(
        server.url,
        only(graph("whole", probe={"seed": 1}), "save_map"),
        lambda kind, data: events.append((kind, data)),
    )
    assert {"probe", "cosine", "save_map"} <= executed(events)
    assert files(server, entry)["measurement"] != made["measurement"]
    assert sorted((server.output / "demotion" / "cache" / "latents").iterdir()) == latents


def test_a_changed_folder_is_read_again(server):
    name = pictures(server.base, "changing", 2)
    prompt = only(graph(name, set={"native_tier": TIER}), "set") | {
        "show": node("PreviewAny", source=["set", 1])
    }
    run.queue(server.url, prompt)
    (server.base / "input" / name / "1.txt").write_text("another caption")
    events = []
    run.queue(server.url, prompt, lambda kind, data: events.append((kind, data)))
    assert "folder" in executed(events)


def interrupted_after(server, prompt: dict, name: str, value: int) -> None:
    """Queue a prompt and cancel it once a node has reported this much progress."""
    sent = threading.Event()

    def watch(kind: str, data: dict) -> None:
        states = data.get("nodes", {}) if kind == "progress_state" else {}
        if states.get(name, {}).get("value", 0) >= value and not sent.is_set():
            sent.set()
            threading.Thread(target=post, args=(server, "/interrupt", {})).start()

    with pytest.raises(run.Stop, match="interrupt"):
        run.queue(server.url, prompt, watch)
    assert sent.is_set()


def test_cancel_keeps_the_cells_and_the_same_queue_continues_to_the_same_bytes(server):
    prompt = only(
        graph(pictures(server.base, "cancelled"), probe={"seed": 5, "draws": 12}), "probe"
    )
    folder = server.output / "demotion" / "measurements"
    before = set(folder.iterdir())
    interrupted_after(server, prompt, "probe", 150)
    (path,) = set(folder.iterdir()) - before
    kept = path.read_bytes()
    cells = len(measure.Measurement.load(path).cells)
    assert 0 < cells < 18
    run.queue(server.url, prompt)
    continued = path.read_bytes()
    assert continued.startswith(kept)
    path.unlink()
    # A touched caption makes ComfyUI run the whole graph again, with the same content.
    (server.base / "input" / "cancelled" / "0.txt").touch()
    run.queue(server.url, prompt)
    assert path.read_bytes() == continued


def training_alone(server, name: str, **inputs) -> dict:
    """A training run of a gate by hand, without a probe."""
    changes = {"steps": 30, "name": name, "checkpointing": False, **inputs}
    prompt = graph(pictures(server.base, name), train=changes)
    prompt["gate"] = gate_by_hand(TIER, 48)
    return only(prompt, "train")


def states_of(server) -> set[Path]:
    return set((server.output / "demotion" / "training" / "states").glob("*/step_*.pt"))


def test_a_cancelled_training_continues_to_the_same_lora(server):
    prompt = training_alone(server, "stopped")
    before = states_of(server)
    interrupted_after(server, prompt, "train", 5)
    (left,) = states_of(server) - before
    assert 5 <= int(left.stem.removeprefix("step_")) < 30
    entry = run.queue(server.url, prompt)
    assert "Taken up after step" in entry["outputs"]["train"]["text"][0]
    resumed = files(server, entry)["LoRA"]
    assert {path.stem for path in states_of(server) - before} == {"step_0000030"}
    prompt["train"]["inputs"] |= {"name": "whole", "resume": "start again"}
    entry = run.queue(server.url, prompt)
    assert "Taken up" not in entry["outputs"]["train"]["text"][0]
    whole_run = load_file(files(server, entry)["LoRA"])
    assert all(torch.equal(value, whole_run[key]) for key, value in load_file(resumed).items())


def test_more_steps_continue_and_a_switch_starts_again(server):
    prompt = training_alone(server, "longer", steps=6, save_every=4)
    one = {"model": ["unet", 0], "vae": ["vae", 0], "images": ["blank", 0], "native_tier": TIER}
    prompt |= {
        "blank": node("EmptyImage", width=TIER, height=TIER, batch_size=1, color=0),
        "one": node("DemotionTrainingSet", **one),
        "text": node("DemotionTrainingSetToLatents", training_set=["one", 0], arm="src"),
    }
    sampled = {"sample_prompt": ["text", 1], "sample_every": 6, "sample_steps": 2}
    prompt["train"]["inputs"] |= sampled

    def trained(**inputs):
        prompt["train"]["inputs"] |= inputs
        events = []
        entry = run.queue(server.url, prompt, lambda kind, data: events.append((kind, data)))
        return "train" in executed(events), entry

    listed = server.output / "loras"
    once, entry = trained()
    assert once and list(listed.glob("longer_4_steps_*.safetensors"))
    (_, *first) = entry["outputs"]["train"]["images"]
    assert len(first) == 2
    assert not trained()[0]  # unchanged: the host has it
    again, entry = trained(steps=9)
    assert again and "Taken up after step 6" in entry["outputs"]["train"]["text"][0]
    # Samples of the run so far are shown beside its new ones.
    (_, *samples) = entry["outputs"]["train"]["images"]
    assert samples[:2] == first and len(samples) == 3
    afresh, entry = trained(resume="start again")
    assert afresh and "Taken up" not in entry["outputs"]["train"]["text"][0]
    (_, *own) = entry["outputs"]["train"]["images"]
    assert len(own) == 3 and not [shown for shown in own if shown in samples]
    assert trained()[0]  # as often as it is queued


def test_a_trained_lora_is_in_comfyuis_list_at_once(server):
    made = files(server, run.queue(server.url, training_alone(server, "listed", steps=2)))
    with urllib.request.urlopen(f"{server.url}/models/loras") as answer:
        assert made["LoRA"].name in json.load(answer)


def test_samples_validation_and_history_of_a_run_are_kept(server):
    prompt = training_alone(
        server, "sampled", steps=4, sample_every=2, sample_steps=2, held_out=2, validate_every=2
    )
    alone = graph(pictures(server.base, "prompted", 1))
    prompt |= {
        "folder_of_one": alone["folder"],
        "set_of_one": alone["set"]
        | {
            "inputs": alone["set"]["inputs"]
            | {
                name: ["folder_of_one", i]
                for name, i in (("images", 0), ("captions", 1), ("masks", 2), ("repeats", 3))
            }
        },
        "prompt": node("DemotionTrainingSetToLatents", training_set=["set_of_one", 0], arm="src"),
    }
    prompt["train"]["inputs"]["sample_prompt"] = ["prompt", 1]
    entry = run.queue(server.url, prompt)
    shown = entry["outputs"]["train"]["images"]
    labels = ["loss curve", *(f"sample after step {step}" for step in (0, 2, 4))]
    assert [image["label"] for image in shown] == labels
    pixels = [
        np.asarray(Image.open(server.output / image["subfolder"] / image["filename"]), dtype=int)
        for image in shown
    ]
    assert pixels[1].shape == (TIER, TIER, 3) and pixels[1].std() > 1
    history = json.loads(files(server, entry)["history"].read_text())
    assert [step for step, _ in history["validation"]] == [0, 2, 4]
    assert len(history["losses"]) == 4
    assert "Validation loss on 2 held-out pictures" in entry["outputs"]["train"]["text"][0]


def test_saved_results_load_again_and_again_when_the_file_changes(server, whole):
    _, _, made = whole
    name = made["gate"].name
    prompt = {
        "load": node("DemotionLoadGate", file=name),
        "save": node("DemotionSaveGate", gate=["load", 0], name="copied"),
    }
    copied = files(server, run.queue(server.url, prompt))["gate"]
    assert copied.read_bytes() == made["gate"].read_bytes()
    other = gate.by_hand(TIER, 48, (0.25, 0.75))
    other.save(made["gate"])
    copied = files(server, run.queue(server.url, prompt))["gate"]
    assert gate.Gate.load(copied) == other
    prompt = {
        "load": node("DemotionLoadMeasurement", file=made["measurement"].name),
        "cosine": node(
            "DemotionDebiasedCosine",
            measurement=["load", 0],
            estimator="two_set",
            control="reenc",
            margin=0.1,
        ),
        "save": node("DemotionSaveGapMap", gap_map=["cosine", 0], name="two_set"),
        "keep": node("DemotionSaveMeasurement", measurement=["load", 0], name="kept"),
    }
    made_again = files(server, run.queue(server.url, prompt))
    assert gap_map.GapMap.load(made_again["gap map"]).control == "reenc"
    assert made_again["measurement"].read_bytes() == made["measurement"].read_bytes()
    prompt = {
        "load": node("DemotionLoadGapMap", file=made_again["gap map"].name),
        "plot": node("DemotionPlotGapMap", gap_map=["load", 0], name="redrawn"),
    }
    assert files(server, run.queue(server.url, prompt))["gap map (picture)"].is_file()


def test_results_work_with_comfyuis_own_nodes(server, whole):
    """Save LoRA, Load LoRA Model, Loss Graph, and the latents as ComfyUI's decoder takes them."""
    prompt, _, _ = whole
    prompt = only(prompt, "train") | {
        "own_save": node("SaveLoRA", lora=["train", 0], prefix="loras/own", steps=4),
        "own_load": node(
            "LoraModelLoader",
            model=["unet", 0],
            lora=["train", 0],
            strength_model=1.0,
            bypass=False,
        ),
        "own_graph": node("LossGraphNode", loss=["train", 1], filename_prefix="loss"),
        "latents": node(
            "DemotionTrainingSetToLatents", training_set=["repromote", 0], arm="demote:48"
        ),
        "sample": node(
            "KSampler",
            model=["own_load", 0],
            seed=0,
            steps=1,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["latents", 1],
            negative=["latents", 1],
            latent_image=["latents", 0],
            denoise=0.5,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "show": node("PreviewImage", images=["decode", 0]),
    }
    entry = run.queue(server.url, prompt)
    assert len(entry["outputs"]["show"]["images"]) == 9
    assert list((server.output / "loras").glob("own_4_steps_*.safetensors"))
    assert "lora key not loaded" not in server.log.read_text(errors="replace")


def test_the_probe_takes_the_gradient_of_a_users_own_lora(server, whole):
    _, _, made = whole
    prompt = only(graph("whole", probe={"adapter": f"../output/{made['LoRA'].name}"}), "probe")
    prompt["probe"]["inputs"]["adapter"] = made["LoRA"].name
    entry = run.queue(server.url, prompt)
    settings = measure.Measurement.load(files(server, entry)["measurement"]).settings
    assert settings["adapter"]["kind"] == made["LoRA"].name
    assert settings["adapter"]["rank"] == 2


# Bad input: what is wrong, and what the message must hold. Nothing may be measured or trained.


def refused(server, prompt: dict, *words: str) -> None:
    with pytest.raises(run.Stop) as stop:
        run.queue(server.url, prompt)
    for word in words:
        assert word in str(stop.value), str(stop.value)


@pytest.mark.parametrize(
    ("changes", "outputs", "words"),
    [
        (
            {"folder": {"folder": "nowhere"}},
            ["probe"],
            ["'nowhere' is not a sub-folder", "copy the pictures"],
        ),
        ({"folder": {"folder": "../../secret"}}, ["probe"], ["is not a sub-folder"]),
        ({"probe": {"draws": 1}}, ["probe"], ["draws", "at least 2 draws"]),
        ({"probe": {"bins": "0.5-0.4"}}, ["probe"], ["bin 0.5-0.4", "correct its edges"]),
        ({"probe": {"adapter": "none.safetensors"}}, ["probe"], ["adapter", "none.safetensors"]),
        ({"probe": {"targets": "^decoder"}}, ["probe"], ["targets '^decoder' matches none"]),
        ({"demote": {"target_tier": 80}}, ["probe"], ["64 -> 80 does not go down"]),
        ({"demote": {"target_tier": 64}}, ["probe"], ["does not go down"]),
        (
            {"set": {"native_tier": 128}, "demote": {"target_tier": 96}},
            ["probe"],
            ["no picture is on the route 128 -> 96", "picture 9", "Use larger"],
        ),
        (
            {"vae": {"vae_name": "pixel_space"}},
            ["probe"],
            ["VAE makes latents of 3 channels", "takes 16"],
        ),
        ({"train": {"name": "../../escaped"}}, ["train"], ["'../../escaped'", "leads out of"]),
        ({"save_map": {"name": "/absolute/.."}}, ["save_map"], ["leads out of"]),
        ({"cosine": {"margin": 0.0}}, ["save_map"], ["margin", "min of 0.001"]),
    ],
)
def test_bad_input_gets_a_sentence_and_nothing_runs(server, whole, changes, outputs, words):
    measured = sorted((server.output / "demotion" / "measurements").iterdir())
    refused(server, only(graph("whole", **changes), *outputs), *words)
    assert sorted((server.output / "demotion" / "measurements").iterdir()) == measured


def test_no_pictures_and_unreadable_ones_are_named(server):
    (server.base / "input" / "empty").mkdir()
    refused(server, only(graph("empty"), "probe"), "folder 'empty' has no pictures", "put some in")
    broken = pictures(server.base, "broken", 2)
    (server.base / "input" / broken / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n not a picture")
    refused(server, only(graph(broken), "probe"), "picture 1.png cannot be read", "repair it")


def test_captions_that_do_not_match_are_counted(server):
    prompt = only(graph(pictures(server.base, "five", 5)), "probe")
    prompt["others"] = node("DemotionLoadTrainingFolder", folder=pictures(server.base, "three", 3))
    prompt["set"]["inputs"]["captions"] = ["others", 1]
    refused(server, prompt, "captions has 3 entries for 5 pictures")


def test_a_gate_for_another_tier_is_refused_before_a_step(server, whole):
    def by_hand(native: int, target: int) -> dict:
        prompt = graph("whole")
        prompt["gate"] = gate_by_hand(native, target)
        return only(prompt, "train")

    refused(server, by_hand(80, 64), "does not start at the set's native tier 64")
    prompt = by_hand(128, 64)
    prompt["set"]["inputs"]["native_tier"] = 64
    refused(server, prompt, "native tier 64")
    prompt = graph("whole")
    prompt["gate"] = gate_by_hand(TIER, 48)
    prompt["train"]["inputs"]["training_set"] = ["set", 0]
    refused(server, only(prompt, "train"), "not demoted to it", "target tier 48")
    refused(server, by_hand(64, 80), "does not go down")


def test_latents_that_are_not_finite_and_loras_that_do_not_fit_are_named(server, whole):
    state = load_file(server.base / "models" / "vae" / "toy_taesd.safetensors")
    state["taesd_encoder.0.weight"][:] = float("nan")
    save_file(state, server.base / "models" / "vae" / "broken_taesd.safetensors")
    refused(
        server,
        only(graph("whole", vae={"vae_name": "broken_taesd.safetensors"}), "probe"),
        "NaN or infinite latents for picture 1 (src)",
        "fp32",
    )
    other = {
        "diffusion_model.other.lora_A.weight": torch.zeros(2, 4),
        "diffusion_model.other.lora_B.weight": torch.zeros(4, 2),
    }
    save_file(other, server.base / "models" / "loras" / "other.safetensors")
    refused(
        server,
        only(graph("whole", probe={"adapter": "other.safetensors"}), "probe"),
        "LoRA other.safetensors has no key that fits this model",
    )


def test_a_map_where_nothing_is_safe_opens_nothing_and_trains_native(server):
    """Seven pictures never get a verdict, so the gate is empty and says why."""
    prompt = graph(pictures(server.base, "seven", 7))
    entry = run.queue(server.url, prompt)
    made = files(server, entry)
    empty = gate.Gate.load(made["gate"])
    assert empty.rules == () and "fewer than 8 images" in empty.notes
    assert "every step trained native" in made["report"].read_text()
