"""Where the pack reads and writes: under ComfyUI's output and input folders, and its own demo
folder."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

PACK = Path(__file__).resolve().parents[1]
DEMO = PACK / "demo"
SETS = "demotion_sets"


def register_folders() -> None:
    """Show the demo models and pictures, and saved results, to ComfyUI's ordinary file lists."""
    for kind in ("diffusion_models", "vae"):
        folder_paths.add_model_folder_path(kind, str(DEMO / "models" / kind))
    folder_paths.add_model_folder_path(SETS, str(DEMO / "pictures"))
    for kind in ("measurements", "maps", "gates"):
        folder_paths.add_model_folder_path(f"demotion_{kind}", str(output_folder(kind)))
    folder_paths.add_model_folder_path("demotion_gates", str(DEMO / "gates"))


def output_folder(kind: str) -> Path:
    """Folder for one kind of result under ComfyUI's output folder."""
    return Path(folder_paths.get_output_directory()) / "demotion" / kind


def numbered(folder: Path, name: str, suffix: str) -> Path:
    """First free path <folder>/<name>_00001<suffix>. Raises ValueError when the name leads out of
    the folder."""
    problem = name_problem(name)
    if problem:
        raise ValueError(problem)
    number = 1
    while (path := folder / f"{name}_{number:05}{suffix}").exists():
        number += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def name_problem(name: str) -> str | None:
    """What is wrong with a file name typed into a widget, or None."""
    inside = Path("/demotion")
    target = (inside / name.replace("\\", "/")).resolve()
    if not name.strip() or target == inside or not target.is_relative_to(inside) or ":" in name:
        return (
            f"name '{name}' is empty or leads out of ComfyUI's output folder: use a plain file name"
        )
    return None


def saved_file(kind: str, name: str) -> Path:
    """A saved result chosen in a widget. Raises ValueError when it is not there."""
    path = folder_paths.get_full_path(f"demotion_{kind}", name)
    if path is None:
        raise ValueError(
            f"file '{name}' is not in output/demotion/{kind}: choose one that is, or save one first"
        )
    return Path(path)


def saved_names(kind: str, suffix: str) -> list[str]:
    """Names of saved results, for a combo."""
    return [
        name for name in folder_paths.get_filename_list(f"demotion_{kind}") if name.endswith(suffix)
    ]


class NamedOutput(io.ComfyNode):
    """A node with a widget `name` for the file it writes, checked before anything runs."""

    @classmethod
    def validate_inputs(cls, name: str | None = None) -> bool | str:
        # A linked name is None here; `numbered` checks it when it is known.
        return name is None or name_problem(name) or True


def shown(label: str, path: Path) -> dict[str, str]:
    """A file in a node's ui output."""
    relative = path.relative_to(folder_paths.get_output_directory())
    return {
        "label": label,
        "filename": relative.name,
        "subfolder": relative.parent.as_posix(),
        "type": "output",
    }


def stamp(path: Path) -> str:
    """What changes when a file does."""
    status = path.stat()
    return f"{path}:{status.st_mtime_ns}:{status.st_size}"
