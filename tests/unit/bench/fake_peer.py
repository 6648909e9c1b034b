"""An engine that computes nothing: its tokens come at a pace that the test sets."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirror_sd.bench.peer_drivers.session import Session, Timeline, serve

ROOT = Path(__file__).resolve().parents[3]
_START = "import sys; sys.path.insert(0, {root!r}); from tests.unit.bench import fake_peer; "


def command() -> list[str]:
    """How to start its process."""
    code = _START.format(root=str(ROOT)) + "fake_peer.main()"
    return [sys.executable, "-c", code]


class FakePeer:
    """`fails_at`: the call of `generate` that raises; `dies_at`: the one that kills the process.

    `pace_ms`: time of a token; its times are made up, so a test takes none.
    """

    def __init__(
        self,
        pace_ms: float,
        streams: int,
        fails_at: int | None = None,
        dies_at: int | None = None,
        **_: Any,
    ) -> None:
        if pace_ms <= 0:
            raise ValueError("pace_ms is not above 0\nsecond line")
        self._pace_s, self._streams = pace_ms / 1e3, streams
        self._fails_at, self._dies_at = fails_at, dies_at
        self._calls = 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        self._calls += 1
        print("a library that prints on standard output", flush=True)
        if self._calls == self._fails_at:
            raise RuntimeError("out of tokens")
        if self._calls == self._dies_at:
            print("dying", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        answers = []
        for index in range(len(prompts)):
            start = begin + (index // self._streams) * (max_tokens + 1) * self._pace_s
            answers.append((start, [start + self._pace_s * i for i in range(1, max_tokens + 1)]))
        return answers


def main() -> None:
    own = {"spin": _spin, "versions": _versions, "prepare": _prepare}
    serve({**Session(FakePeer).handlers(), **own})


def _versions(family: str) -> str:
    return f"{family} 1.0"


def _prepare(kind: str, source: str, target: str, quantisation: str = "") -> None:
    """Writes where it came from; an OpenVINO directory fails half-written."""
    if kind == "llamacpp":
        Path(target).write_text(f"{quantisation} of {source}", encoding="utf-8")
        return
    Path(target).mkdir()
    (Path(target) / "model").write_text(source, encoding="utf-8")
    if kind == "openvino":
        raise RuntimeError("the export failed")


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
