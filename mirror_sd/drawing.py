"""What pictures of benchmarks and training runs have in common."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirror_sd.errors import ConfigError, SetupError

OURS_COLOUR, OTHER_COLOUR = "#c8553d", "#8d99ae"


def pyplot() -> Any:
    """matplotlib.pyplot without a display. Raises `SetupError` where it is missing."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SetupError(
            "drawing needs matplotlib, which is missing: pip install -e '.[bench]' in the clone"
        ) from error


def save(pyplot: Any, figure: Any, out: Path) -> None:
    """Write a PNG and let go of the figure. Raises `ConfigError`."""
    try:
        figure.savefig(out, dpi=150, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def bars(
    axis: Any,
    names: Sequence[str],
    values: Sequence[float],
    *,
    colours: Sequence[str],
    labels: Sequence[str] | None = None,
    errors: Sequence[float] | None = None,
) -> None:
    """Horizontal bars, the first at the bottom, with what they come to (or `labels`) beside them;
    `errors` are half the length of whiskers."""
    whiskers = None if errors is None else list(errors)
    drawn = axis.barh(list(names), list(values), color=list(colours), xerr=whiskers)
    axis.bar_label(drawn, labels=labels, fmt="%.0f", padding=3)
    axis.margins(x=0.15)
    tidy(axis)


def tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
