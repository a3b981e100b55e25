"""What is found from the canvas: the blueprint by search, the nodes in another language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pages import EMPTY, READY, ROOT, fetch, load, place, prompt_of, search, send

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
BLUEPRINT = ROOT / "subgraphs" / "Measure then train.json"


def test_the_server_lists_the_blueprint(server: Any) -> None:
    listed = json.loads(fetch(server, "/global_subgraphs"))
    (name,) = [name for name, entry in listed.items() if entry["name"] == BLUEPRINT.stem]
    assert listed[name]["info"]["node_pack"] == f"custom_nodes.{server.name}"
    sent = json.loads(fetch(server, f"/global_subgraphs/{name}"))
    assert sent["data"] == BLUEPRINT.read_text("utf-8")


def test_the_blueprint_is_found_by_search_and_inserted_whole(page: Page, screenshots: Path) -> None:
    load(page, EMPTY)
    search(page, BLUEPRINT.stem)
    page.screenshot(path=screenshots / "search.png")
    place(page, 700, 500)
    page.screenshot(path=screenshots / "inserted.png")
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
def language(server: Any, visited: None, request: pytest.FixtureRequest) -> Iterator[str]:
    send(server, "/settings/Comfy.Locale", request.param)
    yield request.param
    send(server, "/settings/Comfy.Locale", "en")


def test_nodes_speak_the_language_of_the_page(
    browser: Browser, server: Any, language: str, screenshots: Path
) -> None:
    said = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text("utf-8"))
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.goto(server.url)
    page.wait_for_function(READY, timeout=120_000)
    shown = page.evaluate(
        """(kinds) => kinds.map((kind) => {
            const node = LiteGraph.createNode(kind);
            const slots = [...node.inputs, ...node.outputs];
            return {
                title: node.title,
                slots: slots.map((slot) => slot.label ?? slot.localized_name ?? slot.name),
                widgets: Object.fromEntries(
                    (node.widgets ?? []).map((widget) => [widget.name, widget.label])
                ),
            };
        })""",
        list(said),
    )
    page.screenshot(path=screenshots / f"{language}.png")
    page.close()
    for entry, node in zip(said.values(), shown, strict=True):
        assert node["title"] == entry["display_name"]
        for name, told in entry["inputs"].items():
            place = [node["widgets"][name]] if name in node["widgets"] else node["slots"]
            assert told["name"] in place, (entry["display_name"], name)
        for output in entry["outputs"].values():
            assert output["name"] in node["slots"]
