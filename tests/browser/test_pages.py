"""The pack in the front end as it comes: templates, workflows, dragging, queueing, help.

Screenshots are left in the test's temporary folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import (
    API,
    ROOT,
    UI,
    at_rest,
    fetch,
    load,
    load_prompt,
    node,
    prompt_of,
    run_from_page,
    until,
)
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_template_browser_shows_the_workflows_with_their_pictures(
    page: Page, server: Any, tmp_path: Path
) -> None:
    listed = json.loads(fetch(server, "/workflow_templates"))
    assert sorted(listed[server.name]) == [path.stem for path in UI]
    for path in UI:
        picture = fetch(server, f"/api/workflow_templates/{server.name}/{path.stem}.jpg")
        assert picture == path.with_suffix(".jpg").read_bytes()
    page.get_by_text("Templates", exact=True).first.click()
    page.get_by_text(server.name, exact=True).click()
    cards = page.locator("[data-testid^='template-workflow-']")

    def all_listed() -> bool:
        if all(page.get_by_test_id(f"template-workflow-{path.stem}").count() for path in UI):
            return True
        # More cards come as the last one comes into sight.
        cards.last.scroll_into_view_if_needed()
        return False

    until(page, all_listed)
    for path in UI:
        card = page.get_by_test_id(f"template-workflow-{path.stem}")
        card.scroll_into_view_if_needed()
        shown = card.locator("img")
        until(page, lambda shown=shown: shown.first.evaluate("image => image.naturalWidth") >= 700)
    page.screenshot(path=tmp_path / "templates.png")
    chosen = UI[0]
    page.get_by_test_id(f"template-workflow-{chosen.stem}").click()
    count = len(json.loads(chosen.read_text("utf-8"))["nodes"])
    until(page, lambda: page.evaluate("app.graph.nodes.length") == count)


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_workflow_opens_without_anything_missing(page: Page, path: Path, tmp_path: Path) -> None:
    workflow = json.loads(path.read_text("utf-8"))
    load(page, workflow)
    unknown = page.evaluate(
        "app.graph.nodes.filter(node => !(node.type in LiteGraph.registered_node_types))"
        ".map(node => node.type)"
    )
    assert unknown == []
    page.wait_for_timeout(1500)
    page.screenshot(path=tmp_path / f"{path.stem}.png")
    warnings = page.get_by_text("missing", exact=False)
    # A template for a model that must be downloaded says which one, and the page then asks for it.
    if not any(node["properties"].get("models") for node in workflow["nodes"]):
        assert [text for text in warnings.all_inner_texts() if text.strip()] == []


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_page_queues_the_api_form(page: Page, path: Path) -> None:
    load(page, json.loads((ROOT / "workflows" / path.name).read_text("utf-8")))
    queued, wanted = prompt_of(page), json.loads(path.read_text("utf-8"))
    assert {name: queued.pop(name) for name in wanted} == wanted
    assert {entry["class_type"] for entry in queued.values()} <= {"PreviewAny", "PreviewImage"}


def test_a_node_moves_with_the_mouse(page: Page, tmp_path: Path) -> None:
    load(page, json.loads((ROOT / "workflows" / "train_gate_by_hand.json").read_text("utf-8")))
    where = """() => {
        const node = app.graph.nodes.find(node => node.type === 'DemotionDemoteLatents');
        const [x, y] = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] - 15]);
        const box = app.canvas.canvas.getBoundingClientRect();
        return {x: x + box.x, y: y + box.y, pos: [...node.pos], scale: app.canvas.ds.scale};
    }"""
    before, queued = at_rest(page, where), prompt_of(page)
    page.mouse.move(before["x"], before["y"])
    page.mouse.down()
    page.mouse.move(before["x"] + 90, before["y"] - 50, steps=8)
    page.mouse.up()
    page.screenshot(path=tmp_path / "moved.png")
    after = at_rest(page, where)
    moved = np.subtract(after["pos"], before["pos"]) * before["scale"]
    # The grid may round where a node comes to rest.
    assert np.abs(moved - [90, -50]).max() <= 10 * before["scale"] + 1
    assert prompt_of(page) == queued


def test_gate_by_hand_is_saved_and_shown(page: Page, server: Any, tmp_path: Path) -> None:
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
    page.screenshot(path=tmp_path / "gate.png")


def test_training_folder_is_listed_and_its_pictures_are_shown(
    page: Page, server: Any, renderer: str, tmp_path: Path
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
    page.screenshot(path=tmp_path / "pictures.png")


def test_bad_input_is_said_in_the_page(page: Page, tmp_path: Path) -> None:
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
    page.screenshot(path=tmp_path / "refused.png")


def test_help_page_opens_from_the_canvas(page: Page, tmp_path: Path) -> None:
    load_prompt(page, {"31": node("DemotionLoadGate", "Load Gate", file="gate_00001.json")})
    page.evaluate(
        """() => {
            const node = app.graph.getNodeById(31);
            app.canvas.ds.scale = 1;
            app.canvas.ds.offset = [500 - node.pos[0], 400 - node.pos[1]];
            app.canvas.selectNode(node);
            app.canvas.setDirty(true, true);
        }"""
    )
    page.get_by_test_id("info-button").click()
    page.get_by_text("Reads a gate from").wait_for()
    page.screenshot(path=tmp_path / "help.png")


def test_help_pages_are_served(server: Any) -> None:
    for path in (ROOT / "js" / "docs").glob("*.md"):
        assert fetch(server, f"/extensions/{server.name}/docs/{path.name}") == path.read_bytes()
