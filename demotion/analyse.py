"""From measurement files to a map, its figure and a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import gap_map, gate, merge, plots
from . import published as released
from .measure import Measurement


def analyse(
    files: Sequence[Path],
    output: Path | None = None,
    *,
    published: bool = False,
    estimand: str = "ratio",
    estimator: str = "one_set",
    control: str | None = None,
    margin: float = 0.05,
    merged: Path | None = None,
) -> tuple[str, list[Path]]:
    """The gap map of a measurement, or of several merged: the words to read, and the files written.

    output is what their names begin with; without it "<first file>_map" beside that file. published
    says that the files are released rows of cosines, of which words are all that can be had. merged
    is where the measurement of all files together is written, to be analysed or merged as any
    other. The other options are those of `gap_map.gap_map`. Raises ValueError for a file that is
    not there or is none of its kind, for ones that cannot be merged, and for options that do not
    fit.
    """
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not there: give the path of a measurement file (.jsonl)")
    if published:
        return "\n\n".join(map(released.report, files)), []
    measured = [Measurement.load(file) for file in files]
    whole = merge.merge(dict(zip(map(str, files), measured))) if files[1:] else measured[0]
    written = []
    if merged is not None:
        whole.save(merged)
        written.append(merged)
    made = gap_map.gap_map(
        whole, estimand=estimand, estimator=estimator, control=control, margin=margin
    )
    begin = output or files[0].with_name(f"{files[0].stem}_map")
    data, figure = (begin.with_name(f"{begin.name}{suffix}") for suffix in (".json", ".png"))
    made.save(data)
    plots.save_png(plots.gap_map_figure(made), figure)
    words = f"{gap_map.summary(made)}\n\n{gate.describe(gate.from_gap_map(made))}"
    return words, [*written, data, figure]
