"""The control files of emulated device classes: what a person or a test makes them suffer."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mirror_sd.admin_client import is_listening, stack_on
from mirror_sd.errors import SetupError

FAULTS = ("hang", "crash", "slow_start")


def change(
    port: int, device_class: str, changes: Mapping[str, Any], *, is_reset: bool = False
) -> dict[str, Any]:
    """Merge `changes` into the control file of a class; returns its new content.

    Raises `SetupError` where no stack runs on `port` or the class is not an emulated one of it.
    """
    config, run = stack_on(port)
    if not is_listening(config):
        raise SetupError(
            f"the stack on port {port} does not answer; where it was killed, `mirror-sd down` "
            "clears what it left"
        )
    emulated = [str(name) for name, pool in config.pools.items() if pool.engine == "emulated"]
    if device_class not in emulated:
        shown = ", ".join(emulated) or "none"
        raise SetupError(f"{device_class!r} is no emulated class of this stack (it has: {shown})")
    for key, value in changes.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SetupError(f"{key} is {value}; it must be a finite number")
    path = run.emulation(device_class)
    control = {} if is_reset else _read(path)
    control = {**control, **changes}
    control = {key: value for key, value in control.items() if value is not None}
    write(path, control)
    return control


def write(path: Path, control: Mapping[str, Any]) -> None:
    """Replace a control file at once: a worker reads the old one or the new one."""
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(number, "w", encoding="utf-8") as file:
        json.dump(control, file)
    Path(temporary).replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}; write it anew by --reset") from error
    if not isinstance(found, dict):
        raise SetupError(f"{path} is no JSON object; write it anew by --reset")
    return found
