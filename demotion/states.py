"""Where a training run can be taken up again: its last states in a folder, one file each.

A state is on the disk whole or not at all, whatever happens while it is written.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch

from .measure import write_atomically


class States:
    """The states of one run, named by the steps that were done: <folder>/step_0000120.pt."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps of the states that are there, ascending."""
        names = (re.fullmatch(r"step_(\d+)\.pt", path.name) for path in self.folder.glob("*.pt"))
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:07}.pt"

    def newest(self, most: int) -> int:
        """Steps of the newest state of at most so many, 0 without one."""
        return max((step for step in self.steps() if step <= most), default=0)

    def load(self, most: int) -> dict[str, Any] | None:
        """The newest state of at most so many steps, or None."""
        step = self.newest(most)
        return torch.load(self.path(step), weights_only=True) if step else None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a state, then remove those before it but the last few.

        Raises OSError, which names the state that is left, when it cannot be written.
        """
        before = [found for found in self.steps() if found < step]
        buffer = io.BytesIO()
        torch.save(state, buffer)
        try:
            write_atomically(self.path(step), buffer.getvalue())
        except OSError as error:
            left = f"the state of step {before[-1]} is kept" if before else "there is none before"
            raise OSError(
                f"the state of step {step} cannot be written ({error.strerror}): free space on the "
                f"disk and queue again; {left}"
            ) from error
        self.prune(step, self.keep)

    def prune(self, step: int, keep: int) -> None:
        """Remove the states up to a step but the last few."""
        for found in [found for found in self.steps() if found <= step][:-keep]:
            self.path(found).unlink()

    def clear(self) -> None:
        """Remove all states."""
        for step in self.steps():
            self.path(step).unlink()
