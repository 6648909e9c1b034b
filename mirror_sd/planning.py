"""What `mirror-sd plan` tells: the plan of the running stack, by what its workers have measured, or
that of a configuration, by what is expected of its devices."""

from __future__ import annotations

import dataclasses
import http.client
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mirror_sd import config as configuration
from mirror_sd import model_store
from mirror_sd.admin_client import AdminClient, is_listening, stack_on
from mirror_sd.config import Config
from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.errors import ModelError, SetupError
from mirror_sd.scheduler import measurements
from mirror_sd.scheduler.device_profile import DeviceProfile, DrafterProfile
from mirror_sd.scheduler.measurements import Traffic
from mirror_sd.scheduler.splitter import Demand, DynamicSplitter, Factors, Plan

# Chance of a drafted token, where nothing is known of it: the target's own model in other numbers,
# and a smaller one.
_OWN_MODEL, _OTHER_MODEL = 0.9, 0.7


@dataclass(frozen=True, slots=True)
class Report:
    """A plan, and what it was made from; `is_live` where a running stack was asked."""

    plan: Plan
    devices: tuple[DeviceProfile, ...]
    drafters: tuple[DrafterProfile, ...]
    demand: Demand
    factors: Factors
    is_live: bool

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def policy(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """That policy with the shares of the plan, at any rate of requests."""
        buckets = []
        for split in self.plan.splits:
            bound = {} if split.below is None else {"below": split.below}
            shares = {name: round(share, 4) for name, share in split.shares.items()}
            buckets.append({**bound, "weights": shares})
        return {**policy, "prompt_buckets": buckets, "qps_bands": [{}]}


def splitter(config: Config) -> DynamicSplitter:
    """By what is expected of the configured pools and drafters. Raises `ConfigError`."""
    from workers.profile import expected

    batch, real = config.scheduler.max_batch_size, configuration.EmulationConfig()
    devices = [
        dataclasses.replace(
            expected(name, pool.engine, pool.device, batch.of(name), pool.emulation),
            workers=pool.workers,
        )
        for name, pool in config.pools.items()
    ]
    drafters = [
        DrafterProfile(
            name,
            dataclasses.replace(
                expected(name, drafter.engine, drafter.device, drafter.sessions, real),
                workers=drafter.workers,
            ),
            acceptance=_OWN_MODEL if _has_own_model(config, drafter) else _OTHER_MODEL,
            serves=drafter.serves,
            length=drafter.length,
        )
        for name, drafter in config.drafters.items()
    ]
    longest = config.speculation.max_tokens
    return DynamicSplitter(devices, drafters, max_tokens=longest)


def _has_own_model(config: Config, drafter: DrafterConfig) -> bool:
    """Whether it is the target's model, by whatever name."""
    if drafter.model is None or drafter.model == config.model.path:
        return True
    try:
        files = [model_store.resolve(name) for name in (config.model.path, drafter.model)]
    except ModelError:  # told of by whoever loads it
        return False
    return files[0].path.resolve() == files[1].path.resolve()


def explain(
    wish: Mapping[str, float], port: int, file: Path | None, overrides: Sequence[str]
) -> Report:
    """`wish` may name requests_per_s, prompt_tokens and answer_tokens, instead of what is measured.

    Asks the stack on `port`, unless a configuration is named or none runs. Raises `SetupError`.
    """
    if file is None and not overrides and (found := _running(port)) is not None:
        return _of_stack(*found, wish)
    made = splitter(configuration.load(file, overrides))
    return _report(made, _asked(Demand(), wish), Factors(), is_live=False)


def _running(port: int) -> tuple[Config, AdminClient] | None:
    try:
        config, _ = stack_on(port)
        return (config, AdminClient.of_stack(port)) if is_listening(config) else None
    except SetupError:
        return None


def _of_stack(config: Config, client: AdminClient, wish: Mapping[str, float]) -> Report:
    state = client.get("/admin/state")
    edge, workers = state.get("edge") or {}, state.get("workers") or []
    made = splitter(config)
    for device in made.devices:
        found = measurements.profile(device.device_class, workers, device)
        made.observe(found or device)
    text = _metrics(config)
    paces = drafter_paces(text)
    for drafter in made.drafters:
        made.observe(measurements.drafter(paces.get(drafter.name, 0.0), drafter))
    demand = measurements.demand(edge, workers, traffic(text))
    weights = {} if edge.get("weights_stale", True) else client.get("/admin/weights")
    classes = weights.get("classes") or {}
    health = {name: entry.get("health", entry["factor"]) for name, entry in classes.items()}
    factors = Factors(health, weights.get("draft_factor", 1.0))
    return _report(made, _asked(demand, wish), factors, is_live=True)


def _asked(demand: Demand, wish: Mapping[str, float]) -> Demand:
    changes: dict[str, Any] = dict(wish)
    return dataclasses.replace(demand, **changes)


def _report(made: DynamicSplitter, demand: Demand, factors: Factors, *, is_live: bool) -> Report:
    plan = made.plan(demand, factors)
    return Report(plan, made.devices, made.drafters, demand, factors, is_live)


def traffic(text: str) -> Traffic:
    """What a scrape says was answered since the start. Raises `ValueError` for what is none."""
    counters = measurements.TRAFFIC_COUNTERS
    totals = dict.fromkeys(counters, 0.0)
    for sample in _samples(text, counters):
        if measurements.is_answered(sample.labels):
            totals[sample.name] += sample.value
    return measurements.traffic(totals)


def drafter_paces(text: str) -> Mapping[str, float]:
    """Seconds of a drafted token by class, as a scrape has them. Raises as `traffic` does."""
    found = _samples(text, (measurements.DRAFTER_PACE,))
    return {sample.labels.get("class", ""): sample.value for sample in found}


def _samples(text: str, names: tuple[str, ...]) -> Iterator[Sample]:
    lines = [line for line in text.splitlines() if line.startswith(names)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        yield from (sample for sample in family.samples if sample.name in names)


def _metrics(config: Config) -> str:
    server = config.server
    connection = http.client.HTTPConnection(server.reachable_host, server.port, timeout=5.0)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise SetupError(f"cannot read /metrics on port {server.port}: {error}") from error
    finally:
        connection.close()
    return text if answer.status == 200 else ""


def in_words(report: Report) -> Iterator[str]:
    """The lines for a person."""
    plan, demand = report.plan, report.demand
    if not report.is_live:
        yield "no stack was asked: by what is expected of such devices"
    yield (
        f"load {plan.load:.2f}: {demand.requests_per_s:.2f} requests a second of"
        f" {demand.prompt_tokens:.0f} prompt and {demand.answer_tokens:.0f} answer tokens"
    )
    for device in report.devices:
        yield _device_line(device, report.factors)
    floor = 0
    for split in plan.splits:
        bound = f"from {floor}" if split.below is None else f"from {floor} to {split.below - 1}"
        shares = sorted(split.shares.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)
        yield f"prompts {bound} tokens: {parts}"
        yield from (f"- {reason}" for reason in split.reasons)
        floor = split.below or floor
    for pair in plan.pairs:
        yield (
            f"drafter {pair.drafter} for {pair.verifier}: {pair.length} tokens a draft;"
            f" {pair.speedup:.2f} times the speed, {pair.serial_speedup:.2f} without overlap"
        )
        yield f"- {pair.reason}"
    yield from (f"not drafted on another class: {reason}" for reason in plan.reasons)


def _device_line(device: DeviceProfile, factors: Factors) -> str:
    health = factors.health.get(device.device_class, 1.0)
    held_back = "" if health == 1.0 else f"; the probe leaves {health:.2f} of it"
    return (
        f"{device.device_class}: {device.workers} workers, {device.slots} sequences each;"
        f" {1e3 * device.latency_s:.1f} ms a token alone, {device.tokens_per_s:.0f} tokens a second"
        f" in all, prompts {device.prefill_tok_s:.0f} ({device.origin}){held_back}"
    )
