"""How the suite finds the pack: `demotion` and `pack` by file, the repository root never on
sys.path.

The root holds a folder `nodes` that would shadow ComfyUI's own nodes.py, and an `__init__.py` that
only ComfyUI may run. `demotion` is imported as a package of its own; `pack.host` and `pack.nodes`
find that same copy, since both rooms import modules (`from ..demotion import grid`), not names,
across rooms.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A slow machine fails no test.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
ROOT = Path(__file__).resolve().parents[1]
ORDER = ("server", "browser")


def _load(name: str, file: Path, search: list[str] | None) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _alias_pack() -> None:
    demotion = _load("demotion", ROOT / "demotion" / "__init__.py", [str(ROOT / "demotion")])
    pack = types.ModuleType("pack")
    pack.__path__ = [str(ROOT)]
    pack.demotion = demotion
    sys.modules["pack"] = pack
    sys.modules["pack.demotion"] = demotion


_alias_pack()
run = _load("run", ROOT / "run.py", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then the live server, then the browser."""
    items.sort(
        key=lambda item: max(
            (ORDER.index(m.name) + 1 for m in item.iter_markers() if m.name in ORDER), default=0
        )
    )


@pytest.fixture(scope="session")
def comfy() -> types.ModuleType:
    """ComfyUI's own modules in this process, on the CPU. Needs COMFYUI_PATH, which `run.py test`
    sets."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.fail("COMFYUI_PATH is not set: run the suite with `python3 run.py test`")
    if path not in sys.path:
        sys.path.insert(0, path)
    sys.argv = ["pytest", "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd

    return sys.modules["comfy"]


@pytest.fixture(scope="session")
def server(comfy: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A live ComfyUI server on the CPU with toy models; `.url`, `.base`, `.log`."""
    import toys

    base = tmp_path_factory.mktemp("comfyui")
    for folder in (
        "custom_nodes",
        "input",
        "output",
        "user",
        "models/loras",
        "models/diffusion_models",
        "models/vae",
    ):
        (base / folder).mkdir(parents=True)
    toys.flux(base / "models" / "diffusion_models")
    toys.taesd(base / "models" / "vae")
    comfyui = Path(os.environ["COMFYUI_PATH"])
    with run.Server(comfyui, sys.executable, base / "server.log", base=base) as live:
        yield live
