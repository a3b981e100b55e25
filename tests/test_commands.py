"""`run.py probe`, `analyse`, `train` and `study`: the nodes' numbers, without a server."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from PIL import Image

from demotion import arms, gap_map, gate, measure, plots, states, study

RUN = Path(__file__).resolve().parents[1] / "run.py"
TIER, TARGET = 64, 48
CHOSEN = {
    "native_tier": TIER,
    "target_tiers": [TARGET],
    "other_arms": ["reenc"],
    "preset": "map",
    "bins": "0.4-0.9",
    "draws": 2,
    "looks": None,
    "diagnostics": None,
    "one_route": None,
    "micro_batch": 1,
    "margin": 0.05,
    "sketch": 0,
    "seed": 3,
    "noise": "shared",
    "lora": None,
    "into": None,
    "rank": 2,
    "targets": "",
    "compute": "model",
    "checkpointing": False,
    "clip": [],
    "clip_type": "stable_diffusion",
}


@pytest.fixture(scope="module")
def models(comfy, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"model": toys.flux(folder), "vae": toys.taesd(folder)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Four pictures with captions, in two folders of two."""
    root = tmp_path_factory.mktemp("pictures")
    for index in range(4):
        folder = root / "ab"[index // 2]
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 255, (80, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture {index}")
    return root


@pytest.fixture
def headless(comfy, monkeypatch):
    """The commands' functions in this process, with all that they set set back."""
    import folder_paths
    from pack.nodes import headless
    from server import PromptServer

    monkeypatch.setattr(PromptServer, "instance", None, raising=False)
    before = folder_paths.get_input_directory(), folder_paths.get_output_directory()
    yield headless
    folder_paths.set_input_directory(before[0])
    folder_paths.set_output_directory(before[1])


@pytest.fixture
def probe(headless, models, tmp_path):
    return lambda **given: headless.probe(**CHOSEN | models | {"output": tmp_path} | given)


@pytest.fixture
def hand(tmp_path) -> Path:
    """A gate file that demotes half of the noise levels."""
    path = tmp_path / "gate.json"
    gate.by_hand(TIER, TARGET, (0.5, 1.0)).save(path)
    return path


def options_of(parser, *arguments: Any) -> dict[str, Any]:
    """A command's options as its function takes them."""
    options = vars(parser.parse_args([str(argument) for argument in arguments]))
    del options["processes"]
    return options


def command(name: str, *arguments: Any) -> list[str]:
    here = ["--comfyui", os.environ["COMFYUI_PATH"], "--python", sys.executable, "--cpu"]
    return [sys.executable, str(RUN), name, *here, *map(str, arguments)]


def probe_command(models: dict[str, Path], pictures: Path, output: Path, *more: Any) -> list[str]:
    return command(
        "probe", "--model", models["model"], "--vae", models["vae"], "--images", pictures,
        "--native-tier", TIER, "--target-tiers", TARGET, "--arms", "reenc", "--bins", "0.4-0.9",
        "--rank", 2, "--seed", 3, "--output", output, *more,
    )  # fmt: skip


def called(line: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def only_file(output: Path) -> Path:
    [path] = (output / "demotion" / "measurements").glob("*.jsonl")
    return path


def test_the_command_line_measures_what_the_function_does_and_analyses_it(
    models, pictures, probe, tmp_path
):
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    line = probe_command(models, pictures / "a", tmp_path / "line", "--draws", 2)
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=300, env=os.environ | threads, check=False
    )
    assert done.returncode == 0, done.stderr
    measured, here = probe(images=pictures / "a")
    file = only_file(tmp_path / "line")
    assert str(file) in done.stdout
    assert file.name == here.name and file.read_bytes() == here.read_bytes()
    names = [entry["name"] for entry in measured.settings["images"].values()]
    assert sorted(names) == ["0.png", "1.png"]
    assert [cell.arms for cell in measured.cells] == [("src", "null", "demote:48", "reenc")] * 2

    analysed = called(command("analyse", file, "--margin", 0.1, "--output", tmp_path / "map"))
    assert analysed.returncode == 0, analysed.stderr
    made = gap_map.GapMap.load(tmp_path / "map.json")
    assert gap_map.summary(made) in analysed.stdout and made.margin == 0.1
    assert Image.open(tmp_path / "map.png").size[0] > 500


def test_a_command_that_is_stopped_keeps_what_it_has_and_goes_on(models, pictures, probe, tmp_path):
    line = probe_command(models, pictures / "a", tmp_path / "line", "--draws", 40)
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts what runs in the background deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    folder = tmp_path / "line" / "demotion" / "measurements"
    deadline = time.monotonic() + 200
    while not any(len(measure.Measurement.load(path).cells) for path in folder.glob("*.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "the same command goes on" in said
    assert "Traceback" not in said
    stopped = only_file(tmp_path / "line").read_bytes()
    assert stopped.count(b"\n") == 2
    measured, path = probe(images=pictures / "a", draws=40, output=tmp_path / "line")
    assert path.read_bytes().startswith(stopped) and len(measured.cells) == 2


def test_ranges_of_pictures_analysed_together_are_the_map_of_one_run(pictures, probe, tmp_path):
    from demotion.analyse import analyse

    paths = [
        probe(images=pictures / name, output=tmp_path / f"out{name}")[1] for name in ("a", "b", ".")
    ]
    # A picture is known by its content; only its name tells of the folder.
    maps = []
    for index, files in enumerate((paths[:2], paths[1::-1], paths[2:])):
        _, [data, _] = analyse(files, tmp_path / f"map{index}")
        maps.append(gap_map.GapMap.load(data))
    assert len(maps[2].gaps) == 3 and maps[2].images == 4
    for field in ("d", "se", "pointwise", "per_image", "raw"):
        found = [[getattr(gap, field) for gap in made.gaps] for made in maps]
        assert len({made.key for made in maps}) == 1
        assert found[0] == found[1] == found[2]
    assert maps[0].to_json() == maps[1].to_json()


def test_a_given_file_is_continued_and_one_of_other_settings_refused(
    pictures, probe, models, tmp_path
):
    from safetensors.torch import load_file, save_file

    measured, path = probe(images=pictures / "a")
    whole = path.read_bytes()
    given = path.rename(tmp_path / "mine.jsonl")
    given.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 20])
    assert probe(images=pictures / "a", into=given)[1] == given
    assert given.read_bytes() == whole and not path.exists()

    state = load_file(models["model"])
    state["single_blocks.0.linear1.weight"] += 0.01
    save_file(state, tmp_path / "tuned.safetensors")
    image = next(iter(measured.settings["images"]))
    for changes, said in (
        ({"model": tmp_path / "tuned.safetensors"}, "model.fingerprint"),
        ({"rank": 4}, "adapter.fingerprint"),
        ({"seed": 4}, "adapter.fingerprint"),
        ({"draws": 4}, "draws = 2, this run has 4"),
        ({"noise": "independent"}, "noise = shared, this run has independent"),
        ({"compute": "bf16"}, "environment.dtype = float32, this run has bfloat16"),
        ({"checkpointing": True}, "environment.checkpointing = False, this run has True"),
        ({"other_arms": []}, "arms"),
        ({"images": pictures / "b"}, "images"),
    ):
        with pytest.raises(ValueError, match=f"mine.jsonl was measured with .*{said}"):
            probe(**{"images": pictures / "a", "into": given} | changes)
    assert image in measured.settings["images"] and given.read_bytes() == whole


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": Path("none.safetensors")}, "none.safetensors is not there"),
        ({"lora": Path("none.safetensors")}, "none.safetensors is not there"),
        ({"images": Path("no pictures")}, "no pictures is not there: give a folder"),
        ({"target_tiers": [], "other_arms": []}, "no arm to compare"),
        ({"other_arms": ["demoted:48"]}, "arm 'demoted:48' is unknown"),
        ({"other_arms": ["repromote:x"]}, "arm 'repromote:x' is unknown"),
        ({"target_tiers": [80]}, "80"),
        ({"bins": "0.9-0.4"}, "ascending"),
        ({"clip": [RUN], "clip_type": "clip9"}, "--clip-type clip9 is unknown: use one of"),
        ({"clip": [RUN], "clip_type": "flux"}, "run.py is no text encoder that ComfyUI can load"),
        ({"model": RUN}, "run.py is no model that ComfyUI can load"),
        ({"vae": RUN}, "run.py is no VAE that ComfyUI can load"),
    ],
)
def test_what_does_not_fit_is_one_sentence(probe, pictures, given, said):
    with pytest.raises(ValueError, match=said) as error:
        probe(**{"images": pictures / "a"} | given)
    assert "\n" not in str(error.value)


def test_an_empty_folder_is_refused(probe, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder 'empty' has no pictures"):
        probe(images=tmp_path / "empty")


def test_a_command_that_fails_says_one_sentence_and_returns_1(models, pictures, tmp_path):
    done = called(command("analyse", tmp_path / "none.jsonl"))
    assert done.returncode == 1
    assert done.stderr.startswith("run.py: ") and done.stderr.count("\n") == 1
    done = called(probe_command(models | {"vae": RUN}, pictures, tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("run.py: run.py is no VAE")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [["analyse"], ["probe"], ["analyse", "m.jsonl", "--unknown"], ["analyse", "m", "--port", "1"]],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(wrong):
    done = called([sys.executable, str(RUN), *wrong])
    assert done.returncode == 2 and "error:" in done.stderr


def test_arms_have_the_names_that_the_set_gives_them(comfy):
    from pack.nodes import headless

    for arm in (arms.REENC, arms.Arm("demote", 48, "yarn"), arms.Arm("resample", 48)):
        assert headless.parse_arm(str(arm)) == arm
    for name in ("src", "null", "reenc:48", "demote", "demote:"):
        with pytest.raises(ValueError, match="is unknown"):
            headless.parse_arm(name)


def test_every_option_of_analyse_is_one_of_its_function() -> None:
    import run
    from demotion.analyse import analyse

    options = vars(run.analyse_parser().parse_args(["m.jsonl"]))
    assert options.keys() == inspect.signature(analyse).parameters.keys()


def test_every_option_of_the_command_is_one_of_the_function(comfy):
    """The parser's names are the function's, so that no option is silently without effect."""
    from pack.host import probing

    import run

    options = options_of(run.probe_parser(), "--model", "m", "--vae", "v", "--images", "d")
    assert options.keys() == CHOSEN.keys() | {"model", "vae", "images", "output"}
    [preset] = (a for a in run.probe_parser()._actions if a.dest == "preset")
    assert set(preset.choices) == set(probing.PRESETS)


def training(models: dict[str, Path], pictures: Path, output: Path, *more: Any) -> list[Any]:
    """Options of a short gated run: a batch of four in two grids, an average, validation."""
    return [
        "--model", models["model"], "--vae", models["vae"], "--images", pictures, "--native-tier",
        TIER, "--rank", 2, "--learning-rate", 1e-2, "--batch-size", 4, "--ema-decay", 0.9,
        "--held-out", 1, "--validate-every", 2, "--no-checkpointing", "--output", output, *more,
    ]  # fmt: skip


def demo_models() -> dict[str, Path]:
    root = RUN.parent / "demo" / "models"
    return {
        "model": root / "diffusion_models" / "demotion_nano_flux.safetensors",
        "vae": root / "vae" / "demotion_nano_vae.safetensors",
    }


def lora_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_training_from_the_command_line_on_two_processes_is_that_of_one(
    headless, pictures, hand, tmp_path
):
    import run

    chosen = ["--gate", hand, "--steps", 4]
    line = training(demo_models(), pictures, tmp_path / "two", *chosen, "--processes", 2)
    done = called(command("train", *line))
    assert done.returncode == 0, done.stderr
    here = training(demo_models(), pictures, tmp_path / "one", *chosen)
    report, written = headless.train(**options_of(run.train_parser(), *here))
    found = {
        name: tmp_path / "two" / path.relative_to(tmp_path / "one")
        for name, path in written.items()
    }
    assert all(str(path) in done.stdout for path in found.values())
    assert len(list((tmp_path / "two" / "loras").iterdir())) == 1
    ours, theirs = lora_of(written["LoRA"]), lora_of(found["LoRA"])
    assert ours.keys() == theirs.keys() and any(tensor.any() for tensor in ours.values())
    for name, tensor in ours.items():
        # A hundredth of a step: Adam divides a gradient that is near 0 by its own size.
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4)
    one, two = (json.loads(files["history"].read_text()) for files in (written, found))
    assert one["tiers"] == two["tiers"] and any(0 < len(tiers) < 4 for tiers in one["tiers"])
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert "Demoted samples" in report and report.split("Mean step")[0] in done.stdout


def test_a_training_that_is_stopped_on_two_processes_goes_on_on_one(
    headless, models, pictures, hand, tmp_path
):
    import run

    # A density that depends on the picture: the report's forecast must take it by picture.
    chosen = "--gate", hand, "--sigma-density", "dynamic_shift", "--steps"
    line = training(models, pictures, tmp_path, *chosen, 100000)
    process = subprocess.Popen(
        command("train", *line, "--processes", 2),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for said in process.stdout:
        if said.startswith("training: ") and " of " in said:
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130 and "the same command goes on" in rest, rest
    assert "Traceback" not in rest
    [folder] = (tmp_path / "demotion" / "training" / "states").iterdir()
    done = states.States(folder, 1).steps()[-1]
    assert done >= 2
    longer = training(models, pictures, tmp_path, *chosen, done + 1)
    report, _ = headless.train(**options_of(run.train_parser(), *longer))
    assert f"Taken up after step {done}." in report


def test_pictures_shared_by_two_processes_are_the_measurement_of_one(
    models, pictures, probe, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    output = tmp_path / "two"
    line = probe_command(models, pictures, output, "--draws", 2, "--processes", 2)
    done = called(line)
    assert done.returncode == 0, done.stderr
    files = sorted((output / "demotion" / "measurements").glob("*.jsonl"))
    [merged] = [path for path in files if path.stem.endswith("_merged_from_2")]
    parts = [measure.Measurement.load(path) for path in files if path != merged]
    assert str(merged) in done.stdout
    images = [set(part.settings["images"]) for part in parts]
    assert [len(found) for found in images] == [2, 2] and not images[0] & images[1]
    alone, _ = probe(images=pictures)
    shared = measure.Measurement.load(merged)
    assert shared.settings == alone.settings
    assert gap_map.gap_map(shared).to_json() == gap_map.gap_map(alone).to_json()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "quick"}, "3 looks are planned.*give --looks 1"),
        ({"into": Path("mine.jsonl")}, "--into names one file"),
        ({}, "2 different pictures cannot be shared by 3 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(probe, pictures, given, said):
    from demotion import train

    with pytest.raises(ValueError, match=said):
        probe(**{"images": pictures / "a", "party": train.Team(0, 3)} | given)


def test_a_study_on_toys_has_every_arm_and_does_not_train_one_again(
    headless, models, pictures, hand, tmp_path, monkeypatch
):
    import run

    line = [
        "--model", models["model"], "--vae", models["vae"], "--images", pictures, "--gate", hand,
        "--steps", 6, "--warmup-steps", 1, "--rank", 2, "--held-out", 1, "--learning-rate", 1e-2,
        "--no-checkpointing", "--output", tmp_path, "--name", "toys",
    ]  # fmt: skip
    table, written = headless.study(**options_of(run.study_parser(), *line))
    folder = tmp_path / "demotion" / "studies" / "toys"
    made = study.Study.load(folder / "study.json")
    assert table == study.table(made) == (folder / "study.md").read_text()
    themes = [f"study_{theme}.{kind}" for theme in plots.THEMES for kind in ("png", "svg")]
    assert [path.name for path in written] == ["study.json", "study.md", *themes]
    assert all(path.stat().st_size for path in written)
    rows = {row.arm: row for row in made.rows}
    assert list(rows) == [arm.name for arm in study.arms(gate.Gate.load(hand))]
    loras = {path.stem: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert loras["twin"] == loras["native"] != loras["other_seed"]
    assert rows["twin"].cosine == pytest.approx(1) and rows["other seed"].cosine < 0.9
    assert rows["native"].saved == rows["native"].predicted == 0
    assert rows["always 48"].saved > rows["gated"].saved > rows["gated, late:0.5"].saved
    assert all(row.validation[0] == made.rows[0].validation[0] for row in made.rows)

    monkeypatch.setattr(headless.Steps, "step", lambda *_: pytest.fail("an arm was trained again"))
    again, _ = headless.study(**options_of(run.study_parser(), *line))
    assert again == table


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gate": None}, "a study needs --model, --vae, --images and --gate.*give what is missing"),
        ({"vae": None}, "give what is missing"),
        ({"name": "../away"}, "leads out of"),
        ({"model": Path("none.safetensors")}, "none.safetensors is not there"),
    ],
)
def test_a_study_that_cannot_be_is_refused(headless, models, pictures, hand, given, said):
    chosen = models | {"images": pictures, "gate": hand, "name": "toys"} | given
    with pytest.raises(ValueError, match=said):
        headless.study(**chosen, clip=[], clip_type="stable_diffusion", output=None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"native_tier": 256}, "native tier is 64, and --native-tier is 256"),
        ({"steps": 0}, "--steps is 0: give 1 to 1e\\+06"),
        ({"learning_rate": -1.0}, "--learning-rate is -1: give 1e-08 to 10"),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_anything_is_loaded(
    headless, models, hand, given, said
):
    chosen = models | {"images": Path("none"), "native_tier": TIER, "gate": hand} | given
    with pytest.raises(ValueError, match=said):
        headless.train(**chosen, clip=[], clip_type="", output=None, name="lora")


def test_every_option_of_training_is_a_widget_of_the_node_with_its_default(comfy):
    from pack.nodes import train

    import run

    widgets = {
        entry.id: (getattr(entry, "default", None), getattr(entry, "options", None))
        for entry in train.TrainLora.define_schema().inputs
    }
    not_here = {"model", "training_set", "gate", "sample_prompt"}
    not_here |= {"sample_every", "sample_steps", "sample_cfg"}
    line = ["--model", "m", "--vae", "v", "--images", "d"]
    options = options_of(run.train_parser(), *line)
    source = {"model", "vae", "images", "clip", "clip_type", "native_tier", "gate", "output"}
    assert options.keys() - source == widgets.keys() - not_here
    for name in options.keys() - source:
        assert options[name] == widgets[name][0], name
    for action in run.train_parser()._actions:
        if action.choices and action.dest in widgets:
            assert list(action.choices) == list(widgets[action.dest][1]), action.dest
    studied = options_of(run.study_parser())
    assert studied.keys() == options.keys() - {"native_tier", "validate_every"}
