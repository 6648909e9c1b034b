"""One worker process: the engine's loop on the main thread, the broker's frames on another.

    broker --Submit, DraftHint, Cancel, Reset, Drain--> Link.inbox --> engine.add, hint, abort
    broker <--Chunk, Finished, Failed------------------ Link.send  <-- engine.step

Started by a pool as `python -m workers.worker --class cpu --index 0`. Exit status: 0 drained,
`CANNOT_START` a setup error told in one sentence, `ENGINE_BROKE` the engine raised in a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from mirror_sd import logs
from mirror_sd.child import CANNOT_START, die_with_parent
from mirror_sd.errors import (
    CapacityError,
    InternalError,
    MirrorError,
    SetupError,
)
from mirror_sd.messages import (
    Cancel,
    Chunk,
    DraftHint,
    Drain,
    Failed,
    Heartbeat,
    Reset,
    Submit,
)
from mirror_sd.run_dir import from_run_dir
from workers import engines
from workers.link import Inbound, Link, Lost, Outbound, Stop
from workers.report import Engine, Gauges, refusal, registration

_log = logging.getLogger(__name__)

ENGINE_BROKE = 70

# Frames kept for a broker that takes none; past it the sequences are given up, as after a Reset.
_BACKLOG_LIMIT = 20_000
_IDLE_S = 1.0
# Between writes of the gauges while busy: each costs as much as sending a step's outputs.
_PUBLISH_S = 0.25
_FLUSH_S = 2.0


class Worker:
    """Runs the engine for the broker at `endpoint` until it is drained."""

    def __init__(
        self,
        engine: Engine,
        endpoint: str,
        *,
        worker_id: str,
        device_class: str,
        pid: int,
        heartbeat_s: float,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._device_class = device_class
        self._drain_s = drain_s
        self._clock = clock
        self._live: set[str] = set()
        self._stop_at: float | None = None
        self._is_draining = False
        self._is_checked = True
        self._stats = engine.stats()
        self._publish_at = clock()
        self._gauges = Gauges(device_class, engine.capabilities)
        self.link = Link(
            endpoint, registration(engine, worker_id, device_class, pid), heartbeat_s, self._load
        )

    def run(self) -> int:
        """Serve until `Stop` and the end of what runs; the exit status of the process."""
        self.link.start()
        self._publish()
        status = 0
        try:
            while not self._is_done():
                self.run_once()
        except Exception:  # noqa: BLE001 - logged, and the process ends
            _log.exception("this worker cannot go on; its sequences go back to the broker")
            status = ENGINE_BROKE
            # First, so that the broker does not give them to this worker again.
            self._start_drain()
        self._give_back_all()
        self.link.close(_FLUSH_S)
        return status

    def run_once(self) -> None:
        """Take what has arrived, make one step, send what it gave."""
        for message in self._arrived():
            self._take(message)
        if self._engine.has_work:
            self._send(self._engine.step())
            self._is_checked = False
        self._publish()

    def stop(self) -> None:
        """Ask for a drain; safe in a signal handler."""
        self.link.inbox.put(Stop())

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._engine.has_work or self._clock() >= self._stop_at

    def _arrived(self) -> list[Inbound]:
        inbox = self.link.inbox
        arrived: list[Inbound] = []
        if not self._engine.has_work:
            try:
                arrived.append(inbox.get(timeout=_IDLE_S))
            except queue.Empty:
                self._check_idle_engine()
                self._engine.idle()
                return arrived
        try:
            while True:
                arrived.append(inbox.get_nowait())
        except queue.Empty:
            return arrived

    def _check_idle_engine(self) -> None:
        # Once after each busy time, when nobody waits: a leaked KV block ends the worker here.
        if not self._is_checked:
            self._engine.check_integrity()
            self._is_checked = True

    def _take(self, message: Inbound) -> None:
        match message:
            case Submit():
                self._add(message)
            case Cancel(request_id=request_id):
                self._live.discard(request_id)
                self._engine.abort(request_id)
            case DraftHint():
                self._engine.hint(message.request_id, message.index, message.tokens)
            case Reset():
                self._reset("the broker does not know this worker")
            case Drain():
                self._start_drain()
            case Stop():
                self._start_drain()
                # A second signal ends the drain.
                now = self._clock()
                self._stop_at = now + self._drain_s if self._stop_at is None else now
            case Lost(reason=reason):
                raise InternalError(f"lost the connection to the broker: {reason}")

    def _add(self, submit: Submit) -> None:
        if submit.request_id in self._live:
            _log.debug("request %s is already here", submit.request_id)
            return
        try:
            if self._is_draining:
                raise CapacityError("this worker is draining")
            self._engine.add(submit)
        except MirrorError as error:
            _log.info("request %s refused: %s", submit.request_id, error.message)
            self.link.send([refusal(submit.request_id, error)])
        else:
            self._live.add(submit.request_id)

    def _send(self, outputs: Sequence[Outbound]) -> None:
        for output in outputs:
            if not isinstance(output, Chunk):
                self._live.discard(output.request_id)
        if outputs:
            self.link.send(outputs)
        if self.link.backlog > _BACKLOG_LIMIT:
            self._reset("the broker takes no frames")

    def _start_drain(self) -> None:
        if not self._is_draining:
            _log.info("draining %d sequences", len(self._live))
            self._is_draining = True
            self.link.beat()

    def _reset(self, why: str) -> None:
        _log.warning("dropping %d sequences: %s", len(self._live), why)
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()
        if self._stop_at is None:
            # The drain was the wish of a broker that is gone; this process was not asked to stop.
            self._is_draining = False
        self.link.forget_unsent()
        self.link.register_again()

    def _give_back_all(self) -> None:
        if self._live:
            _log.warning("giving %d sequences back to the broker", len(self._live))
        self.link.send(
            [
                Failed(
                    request_id=request_id,
                    code="internal_error",
                    message="the worker ended before the answer was complete",
                    retryable=True,
                )
                for request_id in sorted(self._live)
            ]
        )
        self._live.clear()

    def _publish(self) -> None:
        self._stats = self._engine.stats()
        now = self._clock()
        if now >= self._publish_at or not self._engine.has_work:
            self._publish_at = now + _PUBLISH_S
            self._gauges.set(self._stats)

    def _load(self) -> Heartbeat:
        stats = self._stats
        return Heartbeat(
            worker_id=self._worker_id,
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_free=stats.kv_blocks_free,
            steps=stats.steps,
            draining=self._is_draining,
            tokens=stats.tokens,
            health=self._engine.health(),
            kv_blocks_peak=stats.kv_blocks_peak,
            pace=stats.pace,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's entry; the configuration comes from the run directory."""
    options = _parse(arguments)
    name = f"worker-{options.device_class}-{options.index}"
    try:
        logs.configure(name)
        die_with_parent(signal.SIGKILL, os.getppid())
        if options.cores:
            os.sched_setaffinity(0, options.cores)
        worker = _load(options.device_class, options.index, options.threads)
    except SetupError as error:
        _log.error("%s cannot start: %s", name, error.message)
        return CANNOT_START
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    return worker.run()


def _load(device_class: str, index: int, threads: int | None) -> Worker:
    config, run_dir = from_run_dir()
    begin = time.monotonic()
    engine = engines.create(config, run_dir, device_class, threads)
    abilities = engine.capabilities
    _log.info(
        "loaded %s on %s %s (%s) in %.1f s",
        engine.model_name,
        abilities.name,
        abilities.precision,
        abilities.device,
        time.monotonic() - begin,
    )
    pid = os.getpid()
    return Worker(
        engine,
        run_dir.worker_endpoint,
        worker_id=f"{device_class}-{index}-{pid}-{uuid.uuid4().hex[:8]}",
        device_class=device_class,
        pid=pid,
        heartbeat_s=config.broker.heartbeat_ms / 1e3,
        drain_s=config.server.drain_s,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.worker", description="One engine; a pool starts it."
    )
    parser.add_argument("--class", dest="device_class", required=True, metavar="CLASS")
    parser.add_argument("--index", type=int, default=0, help="place in its pool")
    parser.add_argument("--cores", type=_cores, help="CPU numbers to be pinned to: 0,1")
    parser.add_argument("--threads", type=int, help="threads of a forward")
    return parser.parse_args(arguments)


def _cores(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


if __name__ == "__main__":
    sys.exit(main())
