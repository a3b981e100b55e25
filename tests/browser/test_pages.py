"""The pack in the front end as it comes: templates, workflows, dragging, queueing, help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import (
    API,
    EMPTY,
    ROOT,
    UI,
    browse,
    card,
    drag,
    fetch,
    load,
    load_prompt,
    node,
    on_screen,
    open_template,
    place,
    prompt_of,
    rows,
    run_from_page,
    search,
    until,
    view,
)
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_template_browser_shows_the_workflows_with_their_pictures(
    page: Page, server: Any, screenshots: Path
) -> None:
    listed = json.loads(fetch(server, "/workflow_templates"))
    assert sorted(listed[server.name]) == [path.stem for path in UI]
    for path in UI:
        picture = fetch(server, f"/api/workflow_templates/{server.name}/{path.stem}.jpg")
        assert picture == path.with_suffix(".jpg").read_bytes()
    browse(page, server)
    for path in UI:
        shown = card(page, path.stem).locator("img").first
        until(page, lambda shown=shown: shown.evaluate("image => image.naturalWidth") >= 700)
    page.screenshot(path=screenshots / "templates.png")
    page.keyboard.press("Escape")


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_workflow_opens_from_the_template_browser_without_anything_missing(
    page: Page, server: Any, path: Path, screenshots: Path
) -> None:
    open_template(page, server, path)
    unknown = page.evaluate(
        "app.graph.nodes.filter(node => !(node.type in LiteGraph.registered_node_types))"
        ".map(node => node.type)"
    )
    assert unknown == []
    page.wait_for_timeout(1500)
    page.screenshot(path=screenshots / "opened.png")
    warnings = page.get_by_text("missing", exact=False)
    # A template for a model that must be downloaded says which one, and the page then asks for it.
    nodes = json.loads(path.read_text("utf-8"))["nodes"]
    if not any(node["properties"].get("models") for node in nodes):
        assert [text for text in warnings.all_inner_texts() if text.strip()] == []


def test_a_newcomer_has_a_finished_map_in_under_five_clicks(
    page: Page, server: Any, screenshots: Path
) -> None:
    page.evaluate("() => { window.clicks = 0; addEventListener('click', () => clicks++, true); }")
    open_template(page, server, ROOT / "workflows" / "measure_map.json")
    entry = run_from_page(page, server, 900)
    # Templates, the pack, the card, Run.
    assert page.evaluate("clicks") == 4
    assert entry["status"]["status_str"] == "success"
    number = page.evaluate("app.graph.nodes.find(node => node.type === 'DemotionPlotGapMap').id")
    made = {file["label"]: file for file in entry["outputs"][str(number)]["files"]}
    picture = made["gap map (picture)"]
    with Image.open(server.output / picture["subfolder"] / picture["filename"]) as drawn:
        assert drawn.width >= 700
    shown = view(page, str(number))
    until(page, lambda: rows(shown))
    page.screenshot(path=screenshots / "map.png")
    assert "so far" not in shown.inner_text()
    routes = [row for row in rows(shown) if "->" in row[0]]
    assert len(routes) == 2 * 5 and {row[6] for row in routes} == {"12"}
    assert {row[5] for row in routes} <= {"safe", "unsafe", "undecided"}


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_page_queues_the_api_form(page: Page, path: Path) -> None:
    load(page, json.loads((ROOT / "workflows" / path.name).read_text("utf-8")))
    queued, wanted = prompt_of(page), json.loads(path.read_text("utf-8"))
    assert {name: queued.pop(name) for name in wanted} == wanted
    assert {entry["class_type"] for entry in queued.values()} <= {"PreviewAny", "PreviewImage"}


def test_a_node_moves_with_the_mouse(page: Page, screenshots: Path) -> None:
    load(page, json.loads((ROOT / "workflows" / "train_gate_by_hand.json").read_text("utf-8")))
    title = "DemotionDemoteLatents", "[node.pos[0] + 60, node.pos[1] - 15]"
    before, queued = on_screen(page, *title), prompt_of(page)
    drag(page, before, [before[0] + 90, before[1] - 50])
    page.screenshot(path=screenshots / "moved.png")
    moved = np.subtract(on_screen(page, *title), before)
    # The grid may round where a node comes to rest.
    assert np.abs(moved - [90, -50]).max() <= 10 * page.evaluate("app.canvas.ds.scale") + 1
    assert prompt_of(page) == queued


def test_nodes_found_by_search_are_connected_with_the_mouse_and_run(
    page: Page, server: Any, screenshots: Path
) -> None:
    load(page, EMPTY)
    page.evaluate("app.canvas.ds.reset()")
    search(page, "Gate by Hand")
    place(page, 300, 200)
    search(page, "Save Gate")
    place(page, 1000, 200)
    gate = on_screen(page, "DemotionGateByHand", "node.getOutputPos(0)")
    drag(page, gate, on_screen(page, "DemotionSaveGate", "node.getInputPos(0)"))
    page.screenshot(path=screenshots / "connected.png")
    prompt = prompt_of(page)
    (saver,) = [name for name, entry in prompt.items() if entry["class_type"] == "DemotionSaveGate"]
    maker, slot = prompt[saver]["inputs"]["gate"]
    assert (prompt[maker]["class_type"], slot) == ("DemotionGateByHand", 0)
    entry = run_from_page(page, server)
    assert entry["status"]["status_str"] == "success"
    until(page, lambda: page.evaluate(f"app.nodeOutputs['{saver}']?.files?.length") == 1)
    (made,) = entry["outputs"][saver]["files"]
    assert (server.output / made["subfolder"] / made["filename"]).is_file()
    page.screenshot(path=screenshots / "saved.png")


def test_gate_by_hand_is_saved_and_shown(page: Page, server: Any, screenshots: Path) -> None:
    load_prompt(
        page,
        {
            "1": node(
                "DemotionGateByHand",
                "Gate by Hand",
                native_tier=1024,
                target_tier=768,
                sigma_low=0.6,
                sigma_high=0.9,
                span="late",
                span_fraction=0.5,
            ),
            "2": node("DemotionSaveGate", "Save Gate", gate=["1", 0], name="from_the_page"),
            "3": node("PreviewAny", "The gate in words", source=["1", 1]),
        },
    )
    entry = run_from_page(page, server)
    assert entry["status"]["status_str"] == "success"
    (made,) = entry["outputs"]["2"]["files"]
    saved = server.output / made["subfolder"] / made["filename"]
    assert json.loads(saved.read_text())["rules"][0]["window"] == [0.6, 0.9]
    until(page, lambda: page.evaluate("app.nodeOutputs['2']?.files?.length") == 1)
    shown = "[...document.querySelectorAll('textarea')].map(area => area.value).join()"
    until(page, lambda: "1024 -> 768 for sigma 0.6 to 0.9, late:0.5" in page.evaluate(shown))
    assert "not measured" in page.evaluate(shown)
    page.screenshot(path=screenshots / "gate.png")


def test_training_folder_is_listed_and_its_pictures_are_shown(
    page: Page, server: Any, renderer: str, screenshots: Path
) -> None:
    folder = server.base / "input" / "browser_set"
    folder.mkdir(exist_ok=True)
    for index in range(3):
        Image.new("RGB", (96, 64), (80 * index, 120, 200)).save(folder / f"{index}.png")
    (folder / "1.txt").write_text("a caption from a file")
    page.keyboard.press("r")  # refreshes the lists
    listed = """async () => {
        const info = await (await fetch('/object_info/DemotionLoadTrainingFolder')).json();
        return info.DemotionLoadTrainingFolder.input.required.folder[1].options;
    }"""
    assert "browser_set" in page.evaluate(listed)
    load_prompt(
        page,
        {
            "11": node("DemotionLoadTrainingFolder", "Load Training Folder", folder="browser_set"),
            "12": node("PreviewImage", "Pictures", images=["11", 0]),
            "13": node("PreviewAny", "Captions", source=["11", 1]),
        },
    )
    entry = run_from_page(page, server)
    assert entry["status"]["status_str"] == "success"
    assert len(entry["outputs"]["12"]["images"]) == 3
    assert entry["outputs"]["13"]["text"] == ["", "a caption from a file", ""]
    if renderer == "classic":
        until(page, lambda: page.evaluate("app.graph.getNodeById(12).imgs?.length") == 3)
    else:
        page.locator("img[src*='ComfyUI_temp']").first.wait_for()
    page.screenshot(path=screenshots / "pictures.png")


def test_bad_input_is_said_in_the_page(page: Page, screenshots: Path) -> None:
    load_prompt(
        page,
        {
            "21": node(
                "DemotionGateByHand",
                "Gate by Hand",
                native_tier=768,
                target_tier=1024,
                sigma_low=0.5,
                sigma_high=1.0,
                span="always",
                span_fraction=0.5,
            ),
            "22": node("DemotionSaveGate", "Save Gate", gate=["21", 0], name="gate"),
        },
    )
    page.get_by_test_id("queue-button").click()
    page.get_by_text("View details").click()
    page.get_by_label("Info for Gate by Hand - target_tier").click()
    page.get_by_text("route 768 -> 1024 does not go down").first.wait_for()
    page.screenshot(path=screenshots / "refused.png")


def test_help_page_opens_from_the_canvas(page: Page, screenshots: Path) -> None:
    load_prompt(page, {"31": node("DemotionLoadGate", "Load Gate", file="gate_00001.json")})
    info = page.get_by_test_id("info-button")

    def selected() -> bool:
        # A front end that is still busy with the graph does not see a selection.
        page.evaluate(
            """() => {
                const node = app.graph.getNodeById(31);
                app.canvas.ds.scale = 1;
                app.canvas.ds.offset = [500 - node.pos[0], 400 - node.pos[1]];
                app.canvas.selectNode(node);
                app.canvas.setDirty(true, true);
            }"""
        )
        page.wait_for_timeout(500)
        return info.is_visible()

    until(page, selected)
    info.click()
    page.get_by_text("Reads a gate from").wait_for()
    page.screenshot(path=screenshots / "help.png")
    # Beside an open help page Nodes 2.0 shows nothing of the next workflow.
    page.get_by_role("button", name="Toggle properties panel").first.click()


def test_help_pages_are_served(server: Any) -> None:
    for path in (ROOT / "js" / "docs").glob("*.md"):
        assert fetch(server, f"/extensions/{server.name}/docs/{path.name}") == path.read_bytes()
