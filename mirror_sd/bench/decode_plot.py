"""The picture of `bench decode`: speed and gain of each source of drafts, and the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirror_sd import drawing
from mirror_sd.bench.draft_figures import AUTO, OFF, Row

_COLOURS = {"lookup": "#2a6f97", "history": "#588157", "head": "#c8553d", AUTO: "#6d597a"}


def draw(report: dict[str, Any], out: Path) -> None:
    """Write a PNG of the report: a line of panels for each precision.

    Raises `SetupError` without matplotlib, `ConfigError` where it cannot be written.
    """
    pyplot = drawing.pyplot()
    precisions = list(dict.fromkeys(row["precision"] for row in report["drafters"]))
    sweeps = {sweep["precision"]: sweep for sweep in report.get("sweep", ())}
    columns = 2 + any("kinds" in row for row in report["drafters"]) + bool(sweeps)
    figure, axes = pyplot.subplots(
        len(precisions),
        columns,
        figsize=(4.4 * columns, 3.6 * len(precisions) + 0.6),
        layout="constrained",
        squeeze=False,
    )
    for line, precision in zip(axes, precisions, strict=True):
        rows = [row for row in report["drafters"] if row["precision"] == precision]
        free = iter(line)
        _speeds(next(free), rows, precision)
        _gains(next(free), rows)
        if "kinds" in rows[0]:
            _kinds(next(free), rows)
        if precision in sweeps:
            _sweep(next(free), sweeps[precision], rows)
    figure.suptitle(
        f"{report['machine']['cpu']}, {report['threads']} threads, {report['concurrency']} at once,"
        f" temperature {report['temperature']:g}, {report['machine']['at'][:10]}"
    )
    drawing.save(pyplot, figure, out)


def _colour(drafter: str) -> str:
    return _COLOURS.get(drafter, drawing.OTHER_COLOUR)


def _speeds(axis: Any, rows: Sequence[Row], precision: str) -> None:
    labels = [
        _text(row["tok_s"], ".0f") + ("" if row["speedup"] is None else f" ({row['speedup']:.2f}x)")
        for row in rows
    ]
    _bars(axis, rows, [row["tok_s"] for row in rows], labels)
    axis.set_title(f"Speed, {precision}")
    axis.set_xlabel("tokens per second")


def _gains(axis: Any, rows: Sequence[Row]) -> None:
    values = [row["accepted_per_verify"] for row in rows]
    _bars(axis, rows, values, [_text(value, ".2f") for value in values])
    axis.set_title("Gain of a verification")
    axis.set_xlabel("tokens per verify")


def _text(value: float | None, form: str) -> str:
    """Answers of one token have no speed and no verification."""
    return "-" if value is None else format(value, form)


def _bars(
    axis: Any, rows: Sequence[Row], values: Sequence[float | None], labels: Sequence[str]
) -> None:
    order = range(len(rows) - 1, -1, -1)
    drawing.bars(
        axis,
        [rows[i]["drafter"] for i in order],
        [values[i] or 0.0 for i in order],
        colours=[_colour(rows[i]["drafter"]) for i in order],
        labels=[labels[i] for i in order],
    )
    axis.margins(x=0.3)


def _kinds(axis: Any, rows: Sequence[Row]) -> None:
    """Speed of each drafter on each kind of near-duplicate."""
    kinds = list(rows[0]["kinds"])
    width = 0.8 / len(rows)
    for place, row in enumerate(rows):
        axis.bar(
            [index + (place - (len(rows) - 1) / 2) * width for index in range(len(kinds))],
            [row["kinds"][kind]["tok_s"] or 0.0 for kind in kinds],
            width,
            color=_colour(row["drafter"]),
            label=row["drafter"],
        )
    axis.set_xticks(range(len(kinds)), [kind.replace("_", "\n") for kind in kinds])
    axis.margins(y=0.2)
    axis.set_title("Near-duplicates by kind")
    axis.set_ylabel("tokens per second")
    axis.legend(frameon=False, loc="upper center", ncols=len(rows), columnspacing=0.8)
    drawing.tidy(axis)


def _sweep(axis: Any, sweep: Row, rows: Sequence[Row]) -> None:
    """Speed over the length of drafts for each fixed source, beside no drafts and the chooser."""
    grid = [cell for cell in sweep["grid"] if cell["source"] != OFF]
    for source in dict.fromkeys(cell["source"] for cell in grid):
        line = sorted((c["length"], c["tok_s"] or 0.0) for c in grid if c["source"] == source)
        axis.plot(*zip(*line, strict=True), marker="o", color=_colour(source), label=source)
    for row in rows:
        if row["drafter"] in (OFF, AUTO):
            axis.axhline(
                row["tok_s"] or 0.0, ls="--", color=_colour(row["drafter"]), label=row["drafter"]
            )
    lengths = sorted({cell["length"] for cell in grid})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.margins(y=0.2)
    axis.set_ylim(bottom=0)
    axis.set_title("Fixed sources and lengths")
    axis.set_xlabel("tokens in a draft")
    axis.set_ylabel("tokens per second")
    axis.legend(frameon=False)
    drawing.tidy(axis)
