"""The picture of `bench quality` with references: ROUGE-L of each run, and its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mirror_sd import drawing
from mirror_sd.bench.peer_lineup import OURS


def draw(report: dict[str, Any], out: Path) -> None:
    """Write a PNG of the part `rouge` of a report.

    Raises `SetupError` without matplotlib, `ConfigError` where it cannot be written.
    """
    pyplot = drawing.pyplot()
    rows = report["rouge"]["runs"][::-1]
    figure, axes = pyplot.subplots(
        1, 2, figsize=(10.5, 0.5 * len(rows) + 2.2), layout="constrained", sharey=True
    )
    names = [row["run"] for row in rows]
    colours = [
        drawing.OURS_COLOUR if name.startswith(OURS) else drawing.OTHER_COLOUR for name in names
    ]
    drawing.bars(
        axes[0],
        names,
        [row["rouge_l"] for row in rows],
        colours=colours,
        labels=[f"{row['rouge_l']:.4f} ({100 * row['difference']:+.2f} points)" for row in rows],
        errors=[row["difference_error"] or 0.0 for row in rows],
    )
    axes[0].margins(x=0.6)
    axes[0].set_xlabel("ROUGE-L; whiskers: standard error of the difference")
    drawing.bars(
        axes[1],
        names,
        [row["tok_s"] or 0.0 for row in rows],
        colours=colours,
        labels=[f"{row['tok_s']} ({row['ms_per_token']} ms a token)" for row in rows],
    )
    axes[1].margins(x=0.6)
    axes[1].set_xlabel("tokens per second, one stream")
    figure.suptitle(
        f"{report['model']}, {report['rouge']['references']} references, greedy:"
        f" {report['machine']['cpu']}, {report['machine']['at'][:10]}"
    )
    drawing.save(pyplot, figure, out)
