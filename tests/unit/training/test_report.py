"""The picture of a training run, of whatever stages the run had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mirror_sd.training import report as pictures


def _row(tokens: float) -> dict[str, Any]:
    return {"tokens_per_verify": tokens, "by_depth": [0.5]}


@pytest.mark.parametrize(
    ("fitted", "curves"),
    [
        ("both stages", [(1, [1.4]), (2, [1.2, 1.3])]),
        ("one update", [(1, [1.4])]),
        ("the precision as the fp32 head is, by --mixed-steps 0", []),
    ],
)
def test_every_plan_has_a_picture(fitted: str, curves: list[Any], tmp_path: Path) -> None:
    measured = [(curves[-1][0], 1.5, 0.4)] if curves else []
    report = {
        "model": "tiny",
        "plan": {"seed": 0},
        "parent": _row(1.6),
        "exports": {"int8": _row(1.5)},
        "curves": {
            "fp32": {"losses": [(1, [5.0])], "acceptance": [(1, 1.2, 0.2)]},
            "int8": {"losses": curves, "acceptance": measured},
        },
    }
    pictures.draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG"), fitted
