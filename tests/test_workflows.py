"""Workflows, the blueprint, help pages and schemas belong together: read from files and schemas, no
server."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from demotion import gate

ROOT = Path(__file__).resolve().parents[1]
UI = sorted((ROOT / "workflows").glob("*.json"))
API = sorted((ROOT / "workflows" / "api").glob("*.json"))
BLUEPRINT = ROOT / "subgraphs" / "Measure then train.json"
# Templates for models that are not in the pack: family -> ComfyUI's own template for it.
FAMILIES = {
    "anima": "image_anima_base_v1",
    "flux": "flux_dev_full_text_to_image",
    "qwen_image": "image_qwen_image",
    "sd35": "sd3.5_simple_example",
    "wan": "text_to_video_wan",
    "z_image": "image_z_image",
}
NOTES = ("Note", "MarkdownNote")
# Inputs that name results of the user's own, which are not there on a fresh machine.
CHOSEN = ("file", "first", "second")
PICTURES = "my_pictures"
PREVIEWS = ("PreviewAny", "PreviewImage")
MUTED = 2
TITLE_HEIGHT = 30
ROW, WIDGET = 20, 24
# Height of what the pack's own widgets draw, once there is something to draw.
VIEWS = {
    "DemotionGradientProbe": 320,
    "DemotionPlotGapMap": 320,
    "DemotionGateFromGapMap": 220,
    "DemotionLoadGate": 220,
    "DemotionGateByHand": 220,
    "DemotionTrainLora": 260,
}
# A blueprint's own ends, which its inner links start from and lead to.
INTO, OUT_OF = -10, -20


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


@pytest.mark.parametrize("path", [*UI, BLUEPRINT], ids=lambda path: path.stem)
def test_widgets_of_a_workflow_fit_the_schemas(path: Path, nodes: dict[str, Any]) -> None:
    for node in graph_of(path)["nodes"]:
        if node["type"] in (*NOTES, *PREVIEWS):
            continue
        values = widgets(node)
        if node["type"].startswith("Demotion"):
            groups = inputs_of(nodes[node["type"]])
            given = groups.get("required", {}) | groups.get("optional", {})
            assert list(values) == [name for name, entry in given.items() if is_widget(entry)]
            assert {entry["name"] for entry in node["inputs"]} == set(given)
            for name, value in values.items():
                if name not in CHOSEN and value != PICTURES:
                    assert fits(value, given[name]), f"{node['type']}: {name} = {value}"


def graph_of(path: Path) -> dict[str, Any]:
    """The graph of a workflow, or the one inside a blueprint."""
    document = read(path)
    if path != BLUEPRINT:
        return document
    (graph,) = document["definitions"]["subgraphs"]
    return graph


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


@pytest.mark.parametrize("path", [*UI, BLUEPRINT], ids=lambda path: path.stem)
def test_nodes_of_a_workflow_do_not_lie_on_each_other(path: Path) -> None:
    boxes = [
        (node["pos"][0], node["pos"][1] - TITLE_HEIGHT, node["size"][0], node["size"][1])
        for node in graph_of(path)["nodes"]
    ]
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(boxes, 2):
        assert x + w <= u or u + s <= x or y + h + TITLE_HEIGHT <= v or v + t + TITLE_HEIGHT <= y


@pytest.mark.parametrize("path", [*UI, BLUEPRINT], ids=lambda path: path.stem)
def test_nodes_of_a_workflow_are_as_high_as_their_widgets(path: Path) -> None:
    # The page makes a lower node higher, over whatever lies below it.
    for node in graph_of(path)["nodes"]:
        if node["type"].startswith("Demotion"):
            shown = sum("widget" in entry for entry in node["inputs"])
            sockets = max(len(node["inputs"]) - shown, len(node["outputs"]))
            assert node["size"][1] >= ROW * sockets + WIDGET * shown + VIEWS.get(node["type"], 0)


@pytest.mark.parametrize("path", [*UI, BLUEPRINT], ids=lambda path: path.stem)
def test_no_socket_of_a_workflow_is_labelled_in_one_language(path: Path) -> None:
    # A label comes before the translation of a socket's name.
    for node in graph_of(path)["nodes"]:
        assert not [slot["label"] for slot in node["inputs"] if "label" in slot], node["type"]


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_a_workflow_has_a_note_and_a_small_picture(path: Path) -> None:
    assert any(node["type"] in NOTES for node in read(path)["nodes"])
    picture = path.with_suffix(".jpg")
    width, height = Image.open(picture).size
    assert 700 <= width <= 900 and 400 <= height <= 600
    assert picture.stat().st_size < 120_000


def test_a_template_for_every_family() -> None:
    named = {path.stem for path in UI} - {"measure_map", "measure_map_gate_train"}
    assert {name for name in named if name.startswith("measure_")} == {
        f"measure_{family}" for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_a_family_are_those_of_comfyui_own_template(family: str) -> None:
    package = pytest.importorskip(
        "comfyui_workflow_templates_json", reason="comfyui-workflow-templates is not installed"
    )
    own = read(Path(package.__file__).parent / "templates" / f"{FAMILIES[family]}.json")
    subgraphs = own.get("definitions", {}).get("subgraphs", [])
    official = [*own["nodes"], *itertools.chain(*(graph["nodes"] for graph in subgraphs))]
    loaders = [node for node in read(family_template(family))["nodes"] if downloads(node)]
    assert loaders
    for loader in loaders:
        (same,) = [node for node in official if node["type"] == loader["type"]]
        assert loader["widgets_values"] == same["widgets_values"]
        assert downloads(loader) == downloads(same)
        files = {value for value in loader["widgets_values"] if value.endswith(".safetensors")}
        assert files == {name for name, _, _ in downloads(loader)}


def family_template(family: str) -> Path:
    return ROOT / "workflows" / f"measure_{family}.json"


def downloads(node: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Name, address and folder of the files that a node offers to download."""
    models = node["properties"].get("models", [])
    return {(model["name"], model["url"], model["directory"]) for model in models}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_measured_and_then_trained_from_left_to_right(family: str) -> None:
    workflow = read(family_template(family))
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for _, source, _, target, _, _ in workflow["links"]:
        assert by_id[source]["pos"][0] <= by_id[target]["pos"][0]
    notes = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] in NOTES]
    assert 3 <= len(notes) <= 5 and max(map(len, notes)) <= 500
    # Run measures; training waits for a look at the map.
    (trainer,) = [node for node in workflow["nodes"] if node["type"] == "DemotionTrainLora"]
    assert trainer["mode"] == MUTED
    queued = {node["class_type"] for node in as_prompt(workflow).values()}
    assert {"DemotionGradientProbe", "DemotionPlotGapMap", "DemotionGateCost"} <= queued


@pytest.mark.parametrize("path", [*UI, BLUEPRINT], ids=lambda path: path.stem)
def test_a_graph_measures_the_rank_that_it_trains(path: Path) -> None:
    # Otherwise the trainer's report says that the gate was measured on something else.
    ranks = {
        widgets(node)["rank"]
        for node in graph_of(path)["nodes"]
        if node["type"] in ("DemotionGradientProbe", "DemotionTrainLora")
    }
    assert len(ranks) <= 1


def test_links_of_the_blueprint_are_the_same_seen_from_both_ends() -> None:
    document, graph = read(BLUEPRINT), graph_of(BLUEPRINT)
    by_id = {node["id"]: node for node in graph["nodes"]}
    (outside,) = document["nodes"]
    assert outside["type"] == graph["id"]
    assert graph["name"] == outside["title"] == BLUEPRINT.stem
    for side in ("inputs", "outputs"):
        kinds = [[(slot["name"], slot["type"]) for slot in end[side]] for end in (outside, graph)]
        assert kinds[0] == kinds[1]
    for link in graph["links"]:
        if link["origin_id"] == INTO:
            assert link["id"] in graph["inputs"][link["origin_slot"]]["linkIds"]
        else:
            left = by_id[link["origin_id"]]["outputs"][link["origin_slot"]]
            assert link["id"] in left["links"] and link["type"] == left["type"]
        if link["target_id"] == OUT_OF:
            assert graph["outputs"][link["target_slot"]]["linkIds"] == [link["id"]]
        else:
            right = by_id[link["target_id"]]["inputs"][link["target_slot"]]
            assert right["link"] == link["id"] and link["type"] == right["type"]
    ends = {link["id"] for link in graph["links"]}
    assert {slot["link"] for node in graph["nodes"] for slot in node["inputs"]} - {None} <= ends


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


# The coverage rule of comfy-test, which itself finds no nodes of the present kind.
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


def test_the_example_graph_of_a_help_page_can_be_connected(
    nodes: dict[str, Any], schemas: dict[str, Any]
) -> None:
    from comfy_extras import nodes_preview_any, nodes_train

    import nodes as core

    trainer = nodes_train.TrainLoraNode
    by_title = {schema.display_name: nodes[name] for name, schema in schemas.items()}
    titles = core.NODE_DISPLAY_NAME_MAPPINGS
    by_title |= {titles[name]: nodes[name] for name in titles.keys() & nodes.keys()}
    by_title |= {"Preview as Text": nodes_preview_any.PreviewAny}
    by_title |= {trainer.GET_SCHEMA().display_name: trainer}
    for name, schema in schemas.items():
        text = (ROOT / "js" / "docs" / f"{name}.md").read_text("utf-8")
        (graph,) = re.findall(r"\n## Example graph\n\n`(.+)`\n", text)
        chain = graph.split(" -> ")
        assert schema.display_name in chain, name
        for left, right in itertools.pairwise(chain):
            takes = {
                entry[0]
                for group in inputs_of(by_title[right]).values()
                for entry in group.values()
                if not isinstance(entry[0], list)
            }
            assert {*outputs_of(by_title[left]), "*"} & takes, f"{name}: {left} -> {right}"
