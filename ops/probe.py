"""The probe daemon: reads the devices each second, tells the edge how to weigh them, and alerts.

`python -m ops.probe`, a child of the supervisor. Nothing depends on it: while it is away the edge
goes by its policy alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mirror_sd import logs, telemetry
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir, from_run_dir
from ops import gauges
from ops.alerting import Alert, AlertBook, observe
from ops.class_split import ClassSplit
from ops.degradation import DegradationLadder
from ops.device_weights import DeviceWeights, Weights
from ops.edge_client import EdgeClient, EdgeError
from ops.first_workers import FirstWorkers
from ops.readers import service, workers
from ops.readers.gpus import Gpus
from ops.readers.host import Host
from ops.readings import ClassReading, DeviceReading, StackReading
from ops.webhook import Webhook
from ops.weight_document import weight_document

_log = logging.getLogger(__name__)

# A scrape costs its gateway some milliseconds.
_SCRAPE_EVERY_S = 2.0


class Probe:
    """`run_once` once a second: read, decide, tell, alert. It raises nothing for what it cannot
    read or reach: then it says nothing to the edge, which forgets it in 5 s."""

    def __init__(
        self,
        config: Config,
        edge: EdgeClient,
        *,
        host: Host,
        gpus: Gpus,
        webhook: Webhook | None,
        source: str,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._edge = edge
        self._host = host
        self._gpus = gpus
        self._webhook = webhook
        self._source = source
        self._clock = clock
        self._unix_clock = unix_clock
        self._classes = tuple(str(name) for name in config.pools)
        self._real = {str(n) for n, pool in config.pools.items() if pool.engine != "emulated"}
        self._weights = DeviceWeights(self._classes, config.probe)
        is_split_measured = config.scheduler.split == "measured"
        self._split = ClassSplit(self._classes) if is_split_measured else None
        self._ladder = DegradationLadder(config.probe.inter_token_p99_ms / 1000)
        self._alerts = AlertBook()
        self._first_workers = FirstWorkers()
        self._service = service.ServiceWindow()
        self._next_scrape = 0.0
        self._accepted_at = clock()
        self._troubles: dict[str, str] = {}
        self._causes: Mapping[str, tuple[str, ...]] = {}

    def run_once(self) -> None:
        now = self._clock()
        devices, state = self._read_devices(), self._read_state()
        self._scrape(now)
        classes = {} if state is None else self._read_classes(state, devices)
        reading = StackReading(now, classes, self._service.reading(now))
        if state is not None:
            weights = self._weights.update(now, classes)
            self._note(weights)
            self._climb_or_descend(now, reading)
            self._publish(weights, reading, state)
            gauges.show_weights(weights, classes)
        self._alert(now, reading)
        gauges.show_service(reading.service, self._ladder.level, self._alerts.firing())

    def _read_devices(self) -> dict[str, DeviceReading]:
        devices = {}
        # This machine's sensors say nothing of a device that is pretended.
        if "cpu" in self._real:
            devices["cpu"] = self._host.read()
        if "gpu" in self._real:
            devices["gpu"] = self._gpus.read()
        return devices

    def _read_state(self) -> Mapping[str, Any] | None:
        try:
            state = self._edge.state()
        except EdgeError as error:
            self._count_trouble("state", error)
            return None
        self._trouble("state", "")
        return state

    def _read_classes(
        self, state: Mapping[str, Any], devices: Mapping[str, DeviceReading]
    ) -> dict[str, ClassReading]:
        broker = self._config.broker
        patience_s = broker.heartbeat_ms * broker.missed_heartbeats / 1000
        return workers.read(state, self._classes, patience_s, devices)

    def _scrape(self, now: float) -> None:
        if now < self._next_scrape:
            return
        self._next_scrape = now + _SCRAPE_EVERY_S
        try:
            self._service.add(now, service.parse(self._edge.metrics()))
        except (EdgeError, ValueError) as error:
            self._count_trouble("metrics", error)
        else:
            self._trouble("metrics", "")

    def _climb_or_descend(self, now: float, reading: StackReading) -> None:
        step = self._ladder.update(now, reading.service, reading.queue_pressure)
        if step is None:
            return
        direction = "up" if step.after > step.before else "down"
        telemetry.PROBE_DEGRADE_STEPS.labels(direction).inc()
        _log.warning("degradation goes from %d to %d: %s", step.before, step.after, step.reason)

    def _publish(self, weights: Weights, reading: StackReading, state: Mapping[str, Any]) -> None:
        result = "accepted"
        splits = None
        if self._split is not None:
            traffic = reading.service.traffic
            splits = self._split.update(reading.at, state, traffic, weights.health)
        try:
            document = weight_document(
                self._unix_clock(), weights, reading.classes, self._ladder.level, splits
            )
            self._edge.put_weights(document)
        except (EdgeError, ValueError) as error:
            is_heard = isinstance(error, ValueError) or error.is_refusal
            result = "refused" if is_heard else "unreachable"
            self._trouble("weights", str(error))
        else:
            self._accepted_at = reading.at
            self._trouble("weights", "")
        telemetry.PROBE_DOCUMENTS.labels(result).inc()

    def _alert(self, now: float, reading: StackReading) -> None:
        stale_s = now - self._accepted_at
        awaited = self._first_workers.awaited(now, reading.classes)
        seen = observe(reading, self._config.probe, self._ladder.level, stale_s, awaited)
        for alert in self._alerts.update(now, seen):
            self._tell(alert)

    def close(self) -> None:
        """Resolve what fires, at a clean stop; it waits for nothing."""
        for alert in self._alerts.close():
            self._tell(alert)

    def _tell(self, alert: Alert) -> None:
        _log.warning("alert %s %s: %s", alert.name, alert.state, alert.summary)
        if self._webhook is not None:
            self._webhook.send(alert.to_json(self._unix_clock(), self._source))

    def _note(self, weights: Weights) -> None:
        """Log what changed; a factor on its way is no news."""
        for name in self._classes:
            causes = weights.causes.get(name, ())
            if causes != self._causes.get(name, ()):
                why = ", ".join(causes) or "nothing holds it back"
                factor = weights.factors[name]
                _log.info("class %s has factor %.2f: %s", name, factor, why)
        self._causes = weights.causes

    def _count_trouble(self, source: str, error: Exception) -> None:
        telemetry.PROBE_READ_ERRORS.labels(source).inc()
        self._trouble(source, str(error))

    def _trouble(self, source: str, text: str) -> None:
        """Log the first of a row of failures, and their end; an empty text is none."""
        before = self._troubles.get(source, "")
        self._troubles[source] = text
        if text and not before:
            _log.warning("%s: %s", source, text)
        elif before and not text:
            _log.info("%s: well again", source)


def build(config: Config, run: RunDir) -> tuple[Probe, Webhook | None]:
    """The probe of a stack."""
    server = config.server
    edge = EdgeClient(
        server.reachable_host, server.port, server.effective_admin_port, run.admin_token
    )
    url = config.probe.webhook
    webhook = Webhook(url) if url is not None else None
    source = f"{server.host}:{server.port}"
    probe = Probe(config, edge, host=Host(), gpus=Gpus(), webhook=webhook, source=source)
    return probe, webhook


def main() -> int:
    """The process's entry; the configuration comes from the run directory."""
    try:
        logs.configure("probe")
        config, run = from_run_dir()
        probe, webhook = build(config, run)
    except SetupError as error:
        _log.error("the probe cannot start: %s", error.message)
        return os.EX_CONFIG
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if webhook is not None:
        webhook.start()
    next_at = time.monotonic()
    try:
        with suppress(KeyboardInterrupt):
            while True:
                probe.run_once()
                # A reading that took long is not made up for by two at once.
                next_at = max(next_at + config.probe.interval_s, time.monotonic())
                time.sleep(max(next_at - time.monotonic(), 0.0))
    finally:
        probe.close()
        if webhook is not None:
            webhook.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
