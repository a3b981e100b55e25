"""Driving the front end: open, run, wait, ask."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
UI = sorted((ROOT / "workflows").glob("*.json"))
API = sorted((ROOT / "workflows" / "api").glob("*.json"))


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


def node(kind: str, title: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
