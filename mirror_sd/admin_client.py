"""The admin endpoints of a running stack, by the token in its run directory."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlencode

from pydantic import ValidationError

from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir

JSON = "application/json"
LUA = "text/x-lua"


class AdminClient:
    """Asks `127.0.0.1:port`; every answer but a 2xx raises `SetupError` with its message."""

    def __init__(self, port: int, token: str, timeout_s: float = 10.0) -> None:
        self.port = port
        self._token = token
        self._timeout_s = timeout_s

    @classmethod
    def of_stack(cls, port: int) -> Self:
        """Raises `SetupError` where no stack of this user runs on its public port `port`."""
        config, run = stack_on(port)
        try:
            token = run.admin_token.read_text(encoding="ascii").strip()
        except OSError as error:
            raise SetupError(f"cannot read {run.admin_token}: {error.strerror}") from error
        return cls(config.server.effective_admin_port, token)

    def get(self, path: str, query: Mapping[str, str | int | float] | None = None) -> Any:
        """The JSON of `path`, as `/admin/weights`."""
        return self._ask("GET", f"{path}?{urlencode(query)}" if query else path, None, JSON)

    def put(self, path: str, document: bytes, content_type: str = JSON) -> Any:
        """The JSON that answers the document."""
        return self._ask("PUT", path, document, content_type)

    def post(self, path: str, document: Mapping[str, object]) -> Any:
        """The JSON that answers the document."""
        return self._ask("POST", path, json.dumps(document).encode(), JSON)

    def _ask(self, method: str, path: str, body: bytes | None, content_type: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._timeout_s)
        headers = {"Authorization": f"Bearer {self._token}"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            why = error or type(error).__name__
            raise SetupError(f"admin port {self.port}: {method} {path}: {why}") from error
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise SetupError(_message(status, content))
        try:
            return json.loads(content) if content.strip() else None
        except ValueError as error:
            raise SetupError(f"admin port {self.port}: {path} answered no JSON") from error


def stack_on(port: int) -> tuple[Config, RunDir]:
    """The configuration and run directory of the stack on a port.

    Raises `SetupError` where none of this user runs there.
    """
    run = RunDir.of_port(port)
    try:
        text = run.config_json.read_text(encoding="utf-8")
    except OSError as error:
        raise SetupError(f"no stack runs on port {port}") from error
    try:
        return Config.model_validate_json(text), run
    except ValidationError as error:
        raise SetupError(
            f"{run.config_json} is damaged, or of another version: stop what runs on port {port} "
            "by `mirror-sd down`"
        ) from error


def is_listening(config: Config) -> bool:
    """Whether the admin port of that stack takes connections; what was killed leaves its run
    directory behind."""
    try:
        socket.create_connection(("127.0.0.1", config.server.effective_admin_port), 1.0).close()
    except OSError:
        return False
    return True


def _message(status: int, content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the admin port answered {status}: {content[:300].decode(errors='replace')}"
