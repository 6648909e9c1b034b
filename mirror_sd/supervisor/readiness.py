"""Whether a stack is ready: healthy, with a worker of each class, and one token has come through
every process."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Collection
from pathlib import Path

from mirror_sd.supervisor.unix_connection import UnixConnection

_POLL_S = 0.1
_ANSWER_S = 30.0
_ANSWER_BYTES = 1 << 20


class ReadinessCheck(threading.Thread):
    """Asks through nginx until a generation succeeds; `is_ready` tells, `last_answer` says why not.

    Where nginx asks for an API key, which nobody but its owner has, the generation is asked of
    `gateway`, a socket behind it. That one also tells whether all `classes` have a worker: a class
    that can never start is to fail the start, not to be started again for ever. A thread, because
    a request may take long while the supervisor must see children die.
    """

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        gateway: Path | None = None,
        classes: Collection[str] = (),
    ) -> None:
        super().__init__(name="readiness", daemon=True)
        self.is_ready = False
        self.last_answer = "nothing answered yet"
        self._address = (host, port)
        self._gateway = gateway
        self._model = model
        self._classes = frozenset(classes)
        self._content = b""
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not self._is_stopped.is_set():
            is_healthy = self._ask("GET", "/health", None) == 200
            if is_healthy and self._has_workers() and self._generates():
                self.is_ready = True
                return
            self._is_stopped.wait(_POLL_S)

    def stop(self) -> None:
        self._is_stopped.set()

    def _has_workers(self) -> bool:
        """Whether each class has one."""
        if self._gateway is None or not self._classes:
            return True
        if self._ask("GET", "/admin/state", None, self._gateway) != 200:
            return False
        try:
            there = {worker["device_class"] for worker in json.loads(self._content)["workers"]}
        except (ValueError, KeyError, TypeError) as error:
            self.last_answer = f"GET /admin/state: unreadable ({error})"
            return False
        missing = sorted(self._classes - there)
        if missing:
            self.last_answer = f"no worker yet: {', '.join(missing)}"
        return not missing

    def _generates(self) -> bool:
        probe = {"model": self._model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        status = self._ask("POST", "/v1/completions", probe)
        if status == 401 and self._gateway is not None:
            status = self._ask("POST", "/v1/completions", probe, self._gateway)
        return status == 200

    def _ask(
        self, method: str, path: str, body: dict[str, object] | None, gateway: Path | None = None
    ) -> int | None:
        """The status of the answer; None where there is none."""
        connection = (
            http.client.HTTPConnection(*self._address, timeout=_ANSWER_S)
            if gateway is None
            else UnixConnection(gateway, _ANSWER_S)
        )
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, content = answer.status, answer.read(_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.last_answer = f"{method} {path}: {error or type(error).__name__}"
            return None
        finally:
            connection.close()
        self._content = content
        shown = content[:2048].decode(errors="replace").strip()
        self.last_answer = f"{method} {path}: {status} {shown}"
        return status
