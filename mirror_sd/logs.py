"""Log handlers, set once by the entry point of each process and by nothing else.

Lines go to standard error: plain text, or JSON objects where `MIRROR_SD_LOG_JSON` is 1 (which is
how `--log-json` reaches the children). `MIRROR_SD_LOG_LEVEL` names the level.
"""

from __future__ import annotations

import json
import logging
import os

from mirror_sd.errors import ConfigError

ENV_JSON = "MIRROR_SD_LOG_JSON"
ENV_LEVEL = "MIRROR_SD_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class PlainFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO worker[4711] mirror_sd.engine: text`."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {role}[%(process)d] %(name)s: %(message)s")


class ConsoleFormatter(logging.Formatter):
    """`mirror-sd: text`, for a command whose reader is a person."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"mirror-sd: {level}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `at` is unix time in seconds."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": round(record.created, 3),
            "level": record.levelname,
            "role": self._role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(
    role: str,
    *,
    as_json: bool | None = None,
    level: str | None = None,
    is_console: bool = False,
) -> None:
    """Send the root logger to standard error; None takes the environment's choice.

    Raises `ConfigError` for a level that does not exist.
    """
    if as_json is None:
        as_json = os.environ.get(ENV_JSON) == "1"
    chosen = (level or os.environ.get(ENV_LEVEL) or "INFO").upper()
    if chosen not in LEVELS:
        raise ConfigError(f"log level {chosen!r} is not one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    if as_json:
        handler.setFormatter(JsonFormatter(role))
    else:
        handler.setFormatter(ConsoleFormatter() if is_console else PlainFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen)
    logging.captureWarnings(True)
