"""A real nginx, rendered from the template, in front of stand-in gateways on unix sockets."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from mirror_sd.supervisor.edge import find_nginx
from mirror_sd.supervisor.preflight import free_ports

ROOT = Path(__file__).resolve().parents[2]
EDGE = ROOT / "openresty"
CHAT = "/v1/chat/completions"
ADMIN_TOKEN = "token-of-the-tests"
MAX_BODY_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 1


def wait_until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about within {timeout_s} s")
        time.sleep(0.01)


class Upstream:
    """One stand-in gateway process (`upstream.py`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.stop()
        self.path.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("upstream.py")), str(self.path)]
        )
        wait_until(self.path.exists)

    def stop(self) -> None:
        """Kill it; its socket file stays and refuses, as after a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def seen(self) -> dict[str, Any]:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.path))) as client:
            seen: dict[str, Any] = client.get("http://gateway/seen").json()
            return seen


class Edge:
    """nginx and its gateways; `user`: the account that nginx's master runs as."""

    def __init__(
        self,
        run_dir: Path,
        *,
        gateways: int = 2,
        user: str | None = None,
        classes: tuple[str, ...] = ("cpu",),
    ) -> None:
        self.run_dir = run_dir
        self.user = user
        self.classes = classes
        self.nginx = find_nginx()
        self.port, self.admin_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self.policy_file = run_dir / "policy.lua"
        self.keys_file = run_dir / "keys.json"
        self.gateways = [Upstream(run_dir / f"gateway-{index}.sock") for index in range(gateways)]
        self.log = run_dir / "error.log"
        self.process: subprocess.Popen[bytes] | None = None

    def rendered(self, **changes: str) -> str:
        """The configuration, with other values for some placeholders."""
        values = {
            "load_modules": "\n".join(f"load_module {path};" for path in self.nginx.modules),
            "user_line": f"user {pwd.getpwuid(os.getuid()).pw_name};" if self.user is None else "",
            "run_dir": self.run_dir,
            "error_log": f"{self.log} info",
            "access_log": f"{self.run_dir}/access.log mirror",
            "lua_path": f"{EDGE}/lua/?.lua;;",
            "lua_cpath": ";;",
            "html_dir": EDGE / "html",
            "listen": f"127.0.0.1:{self.port}",
            "admin_listen": f"127.0.0.1:{self.admin_port}",
            "admin_token_file": self.run_dir / "admin-token",
            "policy_file": self.policy_file,
            "keys_file": self.keys_file,
            "may_be_open": "true",
            "gateway_servers": ",".join(f"unix:{gateway.path}" for gateway in self.gateways),
            "classes": ",".join(self.classes),
            "models": "m",
            "max_body_bytes": MAX_BODY_BYTES,
            "body_timeout_s": BODY_TIMEOUT_S,
            "request_timeout_s": 30,
        }
        template = string.Template((EDGE / "nginx.conf.template").read_text())
        return template.substitute(values | changes)

    def render(self) -> Path:
        prefix = self.run_dir / "nginx"
        prefix.mkdir(exist_ok=True)
        if self.user is not None:
            shutil.chown(prefix, self.user)
            shutil.chown(self.run_dir, self.user)
        (self.run_dir / "admin-token").write_text(ADMIN_TOKEN)
        shutil.copy(EDGE / "lua" / "mirror" / "policy.lua", self.policy_file)
        conf = prefix / "nginx.conf"
        conf.write_text(self.rendered())
        return conf

    def start(self) -> None:
        conf = self.render()
        for gateway in self.gateways:
            gateway.start()
        command = [
            str(self.nginx.binary),
            "-p",
            str(conf.parent),
            "-c",
            str(conf),
            "-e",
            str(self.log),
        ]
        self.process = subprocess.Popen(command, user=self.user)
        wait_until(self._is_listening)

    def _is_listening(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(10)
        for gateway in self.gateways:
            gateway.stop()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def worker_pids(self) -> list[int]:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def metric(self, sample: str) -> float:
        """The value of a sample, written as in the exposition; 0 where it is absent."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Ask the admin server, with its token."""
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"} | options.pop("headers", {})
        url = self.admin_url + path
        return httpx.request(method, url, headers=headers, timeout=10, verify=False, **options)

    def put_weights(self, factors: dict[str, float], **more: Any) -> httpx.Response:
        """Put a weight document of now; `more` replaces its keys."""
        classes = {name: {"factor": factor} for name, factor in factors.items()}
        document = {"version": 1, "at": time.time(), "classes": classes, "degrade_level": 0}
        return self.admin("PUT", "/admin/weights", json=document | more)

    def in_flight(self) -> list[float]:
        return [
            self.metric(f'mirror_edge_in_flight{{gateway="{index}"}}')
            for index in range(len(self.gateways))
        ]

    def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes as they are and return what comes back: one answer if it has a length, else
        all until nginx closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(data)
            if half_close:
                link.shutdown(socket.SHUT_WR)
            answer = b""
            while part := link.recv(65536):
                answer += part
                length = re.search(rb"\r\nContent-Length: (\d+)\r\n(?:.*?\r\n)?\r\n", answer, re.S)
                if length and len(answer) >= length.end() + int(length[1]):
                    break
            return answer


def error_of(body: str | bytes) -> dict[str, Any]:
    """The error object of a body, checked to have the OpenAI shape."""
    document = json.loads(body)
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def chat(edge: Edge, body: dict[str, Any], **options: Any) -> httpx.Response:
    """Post a JSON body to the chat path."""
    # A context for TLS would cost 20 ms and is not used.
    return httpx.post(edge.url + CHAT, json=body, timeout=10, verify=False, **options)


def post_head(path: str, length: int, extra: str = "") -> bytes:
    """The head of a POST; `extra` holds more header lines."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


def head_and_body(answer: bytes) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers by lower-case name, and body of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return first, {name.lower(): value for name, _, value in pairs}, body
