"""Real nginx: requests as gateways see them, and their ids."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import pytest

from tests.openresty.stack import (
    CHAT,
    MAX_BODY_BYTES,
    Edge,
    chat,
    error_of,
    head_and_body,
    post_head,
)

pytestmark = pytest.mark.system
CONTRACTS = Path(__file__).resolve().parents[1] / "contracts"


def test_the_gateway_gets_the_edges_headers_and_none_of_the_clients(edge: Edge) -> None:
    contract = json.loads((CONTRACTS / "edge_headers.json").read_text())["request"]
    forged = {header["name"]: "forged" for header in contract if header["name"] != "X-Request-Id"}
    forged |= {"x-mirror-anything": "forged", "Cookie": "a=b"}
    forged |= {f"X-Filler-{i}": "x" for i in range(150)} | {"X-Mirror-Last": "forged"}
    seen = chat(edge, {"text": "hello"}, headers=forged | {"X-Request-Id": "mine-1"}).json()
    assert seen["headers"]["x-request-id"] == "mine-1"
    assert "forged" not in seen["headers"].values()
    assert "cookie" not in seen["headers"]
    for header in contract:
        # nginx leaves out a header that is empty.
        value = seen["headers"].get(header["name"].lower(), "")
        assert re.fullmatch(header["pattern"], value), header["name"]


@pytest.mark.parametrize("size", [0, 1, 100, 3000, 70_000, 300_000, MAX_BODY_BYTES])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_of_any_size_arrives_whole(edge: Edge, size: int, is_chunked: bool) -> None:
    data = json.dumps({"pad": ""}).encode()
    data = data[:-2] + b"7" * max(0, size - len(data)) + data[-2:] if size else b""
    content = iter([data[:9], data[9:]]) if is_chunked and data else data
    answer = httpx.post(edge.url + CHAT, content=content, timeout=10)
    assert answer.status_code == 200, answer.text
    assert answer.json()["length"] == len(data)
    assert answer.json()["body_sum"] == sum(data)
    estimate = int(answer.json()["headers"]["x-mirror-prompt-estimate"])
    assert 0.2 * len(data) <= estimate <= 0.4 * len(data) + 1


def test_a_client_that_expects_100_continue_is_told_to(edge: Edge) -> None:
    with socket.create_connection(("127.0.0.1", edge.port), timeout=5) as link:
        link.sendall(post_head(CHAT, 2, "Expect: 100-continue\r\nConnection: close\r\n"))
        assert link.recv(100).startswith(b"HTTP/1.1 100")
        link.sendall(b"{}")
        assert link.recv(65536).startswith(b"HTTP/1.1 200")


def test_many_requests_share_one_client_connection(edge: Edge) -> None:
    with httpx.Client(base_url=edge.url) as client:
        for size in (10, 70_000, 10, 200_000, 1):
            assert client.post(CHAT, json={"pad": "x" * size}).status_code == 200
            assert client.get("/v1/nowhere").status_code == 404
            assert client.get(CHAT).status_code == 405


def test_pipelined_requests_are_all_answered(edge: Edge) -> None:
    one = post_head(CHAT, 2) + b"{}"
    last = post_head(CHAT, 2, "Connection: close\r\n") + b"{}"
    with socket.create_connection(("127.0.0.1", edge.port), timeout=5) as link:
        link.sendall(one + one + last)
        answer = b""
        while part := link.recv(65536):
            answer += part
    assert answer.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    ("path", "gateway_path"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models/org/name-1b", "/v1/models/org/name-1b"),
        ("/v1/models/org%2Fname", "/v1/models/org%2Fname"),
        ("/health", "/health"),
    ],
)
def test_reading_paths_reach_a_gateway(edge: Edge, path: str, gateway_path: str) -> None:
    answer = httpx.get(edge.url + path)
    assert answer.json()["path"] == gateway_path
    assert answer.json()["method"] == "GET"
    head = httpx.head(edge.url + path)
    assert head.status_code == 200
    assert head.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/admin/state",
        "/gateway/metrics",
        "/v1/models/../../admin/state",
        "/v1/models/..%2f..%2fadmin/state",
        "//admin/state",
    ],
)
def test_no_path_leads_to_the_gateways_own_pages(edge: Edge, path: str) -> None:
    answer = edge.raw(f"GET {path} HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n".encode())
    first, _, body = head_and_body(answer)
    assert " 404 " in first
    assert error_of(body)["code"] == "not_found"


@pytest.mark.parametrize("sent", ["mine-1", "A.b_c-9", "x" * 128])
def test_a_sane_request_id_is_kept(edge: Edge, sent: str) -> None:
    assert chat(edge, {}, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "a/b", "{}", "a\tb"])
def test_another_request_id_is_replaced(edge: Edge, sent: str) -> None:
    answer = chat(edge, {}, headers={"X-Request-Id": sent})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] == answer.json()["headers"]["x-request-id"]
