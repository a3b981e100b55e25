"""Driving the front end: open, run, wait, ask."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]
UI = sorted((ROOT / "workflows").glob("*.json"))
API = sorted((ROOT / "workflows" / "api").glob("*.json"))
EMPTY = {"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4}

READY = "window.app?.extensionManager && app.graph?.nodes.length > 0"


def reload(page: Page) -> None:
    """Load the page again: it opens the workflow that was open."""
    page.reload()
    page.wait_for_function(READY, timeout=120_000)


def load(page: Page, workflow: dict[str, Any]) -> None:
    """Open a workflow in the page."""
    page.evaluate("async (workflow) => { await app.loadGraphData(workflow) }", workflow)


def load_prompt(page: Page, prompt: dict[str, Any]) -> None:
    """Open a workflow in API form, as dropping its file on the canvas does.

    Node numbers differ between the tests, since the page keeps what a number has shown before.
    """
    page.evaluate("async (prompt) => { await app.loadApiJson(prompt, 'test') }", prompt)


def card(page: Page, name: str) -> Locator:
    """The card of a workflow in the open template browser."""
    cards = page.locator("[data-testid^='template-workflow-']")
    wanted = page.get_by_test_id(f"template-workflow-{name}")

    def listed() -> bool:
        # More cards come as the last one comes into sight.
        if not wanted.count():
            cards.last.scroll_into_view_if_needed()
        return wanted.count() == 1

    until(page, listed)
    wanted.scroll_into_view_if_needed()
    return wanted


def browse(page: Page, server: Any) -> None:
    """Open the template browser at the pack's workflows."""
    page.get_by_text("Templates", exact=True).first.click()
    page.get_by_role("button", name=server.name, exact=True).click()


def open_template(page: Page, server: Any, path: Path) -> None:
    """Open a workflow from the template browser."""
    browse(page, server)
    card(page, path.stem).click()
    wanted = sorted(node["type"] for node in json.loads(path.read_text("utf-8"))["nodes"])
    until(page, lambda: sorted(page.evaluate("app.graph.nodes.map(node => node.type)")) == wanted)


def search(page: Page, name: str) -> None:
    """Search for a node by its name."""
    box = page.get_by_placeholder("Add a node...")

    def opened() -> bool:
        # A front end that is still busy with the graph does not hear a double click.
        page.mouse.dblclick(800, 800)
        page.wait_for_timeout(1000)
        return box.is_visible()

    until(page, opened)
    box.fill(name.lower())
    page.get_by_test_id("result-item").filter(has_text=name).first.wait_for()


def place(page: Page, x: float, y: float) -> None:
    """Take the first node that was found and put it where the mouse is."""
    count = "app.graph.nodes.length"
    before = page.evaluate(count)
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)
    page.mouse.click(x, y)
    until(page, lambda: page.evaluate(count) == before + 1)


def on_screen(page: Page, kind: str, place: str) -> list[float]:
    """Where a place of the graph, given as a script on the node of a type, is in the window."""
    return at_rest(
        page,
        f"""() => {{
            const node = app.graph.nodes.find(node => node.type === "{kind}");
            const [x, y] = app.canvas.ds.convertOffsetToCanvas({place});
            const box = app.canvas.canvas.getBoundingClientRect();
            return [x + box.x, y + box.y];
        }}""",
    )


def drag(page: Page, start: list[float], end: list[float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=8)
    page.mouse.up()


def prompt_of(page: Page) -> dict[str, Any]:
    """What the page would queue."""
    return page.evaluate("async () => (await app.graphToPrompt()).output")


def fetch(server: Any, path: str) -> bytes:
    with urllib.request.urlopen(f"{server.url}{path}") as answer:
        return answer.read()


def send(server: Any, path: str, value: Any) -> None:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(value).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def run_from_page(page: Page, server: Any, seconds: float = 120) -> dict[str, Any]:
    """Press Run; the history entry of what it queued."""
    before = set(json.loads(fetch(server, "/history")))
    page.get_by_test_id("queue-button").click()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        added = {
            name: entry
            for name, entry in json.loads(fetch(server, "/history")).items()
            if name not in before
        }
        if added:
            return next(iter(added.values()))
        page.wait_for_timeout(200)
    raise AssertionError(f"nothing was run within {seconds} s")


def until(page: Page, check: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until check() holds."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "the page did not get there"
        page.wait_for_timeout(100)


def at_rest(page: Page, script: str) -> Any:
    """What a script gives when it gives the same twice: nodes are laid out in several turns."""
    seen = page.evaluate(script)
    while True:
        page.wait_for_timeout(700)
        again = page.evaluate(script)
        if again == seen:
            return again
        seen = again


def view(page: Page, number: str) -> Locator:
    """The widget of a node, brought to where it can be seen."""
    show = """(number) => {
        const node = app.graph.getNodeById(Number(number));
        const widget = node.widgets.find((widget) => widget.name === "demotion_view");
        widget.element.querySelector(".demotion-view").dataset.node = number;
        app.canvas.bringToFront(node);
        app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [500 - node.pos[0], 900 - node.pos[1] - node.size[1]];
        app.canvas.setDirty(true, true);
    }"""
    found = page.locator(f".demotion-view[data-node='{number}']")
    # A node may grow when its widget comes into sight.
    for _ in range(2):
        page.evaluate(show, number)
        found.wait_for()
        page.wait_for_timeout(300)
    return found


def rows(shown: Locator) -> list[list[str]]:
    """The table behind a chart."""
    return shown.evaluate(
        "view => [...view.querySelectorAll('tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )


def node(kind: str, title: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
