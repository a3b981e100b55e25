"""Progress with the time left, and a Cancel that is heard after every unit of work."""

from __future__ import annotations

import time

import comfy.model_management
import comfy.utils
from server import PromptServer

TEXT_INTERVAL = 2.0


class Progress:
    """Counts units of work on a node. Call it after each unit; it raises when the user has
    cancelled."""

    def __init__(self, total: int, node_id: str, unit: str) -> None:
        self.bar = comfy.utils.ProgressBar(total, node_id=node_id)
        self.total, self.node_id, self.unit = total, node_id, unit
        self.done = 0
        self.started = self.told = time.monotonic()
        tell(node_id, f"{total} {unit} to go" if total else f"no {unit} left to do")

    def __call__(self, *_: float) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.done += 1
        self.bar.update(1)
        now = time.monotonic()
        # The first unit pays for warm-up; from the second on the estimate is honest.
        if now - self.told >= TEXT_INTERVAL or self.done == 2:
            self.told = now
            left = (now - self.started) / self.done * (self.total - self.done)
            tell(self.node_id, f"{self.done} of {self.total} {self.unit}, {duration(left)} left")


def tell(node_id: str, text: str) -> None:
    """Show a line of text under a node."""
    PromptServer.instance.send_progress_text(text, node_id)


def duration(seconds: float) -> str:
    """Seconds in words a person reads: "40 s", "3 min 20 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
