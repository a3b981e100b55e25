"""What a node's widget draws: a JSON document in output/demotion/live, which ComfyUI serves itself,
and an event while a run changes it. Nothing reads a document but the front end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server import PromptServer

from ..demotion import measure
from . import files
from .progress import Progress

EVENT = "demotion.live"
# Seconds between two events of a run, and how many times as long as making one takes.
INTERVAL = 2.0
PATIENCE = 20


def keep(kind: str, view: dict[str, Any]) -> dict[str, list]:
    """Write what does not change any more; the entry of a node's ui output that shows it."""
    data = _document(kind, view)
    path = _path(kind, hashlib.blake2b(data, digest_size=8).hexdigest())
    measure.write_atomically(path, data)
    return _ui(kind, path)


class Live:
    """A document that grows while a node runs."""

    def __init__(self, kind: str, node_id: str) -> None:
        self.kind, self.node_id = kind, node_id
        self.due = 0.0

    def show(self, name: str, make: Callable[[], dict[str, Any]], progress: Progress) -> None:
        """Make the document of this name and tell the page of it, unless that was done just now."""
        began, server = time.monotonic(), PromptServer.instance
        if began < self.due:
            return
        running = {
            "prompt": server.last_prompt_id,
            "done": progress.done,
            "total": progress.total,
            "unit": progress.unit,
            "seconds_left": progress.seconds_left,
            "said": progress.headline,
        }
        data = _document(self.kind, {**make(), "running": running})
        path = _path(self.kind, name)
        measure.write_atomically(path, data)
        if server.client_id is not None:
            told = {
                "node": self.node_id,
                "file": files.shown(self.kind, path),
                "document": json.loads(data),
            }
            server.send_sync(EVENT, told, server.client_id)
        now = time.monotonic()
        self.due = now + max(INTERVAL, PATIENCE * (now - began))

    def finish(self, name: str, view: dict[str, Any]) -> dict[str, list]:
        """Write the last state; the entry of the node's ui output that shows it."""
        path = _path(self.kind, name)
        measure.write_atomically(path, _document(self.kind, view))
        return _ui(self.kind, path)


def _document(kind: str, view: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **view}, allow_nan=False).encode()


def _path(kind: str, name: str) -> Path:
    return files.output_folder("live") / f"{kind}_{name}.json"


def _ui(kind: str, path: Path) -> dict[str, list]:
    return {"demotion_live": [files.shown(kind, path)]}
