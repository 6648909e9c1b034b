"""The pool's policy with real child processes that die on purpose."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mirror_sd.child import CANNOT_START, Backoff, Child, ChildSpec
from mirror_sd.config import PoolConfig
from workers.pool import Pool, share_of_cores, worker_spec


def child(code: str, **backoff: float) -> Child:
    spec = ChildSpec(name="scripted", argv=[sys.executable, "-c", code])
    return Child(spec, Backoff(**backoff))


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 1, [[0, 1]]),
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 3, [[0], [1], [0]]),
        ([0, 2, 4, 6, 8], 2, [[0, 2], [4, 6, 8]]),
        ([7], 1, [[7]]),
    ],
)
def test_workers_share_the_cores_equally(
    cores: list[int], workers: int, shares: list[list[int]]
) -> None:
    assert [share_of_cores(cores, workers, index) for index in range(workers)] == shares


def test_every_core_is_given_out_once() -> None:
    cores = list(range(64))
    for workers in range(1, 65):
        given = [core for index in range(workers) for core in share_of_cores(cores, workers, index)]
        assert given == cores


def test_worker_is_told_its_cores_and_threads() -> None:
    spec = worker_spec("cpu", PoolConfig(workers=2), [3, 4, 5, 6], 1)
    assert list(spec.argv[-6:]) == ["--index", "1", "--threads", "2", "--cores", "5,6"]
    assert spec.env["OMP_NUM_THREADS"] == "2"
    assert spec.env["MIRROR_SD_ROLE"] == "worker"


def test_unpinned_worker_is_told_no_cores() -> None:
    spec = worker_spec("cpu", PoolConfig(pin=False, threads=3), [0, 1], 0)
    assert "--cores" not in spec.argv
    assert spec.env["OMP_NUM_THREADS"] == "3"


def test_dead_worker_is_started_again_later_each_time() -> None:
    worker = child("raise SystemExit(3)", first_s=0.05)
    pool = Pool("cpu", [worker], drain_s=1.0)
    worker.start()
    deadline = time.monotonic() + 10
    while worker.restarts < 3 and time.monotonic() < deadline:
        assert pool.run_once() == 0
        time.sleep(0.01)
    pool.stop()
    worker.kill()
    assert worker.restarts == 3


def test_first_start_that_cannot_succeed_ends_the_pool() -> None:
    worker = child(f"raise SystemExit({CANNOT_START})")
    neighbour = child("import time; time.sleep(60)")
    assert Pool("cpu", [worker, neighbour], drain_s=1.0).run() == CANNOT_START
    assert neighbour.pid is None


def test_stopped_pool_ends_its_workers(tmp_path: Path) -> None:
    worker = child("import time; time.sleep(60)")
    pool = Pool("cpu", [worker], drain_s=5.0)
    timer = threading.Timer(0.3, pool.stop)
    timer.start()
    begin = time.monotonic()
    assert pool.run() == 0
    assert time.monotonic() - begin < 4
    assert worker.pid is None


def test_worker_that_ignores_the_request_to_stop_is_killed_in_the_end() -> None:
    worker = child(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    pool = Pool("cpu", [worker], drain_s=-3.0)
    worker.start()
    time.sleep(0.5)
    pid = worker.pid
    assert pid is not None
    pool.stop()
    pool._end_workers()
    assert not psutil.pid_exists(pid)


def test_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = Child(
        ChildSpec(
            name="parent",
            argv=[
                sys.executable,
                "-c",
                "import sys, time, pathlib\n"
                "from mirror_sd.child import Child, ChildSpec\n"
                "c = Child(ChildSpec('c', [sys.executable, '-c', 'import time; time.sleep(60)']))\n"
                f"c.start(); pathlib.Path({str(note)!r}).write_text(str(c.pid)); time.sleep(60)",
            ],
        )
    )
    parent.start()
    try:
        deadline = time.monotonic() + 10
        while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        orphan = psutil.Process(int(note.read_text()))
        assert parent.pid is not None
        psutil.Process(parent.pid).send_signal(signal.SIGKILL)
        orphan.wait(timeout=5)
    finally:
        parent.kill()


def test_backoff_doubles_up_to_its_limit_and_forgets_once_settled() -> None:
    backoff = Backoff(first_s=1.0, longest_s=5.0, settled_s=20.0)
    assert [backoff.delay_s(0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.delay_s(21.0) == 1.0
    assert backoff.delay_s(0.1) == 2.0
