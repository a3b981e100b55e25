"""Progress with the time left, and a Cancel that is heard after every unit of work."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
from server import PromptServer

from ..demotion import words

TEXT_INTERVAL = 2.0


class Progress:
    """Counts units of work on a node, below a headline if there is one. Call it after each unit;
    it raises when the user has cancelled."""

    def __init__(self, total: int, node_id: str, unit: str, headline: str = "") -> None:
        self.bar = comfy.utils.ProgressBar(total, node_id=node_id)
        self.total, self.node_id, self.unit, self.headline = total, node_id, unit, headline
        self.done = 0
        self.started = self.told = time.monotonic()
        self.show(f"{total} {unit} to go" if total else f"no {unit} left to do")

    def __call__(self, *_: float) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.done += 1
        self.bar.update(1)
        now = time.monotonic()
        # The first unit pays for warm-up; from the second on the estimate is honest.
        if now - self.told >= TEXT_INTERVAL or self.done == 2:
            self.told = now
            left = words.duration((now - self.started) / self.done * (self.total - self.done))
            self.show(f"{self.done} of {self.total} {self.unit}, {left} left")

    def show(self, text: str) -> None:
        tell(self.node_id, f"{self.headline}\n{text}" if self.headline else text)


def tell(node_id: str, text: str) -> None:
    """Show a line of text under a node."""
    PromptServer.instance.send_progress_text(text, node_id)
