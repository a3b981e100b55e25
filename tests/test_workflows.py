"""Workflows, help pages and schemas belong together: read from files and schemas, no server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from demotion import gate

ROOT = Path(__file__).resolve().parents[1]
UI = sorted((ROOT / "workflows").glob("*.json"))
API = sorted((ROOT / "workflows" / "api").glob("*.json"))
NOTES = ("Note", "MarkdownNote")
# Inputs that name results of the user's own, which are not there on a fresh machine.
CHOSEN = ("file", "first", "second")
PREVIEWS = ("PreviewAny", "PreviewImage")
MUTED = 2
TITLE_HEIGHT = 30


@pytest.fixture(scope="module")
def nodes(comfy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Class of every node that the workflows may name: the pack's, and ComfyUI's own loaders."""
    import folder_paths

    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path_factory.mktemp("output")))
    import pack.nodes
    from pack.nodes import files

    import nodes as core

    files.register_folders()
    listed = asyncio.run(pack.nodes.DemotionExtension().get_node_list())
    yield core.NODE_CLASS_MAPPINGS | {node.define_schema().node_id: node for node in listed}
    folder_paths.set_output_directory(before)


@pytest.fixture(scope="module")
def schemas(nodes: dict[str, Any]) -> dict[str, Any]:
    """Schema of every node of the pack, by node id."""
    return {name: nodes[name].GET_SCHEMA() for name in nodes if name.startswith("Demotion")}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def inputs_of(node: Any) -> dict[str, dict[str, tuple]]:
    """Group (required, optional) -> input -> (type or options, settings)."""
    if hasattr(node, "GET_NODE_INFO_V1"):
        return node.GET_NODE_INFO_V1()["input"]
    return node.INPUT_TYPES()


def outputs_of(node: Any) -> list[str]:
    if hasattr(node, "GET_NODE_INFO_V1"):
        return node.GET_NODE_INFO_V1()["output"]
    return list(node.RETURN_TYPES)


def widgets(node: dict[str, Any]) -> dict[str, Any]:
    """Values of a node's widgets in a workflow, by input."""
    names = [entry["name"] for entry in node.get("inputs", []) if "widget" in entry]
    if not node["type"].startswith("Demotion") and "seed" in names:
        # The page adds a widget of its own behind the seeds of nodes that do not forbid it.
        names.insert(names.index("seed") + 1, "control_after_generate")
    values = node.get("widgets_values", [])
    assert len(values) == len(names), f"{node['type']} {node['id']}: {values} for {names}"
    return dict(zip(names, values))


def as_prompt(workflow: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the page would queue: node id -> class and inputs."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES or node["mode"] == MUTED:
            continue
        linked = {
            entry["name"]: sources[entry["link"]]
            for entry in node["inputs"]
            if entry["link"] is not None
        }
        prompt[str(node["id"])] = {
            "class_type": node["type"],
            "inputs": widgets(node) | linked,
        }
    return prompt


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_links_of_a_workflow_are_the_same_seen_from_both_ends(path: Path) -> None:
    workflow = read(path)
    by_id = {node["id"]: node for node in workflow["nodes"]}
    assert len(by_id) == len(workflow["nodes"])
    assert workflow["last_node_id"] >= max(by_id)
    assert workflow["last_link_id"] >= max(link[0] for link in workflow["links"])
    ends = set()
    for number, source, output, target, slot, kind in workflow["links"]:
        left, right = by_id[source]["outputs"][output], by_id[target]["inputs"][slot]
        assert number in left["links"] and right["link"] == number
        assert kind == left["type"] and right["type"] in (kind, "*")
        ends.add(number)
    for node in workflow["nodes"]:
        assert {entry["link"] for entry in node.get("inputs", [])} - {None} <= ends
        assert set(itertools.chain(*(out["links"] or [] for out in node["outputs"]))) <= ends


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_widgets_of_a_workflow_fit_the_schemas(path: Path, nodes: dict[str, Any]) -> None:
    for node in read(path)["nodes"]:
        if node["type"] in (*NOTES, *PREVIEWS):
            continue
        values = widgets(node)
        if node["type"].startswith("Demotion"):
            groups = inputs_of(nodes[node["type"]])
            given = groups.get("required", {}) | groups.get("optional", {})
            assert list(values) == [name for name, entry in given.items() if is_widget(entry)]
            assert {entry["name"] for entry in node["inputs"]} == set(given)
            for name, value in values.items():
                if name not in CHOSEN:
                    assert fits(value, given[name]), f"{node['type']}: {name} = {value}"


def is_widget(entry: tuple) -> bool:
    settings = entry[1] if len(entry) > 1 else {}
    basic = isinstance(entry[0], list) or entry[0] in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")
    return basic and not settings.get("forceInput")


def fits(value: Any, entry: tuple) -> bool:
    """Whether a constant is allowed for an input."""
    kind, settings = entry[0], entry[1] if len(entry) > 1 else {}
    if isinstance(kind, list) or kind == "COMBO":
        return value in (kind if isinstance(kind, list) else settings["options"])
    if kind in ("INT", "FLOAT"):
        number = int if kind == "INT" else (int, float)
        low, high = settings.get("min", value), settings.get("max", value)
        return isinstance(value, number) and low <= value <= high
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind])


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_nodes_of_a_workflow_do_not_lie_on_each_other(path: Path) -> None:
    boxes = [
        (node["pos"][0], node["pos"][1] - TITLE_HEIGHT, node["size"][0], node["size"][1])
        for node in read(path)["nodes"]
    ]
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(boxes, 2):
        assert x + w <= u or u + s <= x or y + h + TITLE_HEIGHT <= v or v + t + TITLE_HEIGHT <= y


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_a_workflow_has_a_note_and_a_small_picture(path: Path) -> None:
    assert any(node["type"] in NOTES for node in read(path)["nodes"])
    picture = path.with_suffix(".jpg")
    width, height = Image.open(picture).size
    assert 700 <= width <= 900 and 400 <= height <= 600
    assert picture.stat().st_size < 120_000


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_api_workflow_fits_the_schemas(path: Path, nodes: dict[str, Any]) -> None:
    prompt = read(path)
    for name, node in prompt.items():
        where = f"{name} {node['class_type']}"
        groups = inputs_of(nodes[node["class_type"]])
        required, optional = groups.get("required", {}), groups.get("optional", {})
        assert node["_meta"]["title"]
        assert set(required) <= set(node["inputs"]) <= set(required) | set(optional), where
        for key, value in node["inputs"].items():
            entry = (required | optional)[key]
            if isinstance(value, list):
                source = prompt[value[0]]["class_type"]
                assert outputs_of(nodes[source])[value[1]] == entry[0], f"{where}: {key}"
            elif key not in CHOSEN:
                assert fits(value, entry), f"{where}: {key} = {value}"


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_a_workflow_and_its_api_form_are_equal_but_for_previews(path: Path) -> None:
    drawn = as_prompt(read(ROOT / "workflows" / path.name))
    queued = read(path)
    titles = {
        str(node["id"]): node["title"]
        for node in read(ROOT / "workflows" / path.name)["nodes"]
        if "title" in node
    }
    for name, node in queued.items():
        expected = {key: node[key] for key in ("class_type", "inputs")}
        assert drawn.pop(name) == expected, name
        assert titles.get(name, node["_meta"]["title"]) == node["_meta"]["title"]
    assert {node["class_type"] for node in drawn.values()} <= set(PREVIEWS)


def test_gates_that_come_with_the_pack_load() -> None:
    for path in (ROOT / "demo" / "gates").glob("*.json"):
        assert gate.Gate.load(path).rules, path.name


def test_every_node_is_in_an_example_workflow(schemas: dict[str, Any]) -> None:
    used = {node["type"] for path in UI for node in read(path)["nodes"]}
    assert set(schemas) <= used


def test_every_node_says_what_it_is(schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        assert name.startswith("Demotion")
        assert schema.display_name and schema.description and schema.category, name
        assert schema.description.endswith("."), name
        for entry in (*schema.inputs, *schema.outputs):
            assert entry.tooltip, f"{name}: {entry.id} has no tooltip"
            assert entry.tooltip.endswith("."), f"{name}: {entry.id}"


def test_every_node_has_a_help_page_that_names_its_inputs_and_outputs(
    schemas: dict[str, Any],
) -> None:
    pages = {path.stem: path for path in (ROOT / "js" / "docs").glob("*.md")}
    assert set(pages) == set(schemas)
    for name, schema in schemas.items():
        text = pages[name].read_text("utf-8")
        assert text.startswith(f"# {schema.display_name}\n"), name
        assert 15 <= len(text.splitlines()) <= 50, name
        for entry in (*schema.inputs, *schema.outputs):
            assert f"**{entry.display_name or entry.id}**" in text, f"{name}: {entry.id}"


def test_web_directory_holds_help_only() -> None:
    # ComfyUI runs every .js that it finds there, in every page.
    assert {path.suffix for path in (ROOT / "js").rglob("*") if path.is_file()} == {".md"}


def test_python_files_are_ascii() -> None:
    files = [path for path in ROOT.rglob("*.py") if ".comfyui" not in path.parts]
    assert files
    assert [path.name for path in files if not path.read_bytes().isascii()] == []
