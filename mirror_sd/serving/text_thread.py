"""A thread for small text work, such as detokenising a chunk, kept off the event loop.

A hop to a thread and back costs more than the few microseconds of such work, so all that is asked
for while the thread is busy, or within one turn of the loop, crosses in one hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]
_Result = tuple["asyncio.Future[Any]", Any, BaseException | None]


class TextThread:
    """Used from one event loop; jobs run in the order they were given."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._pending: list[_Job] = []
        self._is_busy = False

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, called in the thread; its exception is raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending.append((function, arguments, future))
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._dispatch, loop)
        return await future

    def close(self) -> None:
        """End the thread once what was handed over is done."""
        self._executor.shutdown(wait=False)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        jobs, self._pending = self._pending, []
        self._executor.submit(self._work, loop, jobs)

    def _work(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job]) -> None:
        results = [_run(job) for job in jobs if not job[2].cancelled()]
        loop.call_soon_threadsafe(self._deliver, loop, results)

    def _deliver(self, loop: asyncio.AbstractEventLoop, results: list[_Result]) -> None:
        for future, value, error in results:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
        self._is_busy = bool(self._pending)
        if self._is_busy:
            self._dispatch(loop)


def _run(job: _Job) -> _Result:
    function, arguments, future = job
    try:
        return future, function(*arguments), None
    except Exception as error:  # noqa: BLE001 - raised again where the work was asked for
        return future, None, error
