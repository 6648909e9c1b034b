"""`mirror-sd bench edge`: what the path around an engine costs, with an engine that takes no time.

nginx, gateways, broker and one worker with the emulated engine at latency 0 answer chats of one
token. All of an answer's latency is then the path's. First as many at once as `--connections`, for
the requests a second and the CPU time of each process; then some a second, sent at set times
whatever the server does, for the latency.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from mirror_sd.bench import machine, prompts
from mirror_sd.bench.load import Arrival, Exchange, LoadClient, quantile, request
from mirror_sd.bench.options import AsJson, Overrides, show
from mirror_sd.bench.own_stack import OwnStack
from mirror_sd.bench.serve_stack import measured
from mirror_sd.errors import InternalError

_TENANT = "bench"
_SLOTS = 64
_GRACE_S = 5.0
_WARM_S = 1.0
_SEED = 4


def command(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each of the two runs.")] = 10.0,
    connections: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 32,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second of the latency run.")] = 200,
    gateways: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 2,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Requests a second, added latency and CPU time of the path around an engine of no time.

    `added_*_ms` is the whole latency at `--rate` less the engine's own time, which is 0;
    `cpu_ms_per_request` is by process at full load, the measuring client beside them.
    """
    settings = [
        "pools.cpu.engine=emulated",
        "pools.cpu.emulation.latency_ms=0",
        f"pools.cpu.emulation.max_batch={_SLOTS}",
        f"scheduler.max_batch_size.CPU={_SLOTS}",
        f"server.gateways={gateways}",
        *(overrides or ()),
    ]
    with OwnStack(settings, [(_TENANT, "standard")]) as stack, LoadClient(stack.port) as client:
        bodies = list(_requests(stack))
        full = _full_load(stack, client, bodies, connections, seconds)
        spread = _at_rate(client, bodies, rate, seconds)
    facts = {"gateways": gateways, "connections": connections, "engine": "emulated, 0 ms"}
    show({"machine": machine.describe(), **facts, **full, **spread}, as_json)


def _full_load(
    stack: OwnStack, client: LoadClient, bodies: Sequence[bytes], connections: int, seconds: float
) -> dict[str, Any]:
    client.run_closed(itertools.cycle(bodies), connections, _WARM_S)
    with measured(stack.processes()) as use:
        done = client.run_closed(itertools.cycle(bodies), connections, seconds)
    latencies = _latencies_ms(done)
    span = max(e.ended or 0.0 for e in done) - min(e.sent for e in done)
    return {
        "requests_per_s": round(len(done) / span, 1),
        "p50_ms": round(quantile(latencies, 0.5), 2),
        "p99_ms": round(quantile(latencies, 0.99), 2),
        "cpu_ms_per_request": use.ms_per_request(len(done)),
        "cores_used": round(sum(use.seconds.values()) / span, 2),
        "other_load": round(use.other_cores, 2),
    }


def _at_rate(
    client: LoadClient, bodies: Sequence[bytes], rate: float, seconds: float
) -> dict[str, Any]:
    draw = random.Random(_SEED)
    at_s = itertools.accumulate(draw.expovariate(rate) for _ in range(int(rate * seconds)))
    source = itertools.cycle(bodies)
    arrivals = [Arrival(moment, next(source)) for moment in at_s]
    latencies = _latencies_ms(client.run_open(arrivals, _GRACE_S))
    return {
        "rate": rate,
        "added_p50_ms": round(quantile(latencies, 0.5), 2),
        "added_p99_ms": round(quantile(latencies, 0.99), 2),
    }


def _latencies_ms(done: Sequence[Exchange]) -> list[float]:
    """Raises `InternalError` where an answer failed: the others' latency would mean nothing."""
    failed = [e for e in done if e.status != 200 or e.ended is None]
    if failed or not done:
        told = failed[0] if failed else None
        detail = f"; one: {told.status} {told.tail[:200]!r}" if told else ""
        raise InternalError(f"{len(failed)} of {len(done)} requests failed{detail}")
    return [1e3 * (e.ended - e.due) for e in done if e.ended is not None]


def _requests(stack: OwnStack) -> Iterator[bytes]:
    model = json.loads((stack.run.tokenizer / "model.json").read_text(encoding="utf-8"))["name"]
    for text in prompts.DEFAULT:
        body = {
            "model": stack.config.model.served_name or model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        }
        content = json.dumps(body).encode()
        yield request(stack.port, "/v1/chat/completions", content, stack.keys[_TENANT])
