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
    """Counts units of work on a node, some of which may have been done before, below a headline if
    there is one. Call it after each unit; it raises when the user has cancelled."""

    def __init__(
        self, total: int, node_id: str, unit: str, headline: str = "", done: int = 0
    ) -> None:
        self.bar = comfy.utils.ProgressBar(total, node_id=node_id)
        self.bar.update(done)
        self.total, self.node_id, self.unit, self.headline = total, node_id, unit, headline
        self.done = self.before = done
        self.started = self.told = time.monotonic()
        left = total - done
        self.show(f"{left} {unit} to go" if left else f"no {unit} left to do")

    def __call__(self, *_: float) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.done += 1
        self.bar.update(1)
        now = time.monotonic()
        # The first unit pays for warm-up; from the second on the estimate is honest.
        if now - self.told >= TEXT_INTERVAL or self.done - self.before == 2:
            self.told = now
            left = words.duration(self.seconds_left)
            self.show(f"{self.done} of {self.total} {self.unit}, {left} left")

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

    def show(self, text: str) -> None:
        tell(self.node_id, f"{self.headline}\n{text}" if self.headline else text)


def tell(node_id: str, text: str) -> None:
    """Show a line of text under a node."""
    PromptServer.instance.send_progress_text(text, node_id)
