"""What the runs of `bench decode` come to: speed-ups, means over the turns, the best of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
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
    for (precision, drafter), group in _groups(rows, ("precision", "drafter")).items():
        mean = {"precision": precision, "drafter": drafter, **_mean(group)}
        if "kinds" in group[0]:
            mean["kinds"] = {
                kind: _mean([row["kinds"][kind] for row in group]) for kind in group[0]["kinds"]
            }
        found.append(mean)
    return found


def sweep(rows: Sequence[Row], cells: Sequence[Row]) -> list[Row]:
    """For each precision: the means of each fixed source and length (`grid`), the best of them and
    of no draft at all, and the speed of `auto` by that of the best, in each turn and their median.
    """
    plain = [row | {"source": OFF, "length": 0} for row in rows if row["drafter"] == OFF]
    found = []
    for (precision,), own in _groups([*plain, *cells], ("precision",)).items():
        groups = _groups(own, ("source", "length"))
        speeds = {fixed: [row["tok_s"] for row in group] for fixed, group in groups.items()}
        best = max(speeds, key=lambda fixed: _average(speeds[fixed]) or 0.0)
        is_auto = {"precision": precision, "drafter": AUTO}
        auto = [row["tok_s"] for row in rows if is_auto.items() <= row.items()]
        by_round = [_ratio(a, b) for a, b in zip(auto, speeds[best], strict=False)]
        known = [ratio for ratio in by_round if ratio is not None]
        found.append(
            {
                "precision": precision,
                "best": {"source": best[0], "length": best[1], **_mean(groups[best])},
                "auto_over_best": round(statistics.median(known), 3) if known else None,
                "by_round": by_round,
                "grid": [
                    {"source": source, "length": length, **_mean(group)}
                    for (source, length), group in groups.items()
                ],
            }
        )
    return found


def _groups(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
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
