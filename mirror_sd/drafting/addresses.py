"""Where the drafters of a stack listen."""

from __future__ import annotations

from mirror_sd.config import Config
from mirror_sd.run_dir import RunDir
from mirror_sd.scheduler.splitter import Plan


def endpoint(config: Config, run: RunDir, device_class: str, index: int) -> str:
    """Of drafter `index` of a class."""
    address = config.drafter(device_class).address
    if address is None:
        return f"ipc://{run.path}/drafter-{device_class}-{index}.sock"
    base, _, port = address.rpartition(":")
    return f"{base}:{int(port) + index}"


def verifiers_of(config: Config, device_class: str, plan: Plan) -> set[str]:
    """The pools whose workers the drafters of a class draft for: those that the settings or else
    the plan gives them, and all others where neither does; none where no drafter is asked."""
    if not config.speculation.asks_drafters:
        return set()
    drafter = config.drafter(device_class)
    planned = {pair.verifier for pair in plan.verifiers_of(device_class)}
    if drafter.serves or not planned:
        return {str(name) for name in config.pools if drafter.serves_class(name, device_class)}
    return planned


def endpoints_for(config: Config, run: RunDir, verifier: str, plan: Plan) -> list[tuple[str, str]]:
    """(class of the drafter, endpoint) of all that draft for the workers of a class."""
    return [
        (str(name), endpoint(config, run, name, index))
        for name, drafter in config.drafters.items()
        if verifier in verifiers_of(config, name, plan)
        for index in range(drafter.workers)
    ]
