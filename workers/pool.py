"""The workers of one device class: started, pinned, started again when they die, drained.

`python -m workers.pool --class cpu`. The pool never gives up on a worker that died, it only waits
longer between attempts. If the very first start of a worker fails for a reason that will not go
away (no such model), it ends with the worker's status, so that whoever started it can say so.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from prometheus_client import multiprocess

from mirror_sd import allocator, logs, openmp, telemetry
from mirror_sd.child import CANNOT_START, Child, ChildSpec, Death, Waker
from mirror_sd.config import PoolConfig
from mirror_sd.errors import ConfigError, SetupError
from mirror_sd.run_dir import from_run_dir

_log = logging.getLogger(__name__)

_TICK_S = 0.1
# A worker told to drain gives its sequences back and flushes after `drain_s`; then it is late.
_STOP_MARGIN_S = 4.0


class Pool:
    """Keeps `children` alive until `stop`."""

    def __init__(
        self,
        device_class: str,
        children: Sequence[Child],
        *,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._children = children
        self._drain_s = drain_s
        self._clock = clock
        self._wait = wait
        self._restarts = telemetry.WORKER_RESTARTS.labels(device_class)
        self._restarts.inc(0)
        self._signals = 0

    def run(self) -> int:
        """Returns 0 after `stop`, `CANNOT_START` where a first start failed for good."""
        for worker in self._children:
            worker.start()
        status = 0
        while not self._signals and status == 0:
            status = self.run_once()
            self._wait(_TICK_S)
        self._end_workers()
        return status

    def run_once(self) -> int:
        """Look after each worker once; not 0 when the pool must end."""
        for worker in self._children:
            before = worker.restarts
            death = worker.tend()
            if death is not None:
                self._bury(death)
                if death.status == CANNOT_START and worker.restarts == 0:
                    return CANNOT_START
                _log.error("%s; starting it again in %.1f s", death, death.delay_s)
            if worker.restarts > before:
                self._restarts.inc()
        return 0

    def stop(self) -> None:
        """Drain; a second call ends the workers at once. Safe in a signal handler."""
        self._signals += 1

    def _end_workers(self) -> None:
        for worker in self._children:
            worker.stop()
        deadline = self._clock() + self._drain_s + _STOP_MARGIN_S
        while any(worker.pid is not None for worker in self._children):
            for worker in self._children:
                death = worker.reap()
                if death is not None:
                    self._bury(death)
            if self._signals > 1 or self._clock() >= deadline:
                break
            self._wait(_TICK_S / 5)
        for worker in self._children:
            if worker.pid is not None:
                _log.warning("%s did not end in time: killed", worker.spec.name)
                worker.kill()

    def _bury(self, death: Death) -> None:
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            # The gauges of the dead must not be summed with those of the living.
            multiprocess.mark_process_dead(death.pid)  # type: ignore[no-untyped-call]


def share_of_cores(cores: Sequence[int], workers: int, index: int) -> list[int]:
    """The cores of worker `index` of `workers`: neighbours, as many as its equal share; one core,
    shared in turn, where there are more workers than cores."""
    if workers >= len(cores):
        return [cores[index % len(cores)]]
    begin = index * len(cores) // workers
    end = (index + 1) * len(cores) // workers
    return list(cores[begin:end])


def chosen_cores(wanted: Sequence[int] | None, key: str) -> list[int]:
    """The cores that this process may use, or of them those that setting `key` names. Raises
    `ConfigError` for one that it may not use."""
    allowed = sorted(os.sched_getaffinity(0))
    if wanted is None:
        return allowed
    absent = sorted(set(wanted) - set(allowed))
    if absent:
        raise ConfigError(
            f"{key} names {', '.join(map(str, absent))}; usable here are"
            f" {', '.join(map(str, allowed))}"
        )
    return sorted(set(wanted))


def worker_spec(device_class: str, pool: PoolConfig, cores: Sequence[int], index: int) -> ChildSpec:
    """How the pool starts worker `index` on its share of `cores`."""
    share = share_of_cores(cores, pool.workers, index)
    threads = pool.threads or len(share)
    argv = [sys.executable, "-P", "-m", "workers.worker", "--class", device_class]
    argv += ["--index", str(index), "--threads", str(threads)]
    if pool.pin:
        argv += ["--cores", ",".join(map(str, share))]
    env = {
        "MIRROR_SD_ROLE": "worker",
        "MIRROR_SD_CLASS": device_class,
        **openmp.environment(threads),
        **allocation(device_class, pool),
    }
    return ChildSpec(name=f"worker-{device_class}-{index}", argv=argv, env=env)


def allocation(device_class: str, pool: PoolConfig) -> dict[str, str]:
    """The variables by which the workers of a CPU get their malloc. Raises `ConfigError` where the
    one that is asked for is not there, or would be for workers that get none."""
    if device_class != "cpu" or pool.engine == "emulated":
        if pool.allocator == "jemalloc":
            raise ConfigError(
                f"pools.{device_class}.allocator is jemalloc, which only workers of class cpu that"
                " compute run on"
            )
        return {}
    try:
        return allocator.environment(pool.allocator)
    except ConfigError as error:
        raise ConfigError(f"pools.{device_class}.allocator: {error.message}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's entry; the configuration comes from the run directory."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.pool", description="The workers of a device class."
    )
    parser.add_argument("--class", dest="device_class", required=True, metavar="CLASS")
    device_class = parser.parse_args(arguments).device_class
    try:
        logs.configure(f"pool-{device_class}")
        config, _ = from_run_dir()
        settings = config.pool(device_class)
        cores = chosen_cores(settings.cores, f"pools.{device_class}.cores")
        specs = [worker_spec(device_class, settings, cores, i) for i in range(settings.workers)]
    except SetupError as error:
        _log.error("the pool %s cannot start: %s", device_class, error.message)
        return CANNOT_START
    _tell_allocator(device_class, settings, specs)
    waker = Waker()
    waker.install()
    pool = Pool(
        device_class,
        [Child(spec) for spec in specs],
        drain_s=config.server.drain_s,
        wait=waker.wait,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pool.stop())
    return pool.run()


def _tell_allocator(device_class: str, pool: PoolConfig, specs: Sequence[ChildSpec]) -> None:
    computes = device_class == "cpu" and pool.engine != "emulated"
    if computes and pool.allocator == "auto" and "LD_PRELOAD" not in specs[0].env:
        _log.warning(
            "the workers run on glibc's malloc: jemalloc, which gives back more of what was freed,"
            " is not found; %s",
            allocator.HOW_TO_INSTALL,
        )


if __name__ == "__main__":
    sys.exit(main())
