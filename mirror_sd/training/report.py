"""The picture of a run: loss, acceptance along the way, acceptance by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd import drawing

_SMOOTHED_STEPS = 20
Report = dict[str, Any]


def draw(report: Report, path: Path) -> None:
    """Write a PNG. Raises `SetupError` where matplotlib is missing, `ConfigError` where the file
    cannot be written."""
    pyplot = drawing.pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    _losses(axes[0], report["curves"])
    _acceptance(axes[1], report["curves"])
    _depths(axes[2], report)
    figure.suptitle(f"draft head for {report['model']}, seed {report['plan']['seed']}")
    drawing.save(pyplot, figure, path)


def smoothed(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over the steps before each; over fewer where there are few, so that a line is left."""
    width = max(min(_SMOOTHED_STEPS, len(losses) // 4), 1)
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def _losses(axis: Any, curves: dict[str, Report]) -> None:
    start = 0
    for stage, curve in curves.items():
        # A precision that is not fitted (--mixed-steps 0) has none.
        for depth in range(max((len(losses) for _, losses in curve["losses"]), default=0)):
            reached = [(step, row[depth]) for step, row in curve["losses"] if len(row) > depth]
            steps, losses = np.array(reached).T
            smooth = smoothed(losses)
            axis.plot(start + steps[-len(smooth) :], smooth, label=f"{stage}, step {depth + 1}")
        if stage == "fp32":
            start = curve["losses"][-1][0]
    axis.set(title="Loss", xlabel="updates", ylabel="nats above the target's entropy", yscale="log")
    axis.legend(frameon=False, fontsize="small")


def _acceptance(axis: Any, curves: dict[str, Report]) -> None:
    start = 0
    for stage, curve in curves.items():
        if curve["acceptance"]:
            steps, tokens, _ = zip(*curve["acceptance"], strict=True)
            axis.plot([start + step for step in steps], tokens, marker="o", label=stage)
        if stage == "fp32":
            start = curve["losses"][-1][0]
    axis.set(title="Held out, chain of 4", xlabel="updates", ylabel="tokens per verify")
    axis.legend(frameon=False)


def _depths(axis: Any, report: Report) -> None:
    rows = {"fp32": report["parent"]} | report["exports"]
    for name, row in rows.items():
        axis.plot(
            range(1, len(row["by_depth"]) + 1),
            row["by_depth"],
            marker="o",
            label=f"{name}: {row['tokens_per_verify']:.2f} tokens per verify",
        )
    axis.set(title="Held out, acceptance by depth", xlabel="drafted token", ylim=(0, 1))
    axis.legend(frameon=False)
