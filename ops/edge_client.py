"""The stack as the probe meets it: HTTP to nginx on this machine, each request with a deadline."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOOPBACK = "127.0.0.1"


class EdgeError(Exception):
    """No answer, or not the one that was asked for; `is_refusal`: the edge looked and said no."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class EdgeClient:
    """One connection a request: once a second that costs nothing, and survives every reload."""

    def __init__(
        self, host: str, port: int, admin_port: int, token_file: Path, timeout_s: float = 1.0
    ) -> None:
        self._public = (host, port)
        self._admin = (_LOOPBACK, admin_port)
        self._token_file = token_file
        self._timeout_s = timeout_s

    def state(self) -> dict[str, Any]:
        """`GET /admin/state`, without the rates of each tenant. Raises `EdgeError`."""
        content = self._ask(self._admin, "GET", "/admin/state?tenants=no", self._bearer())
        try:
            state = json.loads(content)
        except ValueError as error:
            raise EdgeError(f"/admin/state is not JSON: {error}") from error
        if not isinstance(state, dict):
            raise EdgeError("/admin/state is not a JSON object")
        return state

    def put_weights(self, document: Mapping[str, Any]) -> None:
        """`PUT /admin/weights`. Raises `EdgeError`."""
        try:
            body = json.dumps(document, allow_nan=False).encode()
        except ValueError as error:
            raise EdgeError(f"the document is not sent: {error}") from error
        headers = {"Content-Type": "application/json", **self._bearer()}
        self._ask(self._admin, "PUT", "/admin/weights", headers, body)

    def metrics(self) -> str:
        """`GET /metrics`. Raises `EdgeError`."""
        return self._ask(self._public, "GET", "/metrics", {}).decode(errors="replace")

    def _bearer(self) -> dict[str, str]:
        try:
            token = self._token_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise EdgeError(f"cannot read the admin token: {error}") from error
        return {"Authorization": f"Bearer {token}"}

    def _ask(
        self,
        address: tuple[str, int],
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> bytes:
        connection = http.client.HTTPConnection(*address, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise EdgeError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            shown = content[:200].decode(errors="replace").strip()
            raise EdgeError(
                f"{method} {path}: {answer.status} {shown}", is_refusal=400 <= answer.status < 500
            )
        return content
