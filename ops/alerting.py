"""Which alerts fire now. Pure: the clock is given.

An alert fires once when its condition has held for a while, and resolves once when the opposite
has: what lies between `is_bad` and `is_clear` changes nothing. The rules of
`ops/alerts/mirror-sd.yml` have the same names, for those who have a Prometheus; these need none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mirror_sd.config import ProbeConfig
from ops.readings import StackReading

_RESTARTS = 3.0
# As long as the edge goes by a document.
_STALE_S = 5.0


@dataclass(frozen=True, slots=True)
class Rule:
    """`for_s`: how long it must be bad to fire; `clear_s`: how long clear to resolve.

    `firing` and `resolved` are the sentences for people, with `{value}` and `{limit}` (each times
    `scale`, followed by `unit`) and `{subject}`.
    """

    name: str
    for_s: float
    clear_s: float
    firing: str
    resolved: str
    unit: str = ""
    scale: float = 1.0

    def shown(self, value: float) -> str:
        """The value with its unit, in about three digits."""
        scaled = value * self.scale
        digits = f"{scaled:.0f}" if scaled >= 100 else f"{round(scaled, 1):.3g}"
        return digits + self.unit


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "MirrorDraftsRejected",
            30.0,
            60.0,
            "{value} of the draft tokens are rejected, the limit is {limit}",
            "draft tokens are accepted again: {value} are rejected, the limit is {limit}",
            "%",
            100.0,
        ),
        Rule(
            "MirrorDeviceHot",
            2.0,
            10.0,
            "class {subject} is too hot: {value}, the limit is {limit}",
            "class {subject} has cooled to {value}, the limit is {limit}",
            " C",
        ),
        Rule(
            "MirrorMemoryPressure",
            5.0,
            30.0,
            "the memory of class {subject} is {value} full, the limit is {limit}",
            "the memory of class {subject} has room again: it is {value} full, "
            "the limit is {limit}",
            "%",
            100.0,
        ),
        Rule(
            "MirrorTailLatency",
            5.0,
            30.0,
            "tokens come too slowly: the p99 between two is {value}, the limit is {limit}",
            # None may come at all, which has no p99.
            "tokens no longer come too slowly, the limit is {limit}",
            " ms",
            1000.0,
        ),
        Rule(
            "MirrorDegraded",
            0.0,
            0.0,
            "service is degraded, level {value} of 3",
            "service is no longer degraded",
        ),
        Rule(
            "MirrorWorkerRestarts",
            0.0,
            60.0,
            "workers of class {subject} keep dying: {value} in 10 minutes",
            "workers of class {subject} no longer keep dying: {value} in 10 minutes",
        ),
        Rule(
            "MirrorNoWorker",
            5.0,
            5.0,
            "class {subject} has no live worker",
            "class {subject} has a live worker again",
        ),
        Rule(
            "MirrorProbeStale",
            0.0,
            5.0,
            "the edge has taken no weights from the probe for {value}, the limit is {limit}",
            "the edge takes weights from the probe again",
            " s",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Observation:
    """A value as a rule sees it; neither bad nor clear leaves an alert as it is."""

    value: float
    threshold: float
    is_bad: bool
    is_clear: bool


@dataclass(frozen=True, slots=True)
class Alert:
    """A change to tell of. `subject` is the device class, or empty where it is about the stack.

    `is_stop`: it is resolved only because the probe stops and could not tell its end later.
    """

    name: str
    subject: str
    state: Literal["firing", "resolved"]
    value: float
    threshold: float
    is_stop: bool = False

    @property
    def summary(self) -> str:
        """One sentence for people, with units."""
        rule = RULES[self.name]
        text = rule.firing if self.state == "firing" or self.is_stop else rule.resolved
        sentence = text.format(
            value=rule.shown(self.value), limit=rule.shown(self.threshold), subject=self.subject
        )
        return f"the probe stops; the last it saw: {sentence}" if self.is_stop else sentence

    def to_json(self, at: float, source: str) -> dict[str, Any]:
        """What the webhook is sent; `at` is unix time in seconds, `source` names the stack."""
        return {
            "alert": self.name,
            "class": self.subject or None,
            "state": self.state,
            "value": round(self.value, 4),
            "threshold": self.threshold,
            "summary": self.summary,
            "at": round(at, 3),
            "source": source,
        }


@dataclass(slots=True)
class _State:
    is_firing: bool = False
    since: float | None = None
    seen: Observation | None = None


class AlertBook:
    """`update` with all observations of a moment returns what began or ended firing."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], _State] = {}

    def update(
        self, now: float, observations: Mapping[tuple[str, str], Observation]
    ) -> list[Alert]:
        """Keys are (rule, subject). What is not observed keeps its state but not its progress."""
        changes = []
        for key, state in self._states.items():
            if key not in observations:
                state.since = None
        for key, observation in observations.items():
            state = self._states.setdefault(key, _State())
            state.seen = observation
            if self._changes(state, now, RULES[key[0]], observation):
                changes.append(
                    Alert(
                        *key,
                        "firing" if state.is_firing else "resolved",
                        observation.value,
                        observation.threshold,
                    )
                )
        return changes

    def close(self) -> list[Alert]:
        """Resolve all that fires: nobody would later."""
        ended = []
        for key, state in self._states.items():
            if state.is_firing and state.seen is not None:
                value, threshold = state.seen.value, state.seen.threshold
                ended.append(Alert(*key, "resolved", value, threshold, is_stop=True))
            state.is_firing = False
        return ended

    def firing(self) -> dict[str, int]:
        """How many subjects of each rule fire."""
        counts = dict.fromkeys(RULES, 0)
        for (name, _), state in self._states.items():
            counts[name] += state.is_firing
        return counts

    @staticmethod
    def _changes(state: _State, now: float, rule: Rule, seen: Observation) -> bool:
        is_towards_change = seen.is_clear if state.is_firing else seen.is_bad
        if not is_towards_change:
            state.since = None
            return False
        state.since = now if state.since is None else state.since
        if now - state.since < (rule.clear_s if state.is_firing else rule.for_s):
            return False
        state.is_firing = not state.is_firing
        state.since = None
        return True


def observe(
    reading: StackReading,
    config: ProbeConfig,
    degrade_level: int,
    stale_s: float,
    awaited: Collection[str] = (),
) -> dict[tuple[str, str], Observation]:
    """What the rules see in a reading; `stale_s`: how long the edge has taken no document;
    `awaited`: classes whose first worker may still be loading."""
    seen: dict[tuple[str, str], Observation] = {}
    service = reading.service
    if service.rejection_rate is not None:
        seen["MirrorDraftsRejected", ""] = _above(service.rejection_rate, config.rejection_rate)
    limit_s = config.inter_token_p99_ms / 1000
    if service.inter_token_p99_s is not None:
        seen["MirrorTailLatency", ""] = _above(service.inter_token_p99_s, limit_s)
    else:
        # Nothing is served, so nothing is served too slowly.
        seen["MirrorTailLatency", ""] = Observation(0.0, limit_s, False, True)
    seen["MirrorDegraded", ""] = _at_least(degrade_level, 1)
    seen["MirrorProbeStale", ""] = Observation(stale_s, _STALE_S, stale_s > _STALE_S, stale_s < 2.0)
    for name, restarts in service.worker_restarts.items():
        seen["MirrorWorkerRestarts", name] = _at_least(restarts, _RESTARTS)
    for name, item in reading.classes.items():
        seen["MirrorNoWorker", name] = Observation(
            item.workers, 1.0, item.workers == 0 and name not in awaited, item.workers > 0
        )
        heat, memory = item.device.temperature_c, item.device.memory_pressure
        if heat is not None:
            seen["MirrorDeviceHot", name] = Observation(
                heat, config.hot_c, heat >= config.hot_c, heat < config.cool_c
            )
        if memory is not None:
            seen["MirrorMemoryPressure", name] = _above(memory, config.memory_pressure)
    return seen


def _above(value: float, threshold: float) -> Observation:
    # A tenth of hysteresis, so that a value that trembles about its threshold alerts once.
    return Observation(value, threshold, value > threshold, value < threshold * 0.9)


def _at_least(value: float, threshold: float) -> Observation:
    return Observation(value, threshold, value >= threshold, value < threshold)
