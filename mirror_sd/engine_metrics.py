"""The engine's metrics with their label bound once."""

from __future__ import annotations

from mirror_sd import telemetry
from mirror_sd.speculative.decode_loop import DecodeLoop
from mirror_sd.speculative.draft_report import DraftReport
from mirror_sd.speculative.remote_drafting import RemoteCounts


class EngineMetrics:
    """Of one engine."""

    def __init__(self, device_class: str) -> None:
        self.hints = telemetry.DRAFT_HINTS.labels(device_class)
        self.prefix_hits = telemetry.PREFIX_HITS.labels(device_class)
        self._sequences = telemetry.BATCH_SEQUENCES.labels(device_class)
        self._tokens = telemetry.BATCH_TOKENS.labels(device_class)
        self._step = telemetry.STEP_SECONDS.labels(device_class)
        self._draft_s = telemetry.DRAFT_SECONDS.labels(device_class)
        self._verify_s = telemetry.VERIFY_SECONDS.labels(device_class)
        self._class = device_class
        self._drafted = telemetry.DRAFTED.labels(device_class)
        self._accepted = telemetry.ACCEPTED.labels(device_class)
        self._repetitions = telemetry.DRAFT_REPETITIONS.labels(device_class)
        self._accepted_length = telemetry.ACCEPTED_LENGTH.labels(device_class)
        self._preemptions = telemetry.PREEMPTIONS.labels(device_class)

    def record(self, loop: DecodeLoop, seconds: float) -> None:
        report = loop.report
        self._sequences.observe(report.sequences)
        self._tokens.observe(report.tokens)
        self._step.observe(seconds)
        # Each touch of a metric costs a microsecond or more: leave out those that add nothing.
        if report.preempted:
            self._preemptions.inc(report.preempted)
        self._record_drafts(report.drafts, report.forward_s)

    def _record_drafts(self, drafts: DraftReport, forward_s: float) -> None:
        if drafts.seconds:
            self._draft_s.inc(drafts.seconds)
        if not drafts.by_source:
            return
        self._verify_s.inc(forward_s)
        for source, (drafted, accepted) in drafts.by_source.items():
            self._drafted.inc(drafted)
            telemetry.SOURCE_DRAFTED.labels(self._class, source).inc(drafted)
            if accepted:
                self._accepted.inc(accepted)
                telemetry.SOURCE_ACCEPTED.labels(self._class, source).inc(accepted)
        for length in drafts.accepted_lengths:
            self._accepted_length.observe(length)
        if drafts.repetitions:
            self._repetitions.inc(drafts.repetitions)

    def head_failed(self) -> None:
        """The draft head was switched off."""
        telemetry.DRAFT_HEAD.labels(self._class).set(0)
        telemetry.DRAFT_HEAD_FAILURES.labels(self._class).inc()

    def record_remote(self, counts: RemoteCounts) -> None:
        """What drafters on other devices cost and brought since the last time."""
        label = self._class
        for metric, value in (
            (telemetry.REMOTE_WAIT_SECONDS, counts.waited_s),
            (telemetry.REMOTE_LATE, counts.late),
            (telemetry.REMOTE_STALE, counts.stale),
            (telemetry.REMOTE_LOST, counts.lost),
        ):
            if value:
                metric.labels(label).inc(value)
        if counts.drafters is not None:
            telemetry.REMOTE_DRAFTERS.labels(label).set(counts.drafters)
