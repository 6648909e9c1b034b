"""HTTP to a gateway's own socket, past nginx."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """A connection to the unix socket `path`; `timeout_s` bounds each wait."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
