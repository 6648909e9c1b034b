"""Everything that `mirror-sd status` shows, as one JSON document.

The processes come from the operating system, load and workers from the broker by way of a gateway,
weights and degradation from the edge. Whatever does not answer is null; the rest is still shown.
"""

from __future__ import annotations

from typing import Any

from mirror_sd.admin_client import AdminClient, stack_on
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import process_table, run_directory

_ANSWER_S = 2.0


def status(port: int) -> dict[str, Any]:
    """The stack on `port` now.

    Keys: processes, running, waiting, kv_blocks_used, kv_blocks_free, kv_blocks_peak, workers,
    classes, degrade_level, weights_age_s, weights_stale, draining. Raises `SetupError` where none
    runs.
    """
    config, run = stack_on(port)
    pid = run_directory.supervisor_pid(run)
    if pid is None:
        raise SetupError(f"no stack runs on port {port}")
    state = process_table.state(run)
    edge, weights = _edge(config, run)
    return {
        "processes": [process.to_json() for process in process_table.processes(pid)],
        **process_table.summary(state),
        "classes": [
            class_entry(name, pool.engine == "emulated", state, edge, weights)
            for name, pool in config.pools.items()
        ],
        "degrade_level": edge.get("degrade_level"),
        "weights_age_s": edge.get("weights_age_s"),
        "weights_stale": edge.get("weights_stale"),
        "draining": edge.get("draining"),
    }


def class_entry(
    name: str,
    emulated: bool,
    state: dict[str, Any],
    edge: dict[str, Any],
    weights: dict[str, Any],
) -> dict[str, Any]:
    """A class: its workers and queues by the broker, its devices by the probe, its share of the
    traffic by the edge. `weight` lists the shares by prompt length; null `below` is any length."""
    workers = [item for item in state.get("workers") or () if item["device_class"] == name]
    queues = [item for item in state.get("queues") or () if item["device_class"] == name]
    measured = (weights.get("classes") or {}).get(name) or {}
    is_known = bool(state)
    return {
        "class": name,
        "emulated": emulated,
        "workers": len(workers) if is_known else None,
        "slots": sum(item["slots"] for item in workers) if is_known else None,
        "in_flight": sum(item["in_flight"] for item in workers) if is_known else None,
        "queued": {item["tier"]: item["depth"] for item in queues},
        "oldest_wait_s": max((item["oldest_wait_s"] for item in queues), default=None),
        "temperature_c": measured.get("temperature_c"),
        "utilisation": measured.get("utilisation"),
        "memory_pressure": measured.get("memory_pressure"),
        "factor": (edge.get("factors") or {}).get(name),
        "weight": [
            {"below": band.get("below"), "share": (band.get("shares") or {}).get(name, 0.0)}
            for band in edge.get("effective_weights") or ()
        ],
    }


def _edge(config: Config, run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the edge tells of itself, and the probe's document; empty where it tells nothing."""
    try:
        token = run.admin_token.read_text(encoding="ascii").strip()
        client = AdminClient(config.server.effective_admin_port, token, timeout_s=_ANSWER_S)
        edge = client.get("/admin/state")["edge"]
        # What the sensors said is old news where the probe has fallen silent.
        weights = {} if edge["weights_stale"] else client.get("/admin/weights")
    except (SetupError, OSError, LookupError, TypeError):
        return {}, {}
    return edge, weights
