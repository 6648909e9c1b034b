"""When the target verified and when the drafter drafted: how much of the one the other covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mirror_sd import drawing
from mirror_sd.drafting.frames import Proposal

Span = tuple[float, float]


@dataclass(slots=True)
class Timeline:
    """Of one run, in seconds of the machine's monotonic clock.

    `verifies`: forwards of the target that verified. `drafted`: of each position of the sequence
    that runs, (token, forward of the drafter that gave it). `useful`, `other`: forwards of the
    drafter that gave a token of the answer before the target had it, and those that did not.
    """

    verifies: list[Span] = field(default_factory=list)
    useful: set[Span] = field(default_factory=set)
    other: set[Span] = field(default_factory=set)
    drafted: dict[int, list[tuple[int, Span]]] = field(default_factory=dict)

    def note(self, proposal: Proposal) -> None:
        for line in proposal.lines:
            for offset, (token, span) in enumerate(zip(line.tokens, line.times, strict=False)):
                if span[1] > 0.0:
                    place = proposal.base + line.at + offset
                    self.drafted.setdefault(place, []).append((token, span))

    def close(self, tokens: Sequence[int], known_at: Sequence[float]) -> None:
        """The sequence ended: `tokens` with its prompt, and when each was known."""
        for place, drafts in self.drafted.items():
            for token, span in drafts:
                is_right = place < len(tokens) and tokens[place] == token
                if is_right and span[1] <= known_at[place]:
                    self.useful.add(span)
                else:
                    self.other.add(span)
        self.other -= self.useful
        self.drafted.clear()

    @property
    def verify_s(self) -> float:
        """Time of all verifies."""
        return sum(end - begin for begin, end in self.verifies)


def covered_share(lines: Sequence[Timeline]) -> float:
    """Of the time of verifies, that during which useful drafting went on."""
    total = sum(line.verify_s for line in lines)
    shared = sum(overlap(line.verifies, line.useful) for line in lines)
    return shared / total if total else 0.0


def overlap(one: Iterable[Span], other: Iterable[Span]) -> float:
    """Length of what both cover. The spans of each do not overlap among themselves."""
    first, second = sorted(one), sorted(other)
    total, index = 0.0, 0
    for begin, end in first:
        while index and second[index - 1][1] > begin:
            index -= 1
        while index < len(second) and second[index][0] < end:
            total += max(min(end, second[index][1]) - max(begin, second[index][0]), 0.0)
            index += 1
    return total


def draw(timeline: Timeline, out: Path, *, title: str, window_s: float = 0.6) -> None:
    """A stretch of the run, from its middle. Raises `SetupError`, `ConfigError`."""
    pyplot = drawing.pyplot()
    figure, axis = pyplot.subplots(figsize=(11, 2.8), layout="constrained")
    verifies = sorted(timeline.verifies)
    begin = verifies[len(verifies) // 2][0] if verifies else 0.0
    rows = (
        (1, timeline.verifies, drawing.OURS_COLOUR, "verifying"),
        (0, timeline.useful, "#3a7d44", "drafting, of use"),
        (0, timeline.other, drawing.OTHER_COLOUR, "drafting, in vain"),
    )
    for height, spans, colour, label in rows:
        shown = [
            (1e3 * (start - begin), 1e3 * (end - start))
            for start, end in sorted(spans)
            if end >= begin and start <= begin + window_s
        ]
        axis.broken_barh(
            shown, (height - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.5, label=label
        )
    axis.set_yticks([0, 1], ["drafter", "target"])
    axis.set_xlim(0, 1e3 * window_s)
    axis.set_xlabel("milliseconds")
    axis.set_title(title)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=3, frameon=False)
    drawing.tidy(axis)
    drawing.save(pyplot, figure, out)
