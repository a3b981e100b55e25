"""What is found from the canvas: the blueprint by search, the nodes in another language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import READY
from pages import ROOT, fetch, load, prompt_of, send, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
BLUEPRINT = ROOT / "subgraphs" / "Measure then train.json"
EMPTY = {"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4}


def test_the_server_lists_the_blueprint(server: Any) -> None:
    listed = json.loads(fetch(server, "/global_subgraphs"))
    (name,) = [name for name, entry in listed.items() if entry["name"] == BLUEPRINT.stem]
    assert listed[name]["info"]["node_pack"] == f"custom_nodes.{server.name}"
    sent = json.loads(fetch(server, f"/global_subgraphs/{name}"))
    assert sent["data"] == BLUEPRINT.read_text("utf-8")


def test_the_blueprint_is_found_by_search_and_inserted_whole(page: Page, tmp_path: Path) -> None:
    load(page, EMPTY)
    search = page.get_by_placeholder("Add a node...")

    def opened() -> bool:
        # A front end that is still busy with the graph does not hear a double click.
        page.mouse.dblclick(800, 600)
        page.wait_for_timeout(1000)
        return search.is_visible()

    until(page, opened)
    search.fill(BLUEPRINT.stem.lower())
    page.get_by_test_id("result-item").filter(has_text=BLUEPRINT.stem).wait_for()
    page.screenshot(path=tmp_path / "search.png")
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)
    page.mouse.click(700, 500)
    until(page, lambda: page.evaluate("app.graph.nodes.length") == 1)
    page.screenshot(path=tmp_path / "inserted.png")
    inside = page.evaluate("app.graph.nodes[0].subgraph.nodes.map(node => node.type)")
    (graph,) = json.loads(BLUEPRINT.read_text("utf-8"))["definitions"]["subgraphs"]
    assert sorted(inside) == sorted(node["type"] for node in graph["nodes"])
    known = page.evaluate("Object.keys(LiteGraph.registered_node_types)")
    assert set(inside) <= set(known)
    queued = {entry["class_type"]: entry["inputs"] for entry in prompt_of(page).values()}
    assert set(queued) == set(inside)
    assert queued["DemotionDemoteLatents"]["target_tier"] == 768
    assert queued["DemotionTrainLora"]["name"] == "demotion_lora"


@pytest.fixture(params=["zh", "ja"])
def language(server: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    send(server, "/settings/Comfy.Locale", request.param)
    yield request.param
    send(server, "/settings/Comfy.Locale", "en")


def test_nodes_speak_the_language_of_the_page(
    browser: Browser, server: Any, language: str, tmp_path: Path
) -> None:
    said = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text("utf-8"))
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.goto(server.url)
    page.wait_for_function(READY, timeout=120_000)
    shown = page.evaluate(
        """() => {
            const node = LiteGraph.createNode('DemotionTrainingSet');
            const names = [...node.inputs, ...node.outputs].map(
                slot => slot.label ?? slot.localized_name ?? slot.name
            );
            return {title: node.title, names, widget: node.widgets[0].label};
        }"""
    )
    page.screenshot(path=tmp_path / f"{language}.png")
    page.close()
    entry = said["DemotionTrainingSet"]
    assert shown["title"] == entry["display_name"]
    assert shown["widget"] == entry["inputs"]["native_tier"]["name"]
    sockets = [name for name in entry["inputs"] if name != "native_tier"]
    for name in sockets:
        assert entry["inputs"][name]["name"] in shown["names"], name
    for output in entry["outputs"].values():
        assert output["name"] in shown["names"]
