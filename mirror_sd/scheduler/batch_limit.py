"""How many sequences a worker is given at once, from what it makes of them.

The limit begins at the worker's slots. Where the time between tokens breaks its target the limit
shrinks by a quarter, and where the target holds and the limit is in use it grows by a sixteenth of
the slots: additive increase, multiplicative decrease. Both are tried, not trusted: growth that
brings no more tokens a second, and shrinking that makes none come sooner (a device whose step
costs the same whatever its batch), are undone and not tried again for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHRINK = 0.75
_GROWTHS = 16
# What a trial must bring: growth, tokens a second by this part of what it added to the batch;
# shrinking, tokens that come sooner by this part.
_GAIN = 0.25
_RELIEF = 0.05
# Intervals are judged by the window, because one holds a few steps only on a slow device; the first
# window after a change is not judged, nor any for a while after a change was undone.
_WINDOW_S = 2.0
_SETTLE = 1
_REST_S = 15.0


@dataclass(frozen=True, slots=True)
class Interval:
    """What a worker did between two heartbeats: `running` sequences (on average), `tokens` in
    `seconds`."""

    running: float
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def inter_token_s(self) -> float:
        """Of one sequence, on average."""
        return self.seconds * self.running / self.tokens

    def and_then(self, other: Interval) -> Interval:
        seconds = self.seconds + other.seconds
        running = (self.running * self.seconds + other.running * other.seconds) / seconds
        return Interval(running, self.tokens + other.tokens, seconds)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change of the limit, to be judged by what was before."""

    limit: int
    before: Interval


class BatchLimit:
    """`limit` is between 1 and `slots`."""

    def __init__(self, slots: int, target_s: float) -> None:
        self.limit = slots
        self._slots = slots
        self._target_s = target_s
        self._window: Interval | None = None
        self._trial: _Trial | None = None
        self._seen = 0
        self._rest_s = 0.0

    def observe(self, interval: Interval) -> None:
        """Take note of an interval; one without tokens says nothing."""
        if interval.tokens < 1 or interval.running < 1 or interval.seconds <= 0:
            self._window = None
            return
        window = interval if self._window is None else self._window.and_then(interval)
        is_whole = window.seconds >= _WINDOW_S
        self._window = None if is_whole else window
        if is_whole:
            self._judge_window(window)

    def _judge_window(self, interval: Interval) -> None:
        self._rest_s = max(0.0, self._rest_s - interval.seconds)
        if self._trial is not None:
            self._judge(self._trial, interval)
        elif interval.running > 1 and interval.inter_token_s > self._target_s:
            self._try(int(min(self.limit, interval.running) * _SHRINK), interval)
        elif interval.running > self.limit - 1:
            self._try(self.limit + max(1, self._slots // _GROWTHS), interval)

    def _try(self, limit: int, interval: Interval) -> None:
        limit = max(1, min(self._slots, limit))
        if limit != self.limit and not self._rest_s:
            self._trial = _Trial(self.limit, interval)
            self.limit = limit
            self._seen = 0

    def _judge(self, trial: _Trial, now: Interval) -> None:
        self._seen += 1
        if self._seen <= _SETTLE:
            return
        if self.limit > trial.limit:
            added = now.running / trial.before.running - 1
            pays = now.rate > trial.before.rate * (1 + _GAIN * added)
            # It may be that too little waits to fill the new limit: then nothing was tried.
            is_filled = now.running > trial.limit
            is_undone = is_filled and not (pays and now.inter_token_s <= self._target_s)
        else:
            is_undone = now.inter_token_s > trial.before.inter_token_s * (1 - _RELIEF)
        self._trial = None
        if is_undone:
            self.limit = trial.limit
            self._rest_s = _REST_S
