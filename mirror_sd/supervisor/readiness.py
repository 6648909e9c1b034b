"""Whether a stack is ready: healthy, and one token has come through every process."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path

from mirror_sd.supervisor.unix_connection import UnixConnection

_POLL_S = 0.1
_ANSWER_S = 30.0


class ReadinessCheck(threading.Thread):
    """Asks through nginx until a generation succeeds; `is_ready` tells, `last_answer` says why not.

    Where nginx asks for an API key, which nobody but its owner has, the generation is asked of
    `gateway`, a socket behind it. A thread, because a request may take long while the supervisor
    must see children die.
    """

    def __init__(self, host: str, port: int, model: str, gateway: Path | None = None) -> None:
        super().__init__(name="readiness", daemon=True)
        self.is_ready = False
        self.last_answer = "nothing answered yet"
        self._address = (host, port)
        self._gateway = gateway
        self._model = model
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not self._is_stopped.is_set():
            if self._ask("GET", "/health", None) == 200 and self._generates():
                self.is_ready = True
                return
            self._is_stopped.wait(_POLL_S)

    def stop(self) -> None:
        self._is_stopped.set()

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
            status, content = answer.status, answer.read(2048)
        except (OSError, http.client.HTTPException) as error:
            self.last_answer = f"{method} {path}: {error or type(error).__name__}"
            return None
        finally:
            connection.close()
        self.last_answer = f"{method} {path}: {status} {content.decode(errors='replace').strip()}"
        return status
