"""The section `drafters` of the configuration: models that draft for workers of other classes."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from mirror_sd.config_section import DeviceClass, Precision, Section

# Both ends use it: a worker cannot connect to `*`, and ZeroMQ knows no path, user or query, and
# IPv6 only where it is told to.
_ADDRESS = re.compile(r"tcp://[A-Za-z0-9._-]+:[1-9][0-9]{0,4}")
_LAST_PORT = 65_535


class DrafterConfig(Section):
    engine: Literal["auto", "native", "torch", "xla", "onnxruntime", "transformers"] = Field(
        "auto",
        description="back end of the drafters; auto: native on the CPU, xla on a TPU, else torch",
    )
    device: str = Field("auto", description="device of the drafters; auto: that of their class")
    precision: Precision = Field("auto", description="as pools.CLASS.precision")
    model: str | None = Field(
        None, description="model with the target's tokenizer; default: the target's own"
    )
    workers: int = Field(1, ge=1, le=64, description="drafter processes")
    threads: int | None = Field(
        None, ge=1, description="threads a drafter; default: its share of the cores"
    )
    cores: tuple[int, ...] | None = Field(
        None, min_length=1, description="CPU numbers to be pinned to; default: not pinned"
    )
    serves: tuple[DeviceClass, ...] = Field(
        (), description="classes whose workers it drafts for; default: all other classes"
    )
    overlap: bool = Field(True, description="draft on while the verifier verifies")
    length: int | None = Field(
        None, ge=1, le=32, description="tokens of a proposal; default: by what is accepted"
    )
    sessions: int = Field(
        32, ge=1, le=4096, description="sequences that a drafter drafts for at once"
    )
    address: str | None = Field(
        None,
        description="tcp://HOST:PORT to listen on, without encryption, each drafter one port on;"
        " default: a socket in the run directory",
    )

    @field_validator("address")
    @classmethod
    def _address_is_tcp(cls, address: str | None) -> str | None:
        if address is not None and not _ADDRESS.fullmatch(address):
            raise ValueError("write it as tcp://HOST:PORT, HOST a name or an IPv4 address")
        return address

    @model_validator(mode="after")
    def _each_has_a_port(self) -> Self:
        if self.address is not None:
            last = int(self.address.rpartition(":")[2]) + self.workers - 1
            if last > _LAST_PORT:
                raise ValueError(f"{self.workers} drafters from {self.address} on need port {last}")
        return self

    def serves_class(self, device_class: str, own_class: str) -> bool:
        """Whether it drafts for the workers of `device_class`, itself being of `own_class`."""
        return device_class in self.serves if self.serves else device_class != own_class
