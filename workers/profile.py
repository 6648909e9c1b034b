"""What a device is expected to do: what an emulated one keeps to, and what is planned with before a
real one has measured itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mirror_sd.config import EmulationConfig
from mirror_sd.errors import ConfigError
from mirror_sd.messages import Pace
from mirror_sd.scheduler.device_profile import DeviceProfile

_PROFILES = Path(__file__).with_name("profiles")
_USUAL_ENGINES = {"cpu": "native", "gpu": "torch", "tpu": "xla"}


@dataclass(frozen=True, slots=True)
class Profile:
    """A step takes `latency_ms` whatever its batch, longer where it reads more prompt tokens than
    `prefill_tok_s` lets it. At latency 0 nothing takes any time."""

    latency_ms: float
    max_batch: int
    prefill_tok_s: float

    def step_s(self, prompt_tokens: int) -> float:
        """Duration of a step that reads so many prompt tokens, in seconds."""
        if self.latency_ms == 0:
            return 0.0
        # A decoding step waits for memory, so reading prompts overlaps with it.
        return max(self.latency_ms / 1e3, prompt_tokens / self.prefill_tok_s)

    def pace(self, slowdown: float = 1.0) -> Pace | None:
        """As a real worker measures it, `slowdown` times slower; None where nothing takes time."""
        step_s = slowdown * self.latency_ms / 1e3
        if step_s == 0:
            return None
        rows = (1, self.max_batch) if self.max_batch > 1 else (1,)
        return Pace(
            curve=tuple((count, step_s) for count in rows),
            prefill_tok_s=self.prefill_tok_s / slowdown,
        )


def load(device_class: str, changes: EmulationConfig) -> Profile:
    """The class's own profile with what the configuration changes; raises `ConfigError`."""
    values = _values(_PROFILES / f"{device_class}.yaml")
    values |= changes.model_dump(exclude_none=True)
    return Profile(
        latency_ms=float(values["latency_ms"]),
        max_batch=int(values["max_batch"]),
        prefill_tok_s=float(values["prefill_tok_s"]),
    )


def expected(
    device_class: str, engine: str, device: str, slots: int, changes: EmulationConfig
) -> DeviceProfile:
    """What to plan with before a worker of the class has measured itself: the engine's own figures
    where it is to compute on the CPU and has some, else those of the class. Raises `ConfigError`.
    """
    if engine == "auto":
        engine = _USUAL_ENGINES[device_class]
    is_on_cpu = device == "cpu" or (device == "auto" and device_class == "cpu")
    path = _PROFILES / f"{engine}-cpu.yaml"
    if is_on_cpu and path.exists():
        values = _values(path)
        curve = tuple((int(rows), float(ms) / 1e3) for rows, ms in values["curve_ms"].items())
        return DeviceProfile(device_class, curve, float(values["prefill_tok_s"]), slots)
    pretended = load(device_class, changes)
    if engine == "emulated":
        slots = min(slots, pretended.max_batch)
    pace = pretended.pace()
    # A device whose steps take no time still has to be planned with.
    curve, prefill_tok_s = (((1, 1e-6),), 1e9) if pace is None else (pace.curve, pace.prefill_tok_s)
    return DeviceProfile(device_class, curve, prefill_tok_s, slots)


def _values(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return values
