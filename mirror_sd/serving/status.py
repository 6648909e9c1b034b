"""The resources that tell of the server: models, health, metrics, state."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import falcon
import falcon.asgi
import msgspec

from mirror_sd import telemetry
from mirror_sd.config import BrokerConfig
from mirror_sd.errors import CapacityError
from mirror_sd.messages import Stats
from mirror_sd.serving.generation import Broker
from mirror_sd.serving.intake import Intake


class Models:
    """`/v1/models` and `/v1/models/{name}`; `created` is unix time in seconds."""

    def __init__(self, intake: Intake, created: int) -> None:
        self._intake = intake
        self._entry = {
            "id": intake.model,
            "object": "model",
            "created": created,
            "owned_by": "mirror-sd",
            "max_model_len": intake.max_context,
        }

    async def on_get(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """The list, of one model."""
        response.data = msgspec.json.encode({"object": "list", "data": [self._entry]})

    async def on_get_one(
        self, request: falcon.asgi.Request, response: falcon.asgi.Response, name: str
    ) -> None:
        """One model, `ModelNotFound` for any other name."""
        self._intake.check_model(name)
        response.data = msgspec.json.encode(self._entry)


class Health:
    """`/health`: 200 while the broker answers, a worker lives and work moves; else 503 and why."""

    def __init__(self, broker: Broker, config: BrokerConfig) -> None:
        self._broker = broker
        self._config = config

    async def on_get(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """Ask the broker now."""
        try:
            trouble = trouble_in(await self._broker.stats(), self._config)
        except CapacityError as error:
            trouble = error.message
        if trouble is None:
            response.data = msgspec.json.encode({"status": "ok"})
        else:
            response.status = 503
            response.data = msgspec.json.encode({"status": "failing", "reason": trouble})


class Metrics:
    """`/metrics`: all processes of the stack, in the Prometheus text format."""

    async def on_get(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """Read the metric files in a thread."""
        response.content_type = "text/plain; version=0.0.4; charset=utf-8"
        response.data = await asyncio.to_thread(telemetry.exposition)


class State:
    """`/admin/state`: the broker's view and this gateway's process id. The edge does not route it
    to the public."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def on_get(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """Ask the broker now; 503 where it does not answer."""
        state = _shown(await self._broker.stats())
        del state["token"]
        response.data = msgspec.json.encode(state | {"gateway_pid": os.getpid()})


def _shown(struct: msgspec.Struct) -> dict[str, Any]:
    """Every field, those at their default too, which the wire leaves out."""
    return {name: _plain(value) for name, value in msgspec.structs.asdict(struct).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _shown(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def trouble_in(stats: Stats, config: BrokerConfig) -> str | None:
    """Why the stack behind the broker is not healthy, None where it is."""
    patience_s = config.heartbeat_ms * config.missed_heartbeats / 1000
    live = [worker for worker in stats.workers if worker.silent_s <= patience_s]
    if not live:
        return "no worker is live"
    stalled = [worker.worker_id for worker in live if worker.stalled_s > config.stall_s]
    if stalled:
        return f"running work makes no progress on {', '.join(stalled)}"
    if all(worker.draining for worker in live):
        return "every worker is draining"
    if stats.waiting and not stats.running and stats.oldest_wait_s > config.stall_s:
        return "requests wait and none runs"
    return None
