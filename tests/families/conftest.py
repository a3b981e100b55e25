"""Collects what each family's tests measured, and prints one line a family."""

from __future__ import annotations

import pytest

COLUMNS = {
    "forward": "forward difference",
    "gradient": "difference quotient / gradient",
    "across": "across it / |gradient|",
    "checkpoint": "checkpointing",
    "batch": "batch of 3: velocity, gradient",
    "rotary": "rotary door",
}
LINES: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="session")
def family_lines() -> dict[str, dict[str, str]]:
    """Family -> column -> what was measured."""
    return LINES


def pytest_terminal_summary(terminalreporter) -> None:
    if not LINES:
        return
    terminalreporter.section("families")
    terminalreporter.line(f"{'family':<20}" + "".join(f"{v:<32}" for v in COLUMNS.values()))
    for kind, line in LINES.items():
        terminalreporter.line(
            f"{kind:<20}" + "".join(f"{line.get(column, 'not run'):<32}" for column in COLUMNS)
        )
