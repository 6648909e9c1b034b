"""What the runs of `bench decode` come to: speed-ups, means over the turns, the best of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OFF, AUTO = "off", "auto"

Row = dict[str, Any]

_MEANS = {
    "tok_s": 1,
    "decode_tok_s": 1,
    "ms_per_token": 3,
    "accepted_per_verify": 3,
    "acceptance": 3,
    "draft_ms": 3,
    "verify_ms": 3,
}


def compare(rows: Sequence[Row]) -> None:
    """Take the tokens out of the rows and put in what they tell: `identical_to_plain`, against the
    first run without drafts in that precision, and `speedup` and `decode_speedup` over that of the
    same turn, for each kind of near-duplicate too. None where nothing ran without drafts."""
    plain: dict[str, Any] = {}
    base: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row.get("drafter") == OFF:
            plain.setdefault(row["precision"], row["answers"])
            base[row["precision"], row["round"]] = row
    for row in rows:
        answers, expected = row.pop("answers"), plain.get(row["precision"])
        row["identical_to_plain"] = None if expected is None else answers == expected
        off = base.get((row["precision"], row["round"]), {})
        _add_speedups(row, off)
        for kind, figures in row.get("kinds", {}).items():
            _add_speedups(figures, off.get("kinds", {}).get(kind, {}))


def _add_speedups(figures: Row, off: Row) -> None:
    for name, speed in (("speedup", "tok_s"), ("decode_speedup", "decode_tok_s")):
        figures[name] = _ratio(figures[speed], off.get(speed))


def by_drafter(rows: Sequence[Row]) -> list[Row]:
    """The means of each precision and drafter over the turns."""
    found = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["precision"], row["drafter"]), []).append(row)
    for (precision, drafter), group in groups.items():
        mean = {"precision": precision, "drafter": drafter, **_mean(group)}
        if "kinds" in group[0]:
            mean["kinds"] = {
                kind: _mean([row["kinds"][kind] for row in group]) for kind in group[0]["kinds"]
            }
        found.append(mean)
    return found


def best(precision: str, rows: Sequence[Row], cells: Sequence[Row]) -> tuple[str, int]:
    """The fixed source and length of the highest mean speed; (`off`, 0) without drafts."""
    groups = _grid(precision, rows, cells)
    return max(groups, key=lambda fixed: _average([r["tok_s"] for r in groups[fixed]]) or 0.0)


def sweep(
    rows: Sequence[Row], cells: Sequence[Row], pairs: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Row]:
    """For each precision: the means of each fixed source and length (`grid`), and the best of them.
    `pairs`: speeds of `auto` and of the best, measured in turn afterwards; the ratio of each turn
    and their median."""
    found = []
    for precision in dict.fromkeys(row["precision"] for row in cells):
        groups = _grid(precision, rows, cells)
        source, length = best(precision, rows, cells)
        by_turn = [ratio for pair in pairs.get(precision, ()) if (ratio := _ratio(*pair))]
        found.append(
            {
                "precision": precision,
                "best": {"source": source, "length": length, **_mean(groups[source, length])},
                "auto_over_best": round(statistics.median(by_turn), 3) if by_turn else None,
                "by_turn": by_turn,
                "grid": [
                    {"source": source, "length": length, **_mean(group)}
                    for (source, length), group in groups.items()
                ],
            }
        )
    return found


def _grid(
    precision: str, rows: Sequence[Row], cells: Sequence[Row]
) -> dict[tuple[str, int], list[Row]]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["precision"] == precision and row["drafter"] == OFF:
            groups.setdefault((OFF, 0), []).append(row)
    for cell in cells:
        if cell["precision"] == precision:
            groups.setdefault((cell["source"], cell["length"]), []).append(cell)
    return groups


def _mean(group: Sequence[Row]) -> Row:
    """Means of what the rows measured; of speed-ups the median, which one bad turn does not move,
    and the extremes."""
    figures: Row = {
        name: None if (mean := _average([row[name] for row in group])) is None else round(mean, n)
        for name, n in _MEANS.items()
    }
    for name in ("speedup", "decode_speedup"):
        found = [row[name] for row in group if row[name] is not None]
        figures[name] = round(statistics.median(found), 3) if found else None
        figures[f"{name}_range"] = [min(found), max(found)] if found else None
    if "identical_to_plain" in group[0]:
        said = [row["identical_to_plain"] for row in group]
        figures["identical_to_plain"] = None if None in said else all(said)
    return figures


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 3) if part and whole else None
