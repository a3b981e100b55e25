#!/usr/bin/env python3
"""How often null lies inside its own 95 % simultaneous band, over seeds of a reduced demo.

Null is the native latent under noise of its own, so its true distance is 0 in every bin. Each seed
draws new sigmas, noise and a new adapter. Run with the Python that runs ComfyUI:

    .comfyui/venv/bin/python bench/null_in_band.py .comfyui/ComfyUI
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 20
REDUCED = {"bins": "5, 1", "draws": 4}


def reduced(seed: int) -> dict:
    """The map workflow without its arms: src and null alone."""
    prompt = json.loads((ROOT / "workflows" / "api" / "measure_map.json").read_text())
    kinds = {node["class_type"]: name for name, node in prompt.items()}
    probe = prompt[kinds["DemotionGradientProbe"]]["inputs"]
    probe |= REDUCED | {"seed": seed, "training_set": [kinds["DemotionTrainingSet"], 0]}
    kept = ("UNETLoader", "VAELoader", "DemotionLoadTrainingFolder", "DemotionTrainingSet",
            "DemotionGradientProbe", "DemotionDebiasedCosine", "DemotionSaveGapMap")
    return {kinds[kind]: prompt[kinds[kind]] for kind in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comfyui", type=Path, help="folder of ComfyUI")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    run = importlib.util.module_from_spec(spec)
    sys.modules["run"] = run
    spec.loader.exec_module(run)
    inside = 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "custom_nodes").mkdir()
        comfyui = arguments.comfyui.resolve()
        with run.Server(comfyui, sys.executable, base / "log", base=base) as server:
            for seed in range(arguments.seeds):
                entry = run.queue(server.url, reduced(seed))
                made = next(made for output in entry["outputs"].values() for made in output["files"]
                            if made["label"] == "gap map")
                path = server.output / made["subfolder"] / made["filename"]
                gaps = json.loads(path.read_text())["gaps"]
                bands = [gap["band"] for gap in gaps if gap["arm"] == "null"]
                # A bin without signal has no band; a seed without any bin shows nothing.
                drawn = [band for band in bands if band[0] is not None]
                held = bool(drawn) and all(low <= 0 <= high for low, high in drawn)
                inside += held
                text = "  ".join("no signal" if low is None else f"{low:+.3f} to {high:+.3f}"
                                 for low, high in bands)
                print(f"seed {seed:2}  {'inside ' if held else 'OUTSIDE'}  {text}", flush=True)
    print(f"inside {inside} of {arguments.seeds}")


if __name__ == "__main__":
    main()
