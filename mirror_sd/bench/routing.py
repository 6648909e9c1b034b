"""`mirror-sd bench routing`: what routing, queues and stealing make of three unequal classes.

A stack of its own for each mode: real nginx, gateways and broker, emulated CPU, GPU and TPU. First
VIP traffic alone, then the same VIP requests among standard ones at a multiple of what all classes
together can do, both at set times whatever the server does.

    round_robin  each class the same share of the requests
    gpu_only     every request to the GPU
    ours         the default policy with probe, headroom, stealing and displacement

The first two have no probe, no stealing and no displacement; VIP goes first in their queues too.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mirror_sd.bench import machine, traffic
from mirror_sd.bench.load import Arrival, Exchange, LoadClient, quantile
from mirror_sd.bench.options import AsJson, Dataset, Overrides, one_of, show
from mirror_sd.bench.own_stack import OwnStack
from mirror_sd.bench.serve_stack import measured
from mirror_sd.keys import Tier
from mirror_sd.scheduler.ticket import TIERS

MODES = ("round_robin", "gpu_only", "ours")
# Milliseconds of a step and sequences in it, as in workers/profiles.
PROFILES = "cpu=120/8,gpu=20/32,tpu=15/64"
_PROFILE = re.compile(r"(cpu|gpu|tpu)=(\d+(?:\.\d+)?)/(\d+)")
_WEIGHTS = {"round_robin": "{ cpu = 1, gpu = 1, tpu = 1 }", "gpu_only": "{ gpu = 1 }"}
_PLAIN = ("probe.enabled=false", "scheduler.preemption=false", "scheduler.steal_after_ms=1e9")
_SEED = 7
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `overload` times the capacity for `seconds`, of which the first `warm_s`
    do not count for the throughput; `profiles` are milliseconds of a step and sequences in it."""

    profiles: dict[str, tuple[float, int]]
    seconds: float
    warm_s: float
    grace_s: float
    overload: float
    vip_share: float
    dataset: Path | None

    def capacity_tok_s(self) -> dict[str, float]:
        """Of each class, with all its slots taken."""
        return {
            name: round(1e3 * batch / latency_ms, 1)
            for name, (latency_ms, batch) in self.profiles.items()
        }

    def mix(self) -> traffic.Mix:
        """The traffic at overload."""
        rate = self.overload * sum(self.capacity_tok_s().values()) / traffic.mean_answer_tokens()
        return traffic.Mix(rate, self.vip_share, self.seconds, _SEED, self.dataset)


def command(
    modes: Annotated[str, typer.Option(help="Comma list.")] = ",".join(MODES),
    seconds: Annotated[float, typer.Option(min=2, help="Length of each run.")] = 20.0,
    warm: Annotated[float, typer.Option(min=0, help="Seconds before the throughput counts.")] = 5.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for what still runs then.")] = 20.0,
    overload: Annotated[float, typer.Option(min=0.1, help="Offered load by capacity.")] = 1.5,
    profiles: Annotated[
        str, typer.Option(help="Emulated classes: ms of a step / sequences in it.")
    ] = PROFILES,
    slowdown: Annotated[
        float, typer.Option(min=0.1, help="Stretch the steps of all emulated classes alike.")
    ] = 2.0,
    vip_share: Annotated[float, typer.Option(min=0.01, max=0.9)] = 0.1,
    dataset: Dataset = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Round robin, GPU only and our routing over emulated CPU, GPU and TPU, overloaded.

    `capacity_share` is the throughput by what all classes together can do; `shares` are those of
    the tokens by class; latencies are of whole answers from the moment they were due;
    `vip_p99_ratio` is by the p99 of the same VIP requests alone; `longest_standard_wait_s` is the
    longest time to a first token. Answers cut off at the end count with the time they had taken.
    """
    chosen = one_of(modes, MODES, "--modes")
    emulated = read_profiles(profiles, slowdown)
    plan = Plan(emulated, seconds, min(warm, seconds / 2), grace, overload, vip_share, dataset)
    runs = {mode: _run(mode, plan, overrides or ()) for mode in chosen}
    facts = {
        "emulated": {name: f"{ms:g} ms / {n}" for name, (ms, n) in emulated.items()},
        "slowdown": slowdown,
        "capacity_tok_s": plan.capacity_tok_s(),
        "overload": overload,
        "offered_requests_per_s": round(plan.mix().rate, 1),
        "seconds": seconds,
    }
    show({"machine": machine.describe(), **facts, **runs}, as_json)


def read_profiles(text: str, slowdown: float) -> dict[str, tuple[float, int]]:
    """Milliseconds of a step, stretched by `slowdown`, and sequences in it, of each class.

    Raises `typer.BadParameter`.
    """
    profiles: dict[str, tuple[float, int]] = {}
    for item in text.split(","):
        found = _PROFILE.fullmatch(item.strip())
        if found is None or float(found[2]) <= 0 or int(found[3]) < 1:
            raise typer.BadParameter(f"{item!r}: write it as {PROFILES}", param_hint="--profiles")
        profiles[found[1]] = (float(found[2]) * slowdown, int(found[3]))
    if not {"cpu", "gpu"} <= set(profiles):
        raise typer.BadParameter("cpu and gpu must be among them", param_hint="--profiles")
    return profiles


def _run(mode: str, plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    tenants: list[tuple[str, Tier]] = [(traffic.VIP_TENANT, "vip")]
    tenants += [(tenant, "standard") for tenant in traffic.STANDARD_TENANTS]
    with tempfile.TemporaryDirectory() as directory:
        settings = [*_settings(mode, plan, Path(directory)), *overrides]
        with OwnStack(settings, tenants) as stack, LoadClient(stack.port) as client:
            requests = plan.mix().requests()
            vip = [item for item in requests if item.tier == TIERS[0]]
            alone = _timed(client, _arrivals(vip, stack), plan)
            sampler = _Sampler(stack, plan)
            with measured(stack.processes()) as use:
                crowd = _timed(client, _arrivals(requests, stack), plan, sampler)
            limit_s = stack.config.scheduler.max_wait_s
            report = _report(alone, crowd, plan, sampler.shares())
    cores = sum(use.seconds.values()) / max(sampler.span_s, 1e-9)
    return {
        **report,
        "wait_limit_s": limit_s,
        "cores_used": round(cores, 2),
        "other_load": round(use.other_cores, 2),
    }


@dataclass(slots=True)
class _Run:
    """All exchanges of a run, when it began, and when those that had not ended were cut."""

    exchanges: list[Exchange]
    begin: float
    cut: float


class _Sampler(threading.Thread):
    """Reads what each class has generated when the throughput begins to count, and at its end."""

    def __init__(self, stack: OwnStack, plan: Plan) -> None:
        super().__init__(name="sampler", daemon=True)
        self._stack = stack
        self._moments = (plan.warm_s, plan.seconds)
        self._readings: list[dict[str, int]] = []
        self.span_s = 0.0

    def run(self) -> None:
        begin = time.monotonic()
        for moment in self._moments:
            time.sleep(max(begin + moment - time.monotonic(), 0.0))
            self._readings.append(self._stack.tokens_by_class())

    def shares(self) -> dict[str, float]:
        """Of the tokens generated between the readings."""
        before, after = self._readings
        made = {name: max(after[name] - before.get(name, 0), 0) for name in sorted(after)}
        total = max(sum(made.values()), 1)
        return {name: round(tokens / total, 4) for name, tokens in made.items()}


def _timed(
    client: LoadClient, arrivals: list[Arrival], plan: Plan, sampler: _Sampler | None = None
) -> _Run:
    begin = time.perf_counter()
    if sampler is not None:
        sampler.start()
    exchanges = client.run_open(arrivals, plan.grace_s)
    cut = time.perf_counter()
    if sampler is not None:
        sampler.join(_ANSWER_S)
        sampler.span_s = cut - begin
    return _Run(exchanges, begin, cut)


def _report(alone: _Run, crowd: _Run, plan: Plan, shares: dict[str, float]) -> dict[str, Any]:
    answered = [e for e in crowd.exchanges if not _is_refused(e)]
    window = (crowd.begin + plan.warm_s, crowd.begin + plan.seconds)
    tokens = sum(e.tokens_until(window[1]) - e.tokens_until(window[0]) for e in answered)
    rate = tokens / (window[1] - window[0])
    by_tier = {tier: _latencies_ms(answered, tier, crowd.cut) for tier in TIERS}
    unloaded = quantile(_latencies_ms(alone.exchanges, "vip", alone.cut), 0.99)
    waits = [(e.first or e.ended or crowd.cut) - e.due for e in answered if e.label == "standard"]
    return {
        "capacity_share": round(rate / sum(plan.capacity_tok_s().values()), 4),
        "shares": shares,
        "throughput_tok_s": round(rate, 1),
        "vip_p99_ratio": round(quantile(by_tier["vip"], 0.99) / unloaded, 3),
        "p50_ms": {tier: round(quantile(found, 0.5), 1) for tier, found in by_tier.items()},
        "p99_ms": {tier: round(quantile(found, 0.99), 1) for tier, found in by_tier.items()},
        "unloaded_vip_p99_ms": round(unloaded, 1),
        "longest_standard_wait_s": round(max(waits, default=0.0), 2),
        "requests": len(crowd.exchanges),
        "refused": len(crowd.exchanges) - len(answered),
        "failed": sum(_is_failed(e) for e in (*alone.exchanges, *answered)),
        "unfinished": sum(e.ended is None and not _is_failed(e) for e in answered),
    }


def _is_refused(exchange: Exchange) -> bool:
    return exchange.status in (429, 503)


def _is_failed(exchange: Exchange) -> bool:
    """An answer that is an error, has one in its stream, or broke off before we cut it."""
    if exchange.ended is None:
        return exchange.is_broken
    return exchange.status != 200 or b'data: {"error"' in exchange.tail


def _latencies_ms(exchanges: Sequence[Exchange], tier: str, cut: float) -> list[float]:
    found = [1e3 * ((e.ended or cut) - e.due) for e in exchanges if e.label == tier]
    return found or [0.0]


def _arrivals(requests: Sequence[traffic.Request], stack: OwnStack) -> list[Arrival]:
    facts = json.loads((stack.run.tokenizer / "model.json").read_text(encoding="utf-8"))
    model = stack.config.model.served_name or facts["name"]
    return traffic.arrivals(requests, stack.port, model, stack.keys)


def _settings(mode: str, plan: Plan, directory: Path) -> list[str]:
    settings = ["engine.prefill_chunk=8192"]
    for name, (latency_ms, batch) in plan.profiles.items():
        settings += [
            f"pools.{name}.engine=emulated",
            f"pools.{name}.emulation.latency_ms={latency_ms}",
            f"pools.{name}.emulation.max_batch={batch}",
            f"scheduler.max_batch_size.{name.upper()}={batch}",
        ]
    if mode != "ours":
        policy = directory / "policy.lua"
        weights = _WEIGHTS[mode]
        policy.write_text(
            f"return {{ prompt_buckets = {{ {{ weights = {weights} }} }}, fallback = {weights}, "
            "qps_bands = { {} }, tiers = {}, caps = {}, tokens_per_ascii_byte = 0.3, "
            "tokens_per_non_ascii_byte = 0.2 }\n",
            encoding="utf-8",
        )
        settings += [*_PLAIN, f"server.policy_file={policy}"]
    return settings
