"""Posts alerts to a URL, on a thread of its own: a slow receiver never holds up a reading."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mirror_sd import telemetry

_log = logging.getLogger(__name__)

_LONGEST_QUEUE = 64
_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0
_ANSWER_S = 5.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its body."""

    def redirect_request(self, *_: object) -> None:
        return None


class Webhook:
    """`send` never waits; `start` before it, `stop` when all is over.

    An alert is posted at most five times, in order, with pauses that double. When 64 wait, the
    oldest gives way. The configuration has checked `url`.
    """

    def __init__(self, url: str, *, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        parts = urlsplit(url)
        self._url = url
        # The rest of a webhook's URL is often its secret.
        self._shown = f"{parts.scheme}://{parts.hostname}"
        self._first_pause_s = first_pause_s
        self._waiting: queue.Queue[Mapping[str, Any]] = queue.Queue(_LONGEST_QUEUE)
        self._is_stopped = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirect)
        # A daemon: a receiver that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, alert: Mapping[str, Any]) -> None:
        """Post it soon."""
        while True:
            try:
                self._waiting.put_nowait(alert)
                return
            except queue.Full:
                self._drop_oldest()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Give what waits a last moment."""
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _drop_oldest(self) -> None:
        try:
            lost = self._waiting.get_nowait()
        except queue.Empty:
            return
        telemetry.PROBE_WEBHOOK_POSTS.labels("dropped").inc()
        _log.error("too many alerts wait for %s: dropped %s", self._shown, lost.get("summary"))

    def _run(self) -> None:
        while not (self._is_stopped.is_set() and self._waiting.empty()):
            try:
                alert = self._waiting.get(timeout=0.2)
            except queue.Empty:
                continue
            self._deliver(alert)

    def _deliver(self, alert: Mapping[str, Any]) -> None:
        pause_s = self._first_pause_s
        trouble = ""
        for attempt in range(_ATTEMPTS):
            if attempt and self._is_stopped.wait(pause_s * 2 ** (attempt - 1)):
                break
            trouble = self._post(alert)
            if not trouble:
                telemetry.PROBE_WEBHOOK_POSTS.labels("delivered").inc()
                return
        telemetry.PROBE_WEBHOOK_POSTS.labels("failed").inc()
        _log.error("%s took no alert (%s): %s", self._shown, trouble, alert.get("summary"))

    def _post(self, alert: Mapping[str, Any]) -> str:
        """What went wrong, empty where nothing did."""
        request = urllib.request.Request(
            self._url,
            json.dumps(alert, allow_nan=False).encode(),
            {"Content-Type": "application/json", "User-Agent": "mirror-sd"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as answer:
                answer.read(1024)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__
        return ""
