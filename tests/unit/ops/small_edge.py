"""A small HTTP server in the place of nginx: admin endpoints, metrics, and a webhook's receiver."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-token"


class SmallEdge(ThreadingHTTPServer):
    """`state` and `metrics` are served, `documents` and `alerts` are what was taken.

    `status` is the answer to weights, `failures` how many posts to /hook fail first, `delay_s` how
    long such a post takes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state: Any = {"workers": [], "queues": []}
        self.metrics = ""
        self.documents: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.status = 200
        self.failures = 0
        self.delay_s = 0.0
        self.posts = 0


class _Handler(BaseHTTPRequestHandler):
    server: SmallEdge

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, self.server.metrics)
        elif self._is_authorised():
            self._answer(200, json.dumps(self.server.state))

    def do_PUT(self) -> None:
        document = self._body()
        if self._is_authorised():
            if self.server.status == 200:
                self.server.documents.append(document)
            self._answer(self.server.status, '{"error": {"message": "as it is told"}}')

    def do_POST(self) -> None:
        alert = self._body()
        time.sleep(self.server.delay_s)
        self.server.posts += 1
        if self.server.failures > 0:
            self.server.failures -= 1
            self._answer(503, "later")
            return
        self.server.alerts.append(alert)
        self._answer(204, "")

    def _body(self) -> Any:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        return json.loads(text, parse_constant=_refuse)

    def _is_authorised(self) -> bool:
        is_authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not is_authorised:
            self._answer(401, "no")
        return is_authorised

    def _answer(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def small_edge() -> Iterator[SmallEdge]:
    with SmallEdge() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def worker(device_class: str, **fields: Any) -> dict[str, Any]:
    """A worker as `/admin/state` shows it."""
    return {
        "worker_id": f"{device_class}-0",
        "device_class": device_class,
        "slots": 8,
        "in_flight": 0,
        "silent_s": 0.1,
        "draining": False,
        **fields,
    }
