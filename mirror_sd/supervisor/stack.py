"""One stack: its processes started together, watched, and stopped from the outside in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mirror_sd.child import CANNOT_START, Child, ChildSpec
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import live_gauges, processes, run_directory
from mirror_sd.supervisor.edge import Nginx, reason_in
from mirror_sd.supervisor.log_tail import LogTail, last_lines
from mirror_sd.supervisor.readiness import ReadinessCheck

_log = logging.getLogger(__name__)

_TICK_S = 0.2
_STOP_S = 2.0
_SWEEP_S = 2.0


class Stack:
    """`start`, `wait_until_ready`, `watch`, `end`, all on one thread; `stop` from a signal handler.

    `wait` sleeps for some seconds at most, less when a signal comes.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        nginx: Nginx,
        *,
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._run = run
        self._wait = wait
        self._clock = clock
        self._signals = 0
        self._next_sweep = 0.0
        self._tail = LogTail(run_directory.logs(run))
        self._edge = Child(processes.nginx_spec(run, nginx))
        self._gateways = [
            Child(processes.gateway_spec(config, run, index))
            for index in range(config.server.gateways)
        ]
        self._pools = [Child(processes.pool_spec(run, name)) for name in config.pools]
        self._broker = Child(processes.broker_spec(run))
        # Workers go on without them: only settings that cannot work fail a start.
        self._drafters = {
            run.drafter_ready(name, index): Child(processes.drafter_spec(run, name, index))
            for name, drafter in config.drafters.items()
            if config.speculation.asks_drafters
            for index in range(drafter.workers)
        }
        # None of the others needs it, so it can neither fail a start nor hold up an end.
        self._probe = [Child(processes.probe_spec(run))] if config.probe.enabled else []

    @property
    def is_stopping(self) -> bool:
        return self._signals > 0

    def start(self) -> None:
        """Start every process but nginx; raises `SetupError` where a command cannot be executed."""
        # Workers first: loading the model takes longest.
        for child in (*self._pools, *self._drafters.values(), self._broker, *self._gateways):
            _start(child)

    def wait_until_ready(self, model: str) -> None:
        """Return when each class has a worker, a generation has passed through all processes and
        the drafters have started, or `stop` was called.

        Raises `SetupError` when a process dies or `server.start_timeout_s` is over; not for a
        drafter, unless its settings cannot work.
        """
        server = self._config.server
        gateway = self._run.gateway_socket(0)
        host, classes = server.reachable_host, [str(name) for name in self._config.pools]
        check = ReadinessCheck(host, server.port, model, gateway, classes)
        deadline = self._clock() + server.start_timeout_s
        try:
            while not (check.is_ready and self._have_drafters_begun()) and not self.is_stopping:
                self._fail_on_death()
                self._echo_errors()
                if self._edge.pid is None and self._has_gateways():
                    for child in (self._edge, *self._probe):
                        _start(child)
                    check.start()
                if self._clock() >= deadline:
                    if check.is_ready:
                        _log.warning("a drafter has not started yet; going on without it")
                        break
                    raise SetupError(self._not_ready(check.last_answer))
                self._wait(_TICK_S / 4)
        finally:
            check.stop()

    def watch(self) -> None:
        """Keep every process alive until `stop`."""
        while not self.is_stopping:
            self.run_once()
            self._wait(_TICK_S)

    def run_once(self) -> None:
        """Look after each process once."""
        now = self._clock()
        for child in (*self._children(), *self._drafters.values(), *self._probe):
            death = child.tend()
            if death is not None:
                _log.error("%s; starting it again in %.1f s", death, death.delay_s)
                self._next_sweep = now
        self._echo_errors()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            live_gauges.forget_dead(self._run.metrics)

    def stop(self) -> None:
        """Ask for the end; a second call makes it immediate. Safe in a signal handler."""
        self._signals += 1

    def end(self, *, at_once: bool = False) -> None:
        """Stop from the outside in, so that running answers can finish; leave no process."""
        try:
            if not at_once:
                self._drain()
        finally:
            for child in (*self._probe, *self._children(), *self._drafters.values()):
                child.kill()

    def _drain(self) -> None:
        for child in self._probe:
            child.stop()
        self._edge.stop()
        self._wait_gone([self._edge], self._config.server.drain_s)
        if self._edge.pid is not None:
            _log.warning("answers still run after the grace of server.drain_s: cut off")
            # nginx, still there, ends each broken stream with an error event.
            for gateway in self._gateways:
                gateway.kill()
            self._wait_gone([self._edge], _STOP_S)
        for stage in ([*self._gateways, *self._pools], [self._broker, *self._drafters.values()]):
            for child in stage:
                child.stop()
            self._wait_or_warn(stage)
        # It was told first, and may still be resolving its alerts at a slow webhook.
        self._wait_or_warn(self._probe)

    def _wait_or_warn(self, children: Sequence[Child]) -> None:
        for child in self._wait_gone(children, _STOP_S):
            _log.warning("%s did not end in %g s: killed", child.spec.name, _STOP_S)

    def _wait_gone(self, children: Sequence[Child], timeout_s: float) -> list[Child]:
        """Wait for these to end, for no other signal and no longer; returns those still there."""
        deadline = self._clock() + timeout_s
        while self._signals < 2 and self._clock() < deadline:
            for child in children:
                child.reap()
            if all(child.pid is None for child in children):
                break
            self._wait(_TICK_S / 10)
        return [child for child in children if child.pid is not None]

    def _children(self) -> tuple[Child, ...]:
        """Those that clients depend on."""
        return (self._edge, *self._gateways, *self._pools, self._broker)

    def _has_gateways(self) -> bool:
        indexes = range(self._config.server.gateways)
        return all(self._run.gateway_socket(index).exists() for index in indexes)

    def _have_drafters_begun(self) -> bool:
        """Whether each listens, or has died once for a reason that may pass."""
        return all(ready.exists() or child.restarts for ready, child in self._drafters.items())

    def _fail_on_death(self) -> None:
        for child in self._drafters.values():
            death = child.tend()
            if death is not None and death.status == CANNOT_START:
                self._echo_errors()
                raise SetupError(f"{death.name} cannot start, for the reason above")
        for child in self._children():
            death = child.reap()
            if death is not None and death.status == CANNOT_START:
                self._echo_errors()
                raise SetupError(f"{death.name} cannot start, for the reason above")
            if death is not None and child is self._edge:
                reason = reason_in(processes.log_of(child.spec))
                raise SetupError(f"nginx does not start: {reason}")
            if death is not None:
                raise SetupError(f"{death}{_quote(child.spec, 12)}")

    def _not_ready(self, last_answer: str) -> str:
        timeout_s = self._config.server.start_timeout_s
        quotes = "".join(_quote(child.spec, 4) for child in self._children())
        return f"not ready after {timeout_s:g} s; last answer: {last_answer}{quotes}"

    def _echo_errors(self) -> None:
        for name, line in self._tail.new_errors():
            _log.error("%s: %s", name, line)


def _start(child: Child) -> None:
    try:
        child.start()
    except OSError as error:
        raise SetupError(f"cannot start {child.spec.name}: {error}") from error


def _quote(spec: ChildSpec, count: int) -> str:
    lines = last_lines(processes.log_of(spec), count)
    return "".join(f"\n  {spec.name}: {line}" for line in lines)
