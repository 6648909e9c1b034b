"""Where the drafters of a stack listen."""

from __future__ import annotations

from mirror_sd.config import Config
from mirror_sd.run_dir import RunDir


def endpoint(config: Config, run: RunDir, device_class: str, index: int) -> str:
    """Of drafter `index` of a class."""
    drafters = {str(name): drafter for name, drafter in config.drafters.items()}
    address = drafters[device_class].address
    if address is None:
        return f"ipc://{run.path}/drafter-{device_class}-{index}.sock"
    base, _, port = address.rpartition(":")
    return f"{base}:{int(port) + index}"


def endpoints_for(config: Config, run: RunDir, verifier: str) -> list[tuple[str, str]]:
    """(class of the drafter, endpoint) of all that draft for the workers of a class."""
    return [
        (str(name), endpoint(config, run, str(name), index))
        for name, drafter in config.drafters.items()
        if drafter.serves_class(verifier, str(name))
        for index in range(drafter.workers)
    ]
