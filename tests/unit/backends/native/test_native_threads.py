"""The engine's own threads: idle ones rest, collected ones end, forked ones are not waited for."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import NativeBackend
from tests.unit.backends.native.batches import whole
from tests.unit.backends.native.models import FP32, INT8, ODD, native

ROOT = Path(__file__).resolve().parents[4]
IDS = np.arange(40, dtype=np.int32)


def run_python(code: str, *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
    )


def warmed(threads: int) -> NativeBackend:
    backend = native(ODD, INT8, threads=threads)
    whole(backend, IDS)
    return backend


def test_an_idle_engine_uses_no_cpu_time() -> None:
    """2 % of a core over a second, counted after it has had a second to come to rest."""
    code = """
        import time
        from tests.unit.backends.native.test_native_threads import warmed
        backend = warmed(4)
        time.sleep(1)
        begin, used = time.monotonic(), time.process_time()
        time.sleep(1)
        print((time.process_time() - used) / (time.monotonic() - begin))
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.02


def test_the_threads_end_with_the_engine() -> None:
    process = psutil.Process()
    gc.collect()
    before = process.num_threads()
    backend = warmed(4)
    assert process.num_threads() == before + 3
    del backend
    gc.collect()
    assert process.num_threads() == before


def test_engines_side_by_side_do_not_disturb_each_other() -> None:
    first, second = warmed(3), warmed(2)
    expected = whole(first, IDS).copy()
    del first
    gc.collect()
    assert np.array_equal(whole(second, IDS), expected)


def test_callers_from_several_threads_take_turns() -> None:
    """In a process of its own: an engine that is entered twice may also hang."""
    code = """
        import threading
        import numpy as np
        from tests.unit.backends.native.test_native_threads import IDS, warmed, whole
        backend = warmed(2)
        expected = whole(backend, IDS).copy()
        backend.allocate_kv(16, 16)
        wrong = []

        def call(first_block):
            table = np.arange(first_block, first_block + 3, dtype=np.int32)
            logits = np.empty_like(expected)
            offsets = np.array([0, len(IDS)], np.int32)
            for _ in range(40):
                backend._decoder.forward(IDS, IDS, offsets, (table,), IDS, logits)
                wrong.append(not np.array_equal(logits, expected))

        callers = [threading.Thread(target=call, args=(3 * i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        print(len(wrong), sum(wrong))
    """
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "160 0\n"), done.stderr


def test_the_caller_may_use_the_same_cores_as_before() -> None:
    allowed = os.sched_getaffinity(0)
    backend = warmed(len(allowed))
    assert os.sched_getaffinity(0) == allowed
    whole(backend, IDS)
    assert os.sched_getaffinity(0) == allowed


def test_usable_cores_are_those_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(_native.usable_cores(1)) <= allowed
    assert sorted(_native.usable_cores(len(allowed))) == sorted(allowed)
    assert _native.usable_cores(len(allowed) + 1) == []


def in_a_fork(work: str) -> tuple[int, str]:
    """Exit status (or minus the signal) and output of `work`, run in a child of a process with an
    engine of three threads, which forks while they sleep."""
    code = f"""
        import os, sys, time
        from tests.unit.backends.native.test_native_threads import IDS, warmed, whole
        backend = warmed(3)
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            {work}
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                whole(backend, IDS)
                print("the parent goes on")
                sys.exit(os.waitstatus_to_exitcode(status))
            time.sleep(0.01)
        os.kill(child, {int(signal.SIGKILL)})
        sys.exit("the child hangs")
    """
    done = run_python(code)
    return done.returncode, done.stdout + done.stderr


def test_a_fork_of_an_engine_says_that_it_cannot_compute() -> None:
    status, output = in_a_fork("whole(backend, IDS)")
    assert status == 1, output
    assert "RuntimeError: a fork has no threads" in output
    assert "the parent goes on" in output


def test_a_fork_ends_without_waiting_for_threads_that_it_does_not_have() -> None:
    status, output = in_a_fork("del backend; sys.exit(3)")
    assert (status, output) == (3, "the parent goes on\n")


def test_threads_that_cannot_be_had_are_an_error_not_the_end() -> None:
    code = """
        import resource
        import numpy as np
        from tests.unit.backends.native.models import FP32, ODD, native
        from tests.unit.backends.native.batches import whole
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        try:
            native(ODD, FP32, threads=1000)
        except RuntimeError as error:
            print(error)
        whole(native(ODD, FP32, threads=2), np.arange(40, dtype=np.int32))
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "Resource temporarily unavailable" in done.stdout


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_an_impossible_number_of_threads_is_a_value_error(threads: int) -> None:
    with pytest.raises(ValueError, match=r"threads is outside 1\.\.1024"):
        native(ODD, FP32, threads=threads)


def test_a_sleeping_engine_wakes_up() -> None:
    backend = warmed(4)
    expected = whole(backend, IDS).copy()
    for rest_s in (0.0, 0.0001, 0.001, 0.02):
        time.sleep(rest_s)
        assert np.array_equal(whole(backend, IDS), expected)
