"""Progress with the time left, and a Cancel that is heard after every unit of work."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
from PIL import Image
from server import PromptServer

from ..demotion import words

TEXT_INTERVAL = 2.0
# Longer edge of a preview, in pixels.
PREVIEW = 512


class Progress:
    """Counts units of work on a node, some of which may have been done before. A headline, which
    the node's widget shows in full, comes first; a detail stands beside the count. Call it after
    each unit; it raises when the user has cancelled."""

    def __init__(
        self, total: int, node_id: str, unit: str, headline: str = "", done: int = 0
    ) -> None:
        self.bar = comfy.utils.ProgressBar(total, node_id=node_id)
        self.bar.update(done)
        self.total, self.node_id, self.unit, self.headline = total, node_id, unit, headline
        self.detail = ""
        self.done = self.before = done
        self.started = self.told = time.monotonic()
        left = f"{total - done} {unit} to go" if done < total else f"no {unit} left to do"
        tell(node_id, headline or left)

    def __call__(self, *_: float) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.done += 1
        self.bar.update(1)
        now = time.monotonic()
        # The first unit pays for warm-up; from the second on the estimate is honest.
        if now - self.told >= TEXT_INTERVAL or self.done in (self.before + 2, self.total):
            self.told = now
            left = words.duration(self.seconds_left)
            done = f"{self.done} of {self.total} {self.unit}{self.detail}"
            tell(self.node_id, f"{done}, {left} left")

    @property
    def seconds_left(self) -> float | None:
        """What is left at the pace so far, or None before the first unit."""
        here = self.done - self.before
        if not here:
            return None
        return (time.monotonic() - self.started) / here * (self.total - self.done)

    def preview(self, picture: Image.Image) -> None:
        """Show a picture on the node."""
        self.bar.update_absolute(self.done, preview=("JPEG", picture, PREVIEW))


def tell(node_id: str, text: str) -> None:
    """Show the first line of a text under a node: the host has room for two there, and a longer one
    would make the node run over what lies below it."""
    PromptServer.instance.send_progress_text(text.partition("\n")[0], node_id)
