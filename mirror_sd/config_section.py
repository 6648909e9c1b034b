"""What the sections of the configuration share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from mirror_sd.errors import ConfigError

DeviceClass = Literal["cpu", "gpu", "tpu"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]


class Section(BaseModel):
    """Frozen, and strict about what it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


S = TypeVar("S", bound=Section)


def of_class(sections: Mapping[DeviceClass, S], kind: str, device_class: str) -> S:
    """The section of a class among those of a kind, as pool. Raises `ConfigError`."""
    for name, section in sections.items():
        if name == device_class:
            return section
    there = ", ".join(sorted(sections)) or "none"
    raise ConfigError(f"no {kind} {device_class!r} is configured; there are {there}")
