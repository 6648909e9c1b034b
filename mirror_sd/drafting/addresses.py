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


def endpoints_for(config: Config, run: RunDir, verifier: str, plan: Plan) -> list[tuple[str, str]]:
    """(class of the drafter, endpoint) of all that draft for the workers of a class: those that the
    settings or else the plan gives it. A drafter that neither gives anybody drafts for all."""
    found = []
    for name, drafter in config.drafters.items():
        planned = {pair.verifier for pair in plan.verifiers_of(str(name))}
        if drafter.serves or not planned:
            is_paired = drafter.serves_class(verifier, str(name))
        else:
            is_paired = verifier in planned
        if is_paired:
            found += [
                (str(name), endpoint(config, run, str(name), index))
                for index in range(drafter.workers)
            ]
    return found
