"""A ragged batch cut into calls of a few static shapes, so that nothing is compiled after warm-up.

A call has T rows (tokens) in spans of Q queries. A span is a run of tokens of one sequence: its
keys are gathered once. Decoding and verifying take narrow spans, prompts wide ones; a batch that
mixes both becomes several calls, a sequence's tokens in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mirror_sd.backends.protocol import Int32, RaggedBatch

# Rows of the smallest product.
LEAST_ROWS = 4


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Shapes of one compiled program: T rows, and spans of Q queries."""

    rows: int
    queries: int

    @property
    def spans(self) -> int:
        """Most spans. Narrow ones may hold one row each."""
        return self.rows if self.queries == NARROW else self.rows // self.queries


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens begin..end-1 of the batch, all of sequence `sequence`."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """`tokens`: [<= bucket.rows] which tokens of the batch the rows are."""

    bucket: Bucket
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> Int32:
        return np.concatenate([np.arange(s.begin, s.end, dtype=np.int32) for s in self.spans])


NARROW = 8
WIDE = 64
BUCKETS = (
    *(Bucket(LEAST_ROWS, NARROW), Bucket(8, NARROW), Bucket(16, NARROW), Bucket(32, NARROW)),
    *(Bucket(64, NARROW), Bucket(WIDE, WIDE), Bucket(4 * WIDE, WIDE)),
)


def cut(batch: RaggedBatch, buckets: Sequence[Bucket] = BUCKETS) -> list[Call]:
    """The calls of a checked batch, to be made in this order."""
    narrow, wide = _spans(batch, any(bucket.queries == WIDE for bucket in buckets))
    calls = [_call(part, WIDE, buckets) for part in _parts(wide, WIDE, buckets)]
    return calls + [_call(part, NARROW, buckets) for part in _parts(narrow, NARROW, buckets)]


def _spans(batch: RaggedBatch, has_wide: bool) -> tuple[list[Span], list[Span]]:
    """(narrow, wide): a long run is cut into wide spans, what is left over of it into narrow ones
    if that is little."""
    narrow: list[Span] = []
    wide: list[Span] = []
    for index, (begin, end) in enumerate(pairwise(batch.sequence_offsets.tolist())):
        while has_wide and end - begin > 4 * NARROW:
            stop = min(end, begin + WIDE)
            wide.append(Span(index, begin, stop))
            begin = stop
        while begin < end:
            stop = min(end, begin + NARROW)
            narrow.append(Span(index, begin, stop))
            begin = stop
    return narrow, wide


def _parts(spans: list[Span], queries: int, buckets: Sequence[Bucket]) -> Iterator[list[Span]]:
    """Runs of spans that fit the largest bucket."""
    if not spans:
        return
    of_kind = [bucket for bucket in buckets if bucket.queries == queries]
    most_rows = max(bucket.rows for bucket in of_kind)
    most_spans = max(bucket.spans for bucket in of_kind)
    part: list[Span] = []
    rows = 0
    for span in spans:
        count = span.end - span.begin
        if part and (len(part) == most_spans or rows + count > most_rows):
            yield part
            part, rows = [], 0
        part.append(span)
        rows += count
    if part:
        yield part


def _call(spans: list[Span], queries: int, buckets: Sequence[Bucket]) -> Call:
    rows = sum(span.end - span.begin for span in spans)
    fitting = [
        bucket
        for bucket in buckets
        if bucket.queries == queries and bucket.rows >= rows and bucket.spans >= len(spans)
    ]
    return Call(min(fitting), tuple(spans))
