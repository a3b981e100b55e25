"""A probe that is killed outright, whenever that is, goes on to the bytes of one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nets
import pytest

from demotion import measure, probe, sketch

KILLS = 20
TESTS = Path(__file__).resolve().parent
IMAGES, BINS, DRAWS, BUCKETS = 6, ((0.0, 0.5), (0.5, 1.0)), 4, 64

# Imports once, since that takes seconds, and forks for every line "SECONDS PATH" of its input: a
# probe into PATH that is killed after SECONDS, or left alone with "never". Prints its exit code.
FORKS = """
import os, signal, sys, time
import conftest, test_kill

for line in sys.stdin:
    seconds, path = line.rstrip().split(" ", 1)
    child = os.fork()
    if child == 0:
        test_kill.probe_into(test_kill.Path(path))
        os._exit(0)
    if seconds != "never":
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def probe_into(path: Path) -> None:
    """Measure the ten-line model, going on from what the file holds."""
    settings = {"bins": [list(edges) for edges in BINS], "draws": DRAWS, "sketch": BUCKETS}
    model = nets.TinyFlow()
    parts = {"A": [model.first.weight], "B": [model.second.weight]}
    size = sum(parameter.numel() for part in parts.values() for parameter in part)
    sketcher = sketch.CountSketch(7, size, BUCKETS, "cpu")
    done = {(cell.image, cell.bin) for cell in measure.open_for_append(path, settings).cells}
    for subject in map(nets.subject, range(IMAGES)):
        for edges in BINS:
            if (subject.image, edges) not in done:
                cell = probe.measure_cell(
                    subject, edges, DRAWS, 7, True, model, parts, lambda: None, sketcher
                )
                measure.append(path, cell)


@pytest.fixture
def run_probe() -> Iterator[Callable[[Path, float | None], int]]:
    """Probe into a file, killed after so many seconds or not at all; the exit code."""
    forks = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def run(path: Path, seconds: float | None = None) -> int:
        forks.stdin.write(f"{'never' if seconds is None else seconds} {path}\n")
        return int(forks.stdout.readline())

    yield run
    forks.stdin.close()
    forks.wait(10)


def contents(path: Path) -> dict[str, bytes]:
    """The measurement's files; one that was being replaced when its writer died is none."""
    files = path.parent.glob(f"{path.stem}.*")
    return {file.suffix: file.read_bytes() for file in files if file.suffix != ".part"}


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL and no fork")
def test_a_probe_killed_twenty_times_resumes_to_the_bytes_of_one_that_was_not(
    tmp_path: Path, run_probe: Callable[[Path, float | None], int]
) -> None:
    for name in ("warm.jsonl", "whole.jsonl"):
        began = time.monotonic()
        assert run_probe(tmp_path / name) == 0
        took = time.monotonic() - began
    expected = contents(tmp_path / "whole.jsonl")
    assert set(expected) == {".jsonl", ".sketches"}

    chance = random.Random()
    killed, finished, begun = 0, 0, 0
    while killed < KILLS or not finished:
        path = tmp_path / f"probe{finished}.jsonl"
        code = run_probe(path, chance.uniform(0, took) if killed < KILLS else None)
        if code == 0:
            assert contents(path) == expected
            finished += 1
        else:
            assert code == -signal.SIGKILL
            killed += 1
            begun += path.exists() and path.read_bytes().count(b"\n") > 1
    assert begun, "no kill came between two cells"
