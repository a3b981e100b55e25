"""The real front end in headless Chromium, in both renderers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pages import READY, send

import run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENSHOTS = pytest.StashKey[Path]()
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Nothing but the page itself may start: no updates, no synchronisation, no QUIC.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folder = terminalreporter.config.stash.get(SCREENSHOTS, None)
    if folder:
        terminalreporter.write_line(f"Screenshots of the browser tests: {folder}")


@pytest.fixture(scope="session")
def album(pytestconfig: pytest.Config) -> Path:
    """The folder of all screenshots, emptied first."""
    folder = run.HOME / "screenshots"
    if folder.exists():
        shutil.rmtree(folder)
    pytestconfig.stash[SCREENSHOTS] = folder
    return folder


@pytest.fixture
def screenshots(album: Path, request: pytest.FixtureRequest) -> Path:
    """Where the test's screenshots go; made by the first of them."""
    return album / request.node.name


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("no Chromium on this machine: install one to run the browser tests")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session", params=["classic", "nodes_2"])
def renderer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def visited(server: Any) -> None:
    """The front end was open before: a first visit opens the template browser by itself."""
    send(server, "/settings/Comfy.TutorialCompleted", True)


@pytest.fixture(scope="session")
def front_end(browser: Browser, server: Any, renderer: str, visited: None) -> Page:
    """The loaded front end: one page a renderer for all tests, since it takes seconds to load."""
    send(server, "/settings/Comfy.VueNodes.Enabled", renderer == "nodes_2")
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.goto(server.url)
    page.wait_for_function(READY, timeout=120_000)
    return page


@pytest.fixture
def page(front_end: Page, screenshots: Path) -> Iterator[Page]:
    """The front end; no script of it may fail during a test."""
    failures: list[str] = []

    def note(error: Exception) -> None:
        failures.append(str(error))

    front_end.on("pageerror", note)
    yield front_end
    front_end.remove_listener("pageerror", note)
    front_end.screenshot(path=screenshots / "end.png")
    assert failures == []
