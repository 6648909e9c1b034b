"""Where a running stack keeps its files, and what its processes find there."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from mirror_sd.config import Config
from mirror_sd.config_source import describe
from mirror_sd.errors import ConfigError


class RunDir:
    """The directory of one running stack: sockets, pid, resolved configuration, logs, metrics.

    It is gone when the stack has stopped. Paths of unix sockets are limited to 107 bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_port(cls, port: int) -> RunDir:
        """`$MIRROR_SD_RUN_DIR/<port>`, by default `/tmp/mirror-sd-<uid>/<port>`."""
        base = os.environ.get("MIRROR_SD_RUN_DIR") or f"/tmp/mirror-sd-{os.getuid()}"
        return cls(Path(base) / str(port))

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def supervisor_pid(self) -> Path:
        return self.path / "supervisor.pid"

    @property
    def tokenizer(self) -> Path:
        """Directory with tokenizer.json, chat_template.jinja and model.json for the gateways."""
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """The prometheus_client multiprocess directory of this stack."""
        return self.path / "metrics"

    @property
    def nginx(self) -> Path:
        """nginx's prefix: its conf, pid, temporary files."""
        return self.path / "nginx"

    @property
    def gateway_endpoint(self) -> str:
        """Where the broker's ROUTER for gateways is bound."""
        return f"ipc://{self.path}/broker-gateway.sock"

    @property
    def worker_endpoint(self) -> str:
        """Where the broker's ROUTER for workers is bound."""
        return f"ipc://{self.path}/broker-worker.sock"

    @property
    def admin_token(self) -> Path:
        """The bearer token of the admin endpoints, readable by the stack's user only."""
        return self.path / "admin-token"

    def emulation(self, device_class: str) -> Path:
        """Temperature, utilisation and faults of an emulated class (`mirror-sd emulate`)."""
        return self.path / f"emulation-{device_class}.json"

    def drafter_ready(self, device_class: str, index: int) -> Path:
        """There once this drafter has loaded its model and listens."""
        return self.path / f"drafter-{device_class}-{index}.ready"

    def gateway_socket(self, index: int) -> Path:
        """The unix socket that gateway `index` serves HTTP on."""
        return self.path / f"gateway-{index}.sock"


def from_run_dir() -> tuple[Config, RunDir]:
    """What a child process of the supervisor was given (`MIRROR_SD_CONFIG_JSON`)."""
    path = os.environ.get("MIRROR_SD_CONFIG_JSON")
    if path is None:
        raise ConfigError("MIRROR_SD_CONFIG_JSON is not set: start this process by `mirror-sd up`")
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Config.model_validate_json(text), RunDir(Path(path).parent)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(describe(error)) from error
