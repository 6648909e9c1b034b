"""A real broker process with scripted workers, for tests; heartbeats are short."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from mirror_sd.config import Config
from mirror_sd.errors import MirrorError, NoWorker
from mirror_sd.messages import Chunk, Finished, SamplingParams, Stats, Submit
from mirror_sd.run_dir import RunDir
from mirror_sd.serving.broker_client import BrokerClient
from mirror_sd.serving.call import Event
from tests.unit.serving.scripted_worker import token_at

ROOT = Path(__file__).resolve().parents[3]
BEAT_MS = 100


class BrokerStack:
    def __init__(self, path: Path, **sections: dict[str, Any]) -> None:
        broker = {"heartbeat_ms": BEAT_MS, "stall_s": 1.0, **sections.pop("broker", {})}
        self.config = Config.model_validate({"broker": broker, **sections})
        self.run_dir = RunDir(path)
        self.run_dir.config_json.write_text(self.config.model_dump_json(), encoding="utf-8")
        self.log = path / "broker.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.broker = self.start_broker()

    def start_broker(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "MIRROR_SD_CONFIG_JSON": str(self.run_dir.config_json)}
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        with self.log.open("ab") as log:
            self.broker = self._start(["mirror_sd.serving.broker"], stderr=log, env=environment)
        return self.broker

    def start_worker(
        self, name: str, *, slots: int = 4, step_ms: float = 5, kind: str = "cpu"
    ) -> subprocess.Popen[bytes]:
        arguments = [self.run_dir.worker_endpoint, name, str(slots), str(step_ms), str(BEAT_MS)]
        return self._start(["tests.unit.serving.scripted_worker", *arguments, kind])

    def start_gateway(self, requests: int) -> subprocess.Popen[bytes]:
        """A gateway process with that many endless requests."""
        return self._start(
            ["tests.unit.serving.broker_stack", str(self.run_dir.path), str(requests)]
        )

    def _start(self, arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, **options)
        self.processes.append(process)
        return process

    @contextlib.asynccontextmanager
    async def client(self, name: str = "gateway-0", **options: Any) -> AsyncIterator[BrokerClient]:
        client = BrokerClient(self.run_dir.gateway_endpoint, name, self.config.broker, **options)
        await client.start()
        try:
            yield client
        finally:
            await client.close()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def broker_stack(**sections: dict[str, Any]) -> Iterator[BrokerStack]:
    # Not pytest's tmp_path: the path of a unix socket has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="mirror-sd-", dir="/tmp"))
    stack = BrokerStack(path, **sections)
    try:
        yield stack
    finally:
        stack.close()
        shutil.rmtree(path)


def make_submit(
    request_id: str, tokens: int = 10, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any
) -> Submit:
    params = SamplingParams(max_tokens=tokens, seed=1, **fields.pop("params", {}))
    defaults: dict[str, Any] = {"model": "scripted", "timeout_s": 20.0, "received_at": time.time()}
    return Submit(request_id=request_id, prompt=prompt, params=params, **{**defaults, **fields})


def expected(submit: Submit) -> list[int]:
    return [token_at(submit.prompt, i) for i in range(submit.params.max_tokens)]


async def generate(client: BrokerClient, submit: Submit) -> AsyncGenerator[Chunk | Finished, None]:
    """The events of a request; raises the error that ended it. Closed early, it leaves."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    leave = client.open(submit, events.put_nowait)
    try:
        while True:
            event = await events.get()
            if isinstance(event, MirrorError):
                raise event
            yield event
            if isinstance(event, Finished):
                return
    finally:
        leave()


async def collect(
    client: BrokerClient, submit: Submit, on_token: Callable[[int], None] | None = None
) -> list[int]:
    """The tokens of a generation, whose events are checked to be gapless and ended once."""
    tokens: list[int] = []
    finished = 0
    async with contextlib.aclosing(generate(client, submit)) as events:
        async for event in events:
            assert event.request_id == submit.request_id
            if isinstance(event, Chunk):
                assert event.index == len(tokens) and not finished
                tokens += event.tokens
                if on_token is not None:
                    on_token(len(tokens))
            else:
                assert isinstance(event, Finished)
                assert event.usage.completion_tokens == len(tokens)
                finished += 1
    assert finished == 1
    return tokens


async def wait_for_stats(
    client: BrokerClient, condition: Callable[[Stats], bool], within_s: float = 10.0
) -> Stats:
    """Ask until the condition holds; a broker that is only starting may not answer yet."""
    deadline = time.monotonic() + within_s
    while True:
        stats: Stats | None = None
        with contextlib.suppress(NoWorker):
            stats = await client.stats()
        if stats is not None and condition(stats):
            return stats
        assert time.monotonic() < deadline, f"not reached: {stats}"
        await asyncio.sleep(0.02)


async def hold_requests(path: Path, requests: int) -> None:
    config = Config.model_validate_json(RunDir(path).config_json.read_text(encoding="utf-8"))
    client = BrokerClient(RunDir(path).gateway_endpoint, "held", config.broker)
    await client.start()
    submits = [make_submit(f"held-{i}", tokens=10**6) for i in range(requests)]
    await asyncio.gather(*(collect(client, submit) for submit in submits))


if __name__ == "__main__":
    asyncio.run(hold_requests(Path(sys.argv[1]), int(sys.argv[2])))
