"""Quantities as a person reads them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "3 min 20 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(count: float) -> str:
    """Bytes in words: "3.1 MB", "12 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.2g} {unit}" if count < 10 else f"{count:,.0f} {unit}"
