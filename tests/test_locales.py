"""Names and tooltips in English, Chinese and Japanese, as ComfyUI serves them beside the nodes."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

pytestmark = pytest.mark.server
LANGUAGES = ("en", "zh", "ja")
# The front end compiles names and descriptions as messages, in which these have a meaning.
SYNTAX = re.compile(r"[@{}|]")
SCRIPT = {"zh": re.compile(r"[\u4e00-\u9fff]"), "ja": re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")}


def fetch(server: Any, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}{path}") as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def nodes(server: Any) -> dict[str, Any]:
    """What ComfyUI tells of every node of the pack, by node id."""
    listed = fetch(server, "/object_info")
    return {name: node for name, node in listed.items() if name.startswith("Demotion")}


@pytest.fixture(scope="module")
def served(server: Any) -> dict[str, Any]:
    """All translations, by language."""
    return fetch(server, "/i18n")


def english(node: dict[str, Any]) -> dict[str, Any]:
    """The entry of a node as its schema has it."""
    given = node["input"].get("required", {}) | node["input"].get("optional", {})
    inputs = {
        name: {"name": settings.get("display_name") or name, "tooltip": settings["tooltip"]}
        for name, (_, settings) in given.items()
    }
    outputs = zip(node["output_name"], node["output_tooltips"])
    return {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": inputs,
        "outputs": {
            str(index): {"name": name, "tooltip": tooltip}
            for index, (name, tooltip) in enumerate(outputs)
        },
    }


def shape(entry: Any) -> Any:
    """The keys of a nested entry, without its texts."""
    return {key: shape(value) for key, value in entry.items()} if isinstance(entry, dict) else None


def texts(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [text for value in entry.values() for text in texts(value)]


def test_english_is_what_the_schemas_say(nodes: dict[str, Any], served: dict[str, Any]) -> None:
    assert served["en"]["nodeDefs"] == {name: english(node) for name, node in nodes.items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_and_input_is_in_a_locale_and_nothing_else(
    nodes: dict[str, Any], served: dict[str, Any], language: str
) -> None:
    expected = {name: shape(english(node)) for name, node in nodes.items()}
    assert shape(served[language]["nodeDefs"]) == expected
    own = {node["category"].split("/")[-1] for node in nodes.values()}
    assert set(served[language]["nodeCategories"]) == own


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_locale_has_no_empty_text_and_no_message_syntax(
    served: dict[str, Any], language: str
) -> None:
    for text in texts(served[language]):
        assert text.strip() == text != "" and not SYNTAX.search(text), text


@pytest.mark.parametrize("language", SCRIPT)
def test_a_translation_is_in_its_language(served: dict[str, Any], language: str) -> None:
    for name, entry in served[language]["nodeDefs"].items():
        for text in (entry["display_name"], entry["description"]):
            assert SCRIPT[language].search(text), f"{name}: {text}"
        for said in (*entry["inputs"].values(), *entry["outputs"].values()):
            assert SCRIPT[language].search(said["tooltip"]), f"{name}: {said}"
