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
    """`for_s`: how long it must be bad to fire; `clear_s`: how long clear to resolve."""

    name: str
    summary: str
    for_s: float
    clear_s: float


RULES = {
    rule.name: rule
    for rule in (
        Rule("MirrorDraftsRejected", "too many draft tokens are rejected", 30.0, 60.0),
        Rule("MirrorDeviceHot", "devices are too hot", 2.0, 10.0),
        Rule("MirrorMemoryPressure", "memory is nearly full", 5.0, 30.0),
        Rule("MirrorTailLatency", "tokens come too slowly", 5.0, 30.0),
        Rule("MirrorDegraded", "service is degraded", 0.0, 0.0),
        Rule("MirrorWorkerRestarts", "workers keep dying", 0.0, 60.0),
        Rule("MirrorNoWorker", "no worker lives", 5.0, 5.0),
        Rule("MirrorProbeStale", "the edge takes no weights from the probe", 0.0, 5.0),
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
    """A change to tell of. `subject` is the device class, or empty where it is about the stack."""

    name: str
    subject: str
    state: Literal["firing", "resolved"]
    value: float
    threshold: float

    @property
    def summary(self) -> str:
        """One sentence for people."""
        where = f" ({self.subject})" if self.subject else ""
        verb = "" if self.state == "firing" else "no longer: "
        text = f"{verb}{RULES[self.name].summary}{where}"
        return f"{text}: {self.value:.3g}, threshold {self.threshold:.3g}"

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
