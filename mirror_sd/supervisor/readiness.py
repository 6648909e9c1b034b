"""Whether a stack is ready: healthy, and one token has come through every process."""

from __future__ import annotations

import http.client
import json
import threading

_POLL_S = 0.1
_ANSWER_S = 30.0


class ReadinessCheck(threading.Thread):
    """Asks through nginx until a generation succeeds; `is_ready` tells, `last_answer` says why not.

    A thread, because a request may take long while the supervisor must see children die.
    """

    def __init__(self, host: str, port: int, model: str) -> None:
        super().__init__(name="readiness", daemon=True)
        self.is_ready = False
        self.last_answer = "nothing answered yet"
        self._address = (host, port)
        self._model = model
        self._is_stopped = threading.Event()

    def run(self) -> None:
        probe = {"model": self._model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        while not self._is_stopped.is_set():
            if self._ask("GET", "/health", None) and self._ask("POST", "/v1/completions", probe):
                self.is_ready = True
                return
            self._is_stopped.wait(_POLL_S)

    def stop(self) -> None:
        self._is_stopped.set()

    def _ask(self, method: str, path: str, body: dict[str, object] | None) -> bool:
        connection = http.client.HTTPConnection(*self._address, timeout=_ANSWER_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, content = answer.status, answer.read(2048)
        except (OSError, http.client.HTTPException) as error:
            self.last_answer = f"{method} {path}: {error or type(error).__name__}"
            return False
        finally:
            connection.close()
        self.last_answer = f"{method} {path}: {status} {content.decode(errors='replace').strip()}"
        return status == 200
