"""The real nginx in front of stand-in gateways: what clients see, and what gateways see."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.openresty.stack import MAX_BODY_BYTES, Edge, error_of, free_port, wait_until

pytestmark = pytest.mark.system

CHAT = "/v1/chat/completions"
CONTRACTS = Path(__file__).resolve().parents[1] / "contracts"


def chat(edge: Edge, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(edge.url + CHAT, json=body, timeout=10, **options)


def post_head(path: str, length: int, extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


def head_and_body(answer: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return first, {name.lower(): value for name, _, value in pairs}, body


# What passes through to a gateway


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
        value = seen["headers"][header["name"].lower()]
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


# Request ids


@pytest.mark.parametrize("sent", ["mine-1", "A.b_c-9", "x" * 128])
def test_a_sane_request_id_is_kept(edge: Edge, sent: str) -> None:
    assert chat(edge, {}, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "a/b", "{}", "a\tb"])
def test_another_request_id_is_replaced(edge: Edge, sent: str) -> None:
    answer = chat(edge, {}, headers={"X-Request-Id": sent})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] == answer.json()["headers"]["x-request-id"]


# Errors that nginx makes


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nowhere", 404, None),
        ("POST", "/nowhere", 404, None),
        ("OPTIONS", "/nowhere", 404, None),
        ("GET", CHAT, 405, "POST, OPTIONS"),
        ("HEAD", CHAT, 405, "POST, OPTIONS"),
        ("DELETE", "/v1/completions", 405, "POST, OPTIONS"),
        ("POST", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/a/b", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/metrics", 405, "GET, HEAD, OPTIONS"),
        ("TRACE", "/health", 405, "GET, HEAD, OPTIONS"),
        ("OPTIONS", CHAT, 204, "POST, OPTIONS"),
        ("OPTIONS", "/v1/models", 204, "GET, HEAD, OPTIONS"),
    ],
)
def test_a_path_or_method_that_is_not_served(
    edge: Edge, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = httpx.request(method, edge.url + path)
    assert answer.status_code == status
    assert answer.headers.get("allow") == allow
    assert answer.headers["x-request-id"]
    if status >= 400:
        assert answer.headers["content-type"] == "application/json"
        if method != "HEAD":
            assert int(answer.headers["content-length"]) == len(answer.content)
            error_of(answer.content)


def test_a_body_over_the_limit_is_refused_before_it_is_read(edge: Edge) -> None:
    answer = edge.raw(post_head(CHAT, MAX_BODY_BYTES + 1))
    first, _, body = head_and_body(answer)
    assert " 413 " in first
    assert error_of(body)["code"] == "payload_too_large"


def test_a_chunked_body_over_the_limit_is_refused(edge: Edge) -> None:
    pieces = iter([b"x" * 65536] * (MAX_BODY_BYTES // 65536 + 1))
    answer = httpx.post(edge.url + CHAT, content=pieces)
    assert answer.status_code == 413
    assert error_of(answer.content)["code"] == "payload_too_large"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n", 505, "http_version"),
        (post_head(CHAT, 0).replace(b"h: 0", b"h: x"), 400, "bad_request"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "uri_too_long"),
        (
            b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
            431,
            "headers_too_large",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n",
            501,
            "not_implemented",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "bad_request",
        ),
    ],
)
def test_what_is_not_http_gets_an_error_in_shape(
    edge: Edge, data: bytes, status: int, code: str
) -> None:
    first, headers, body = head_and_body(edge.raw(data))
    assert f" {status} " in first
    assert headers["content-type"] == "application/json"
    assert error_of(body)["code"] == code
    assert chat(edge, {}).status_code == 200


def test_a_body_that_stops_arriving_gets_a_408(edge: Edge) -> None:
    began = time.monotonic()
    first, headers, body = head_and_body(edge.raw(post_head(CHAT, 1000) + b'{"half": '))
    assert 0.9 < time.monotonic() - began < 3
    assert " 408 " in first
    assert headers["x-request-id"]
    assert headers["connection"] == "close"
    assert error_of(body)["code"] == "request_timeout"
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_body_that_ends_too_early_gets_a_400(edge: Edge) -> None:
    answer = edge.raw(post_head(CHAT, 1000) + b'{"half": ', half_close=True)
    first, _, body = head_and_body(answer)
    assert " 400 " in first
    assert error_of(body)["code"] == "incomplete_body"


def test_an_html_error_of_a_gateway_is_put_into_shape(edge: Edge) -> None:
    answer = chat(edge, {"act": "html_error"})
    assert answer.status_code == 500
    assert error_of(answer.content)["code"] == "internal_error"
    assert answer.headers["x-request-id"] in answer.text


def test_a_json_error_of_a_gateway_passes_as_it_is(edge: Edge) -> None:
    answer = chat(edge, {"act": "json_error"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["message"] == "full"


# Gateways that are dead or die


def test_a_dead_gateway_is_passed_over(edge: Edge) -> None:
    edge.gateways[0].stop()
    for _ in range(10):
        assert chat(edge, {}).status_code == 200
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_post_moves_on_when_its_gateway_dies_before_a_byte(edge: Edge) -> None:
    retries = edge.metric("mirror_edge_retries_total")
    first, second = edge.gateways
    first.send_signal(signal.SIGSTOP)
    second.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(chat, edge, {"n": n}) for n in range(4)]
        time.sleep(0.3)
        first.stop()
        second.send_signal(signal.SIGCONT)
        answers = [future.result() for future in held]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["pid"] for answer in answers} == {second.pid}
    assert edge.metric("mirror_edge_retries_total") >= retries + 1
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_request_that_no_gateway_survives_is_tried_three_times_at_most(edge: Edge) -> None:
    for _ in range(8):
        chat(edge, {})
    before = sum(gateway.seen()["requests"] for gateway in edge.gateways)
    answer = chat(edge, {"act": "drop"})
    assert answer.status_code == 502
    assert error_of(answer.content)["code"] == "bad_gateway"
    tries = sum(gateway.seen()["requests"] for gateway in edge.gateways) - before
    assert 2 <= tries <= 3
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_with_all_gateways_gone_the_answer_is_a_503(edge: Edge) -> None:
    for gateway in edge.gateways:
        gateway.stop()
    for answer in (chat(edge, {}), httpx.get(edge.url + "/health")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert error_of(answer.content)["code"] == "no_gateway"
    metrics = httpx.get(edge.url + "/metrics")
    assert metrics.status_code == 200
    assert "mirror_edge_gateway_scrape_ok 0" in metrics.text
    edge.gateways[0].start()
    assert chat(edge, {}).status_code == 200


# Streams


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_each_event_arrives_before_the_next_is_sent(edge: Edge) -> None:
    request = {"act": "stream", "events": 3, "interval_s": 0.4}
    with httpx.stream("POST", edge.url + CHAT, json=request) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-request-id"]
        sent = []
        for event in events(answer.iter_lines()):
            sent.append(max(gateway.seen()["events_sent"] for gateway in edge.gateways))
            if event == "[DONE]":
                break
            assert event["text"] == "你好"
    first = sent[0]
    assert sent[:3] == [first, first + 1, first + 2]


def test_a_client_that_accepts_gzip_gets_a_plain_stream(edge: Edge) -> None:
    answer = chat(edge, {"act": "stream"}, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_gateway_killed_in_mid_stream_ends_it_with_an_error_event(edge: Edge) -> None:
    cut = edge.metric("mirror_edge_stream_errors_total")
    before = [gateway.seen()["requests"] for gateway in edge.gateways]
    with httpx.stream("POST", edge.url + CHAT, json={"act": "die_streaming"}) as answer:
        assert answer.status_code == 200
        *whole, last = events(answer.iter_lines())
    assert whole == [{"index": 0}, {"index": 1}]
    error = error_of(json.dumps(last))
    assert error["type"] == "server_error"
    assert error["code"] == "stream_interrupted"
    assert answer.headers["x-request-id"] in error["message"]
    [survivor] = [i for i, gateway in enumerate(edge.gateways) if gateway.is_alive]
    assert edge.gateways[survivor].seen()["requests"] == before[survivor]
    assert edge.metric("mirror_edge_stream_errors_total") == cut + 1
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_headers_alone_followed_by_death_end_with_an_error_event(edge: Edge) -> None:
    answer = chat(edge, {"act": "die_after_headers"})
    [last] = events(iter(answer.text.splitlines()))
    assert error_of(json.dumps(last))["code"] == "stream_interrupted"


@pytest.mark.parametrize(
    "request_body", [{"act": "stream", "events": 1000, "interval_s": 0.05}, {"act": "hang"}]
)
def test_a_client_that_leaves_is_noticed_by_the_gateway_within_a_second(
    edge: Edge, request_body: dict[str, Any]
) -> None:
    def left() -> int:
        return sum(len(gateway.seen()["left_at"]) for gateway in edge.gateways)

    before = left()
    incomplete = edge.metric("mirror_edge_incomplete_answers_total")
    with socket.create_connection(("127.0.0.1", edge.port)) as link:
        body = json.dumps(request_body).encode()
        link.sendall(post_head(CHAT, len(body)) + body)
        wait_until(lambda: sum(edge.in_flight()) == 1)
    wait_until(lambda: left() == before + 1, 1.0)
    wait_until(lambda: edge.in_flight() == [0, 0])
    assert edge.metric("mirror_edge_incomplete_answers_total") == incomplete + 1


# Balance and metrics


def test_requests_go_to_the_gateway_with_fewest_in_flight(edge: Edge) -> None:
    with ThreadPoolExecutor(16) as pool:
        request = {"act": "stream", "events": 1, "interval_s": 0.8}
        held = [pool.submit(chat, edge, request) for _ in range(10)]
        wait_until(lambda: sum(edge.in_flight()) == 10)
        low, high = sorted(edge.in_flight())
        assert high - low <= 2
        for future in held:
            assert future.result().status_code == 200
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_metrics_hold_the_edges_and_the_gateways_and_pass_promtool(edge: Edge) -> None:
    sample = 'mirror_edge_requests_total{class="cpu",tier="standard",status="200"}'
    before = edge.metric(sample)
    incomplete = edge.metric("mirror_edge_incomplete_answers_total")
    chat(edge, {})
    chat(edge, {"act": "stream"})
    answer = httpx.get(edge.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert edge.metric(sample) == before + 2
    assert edge.metric("mirror_edge_incomplete_answers_total") == incomplete
    assert edge.metric("mirror_edge_gateway_scrape_ok") == 1
    assert edge.metric("mirror_gateway_up") == 1
    assert edge.metric('mirror_edge_connections{state="active"}') >= 1
    labels = 'class="cpu",tier="standard"'
    count = edge.metric(f"mirror_edge_request_seconds_count{{{labels}}}")
    assert count == edge.metric(f'mirror_edge_request_seconds_bucket{{{labels},le="+Inf"}}') > 0
    assert edge.metric("mirror_edge_dropped_samples_total") == 0
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=answer.content, capture_output=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr
    assert not check.stderr.strip(), check.stderr


def test_the_chat_page_needs_nothing_from_elsewhere(edge: Edge) -> None:
    answer = httpx.get(edge.url + "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=|https?://", answer.text)
    assert httpx.head(edge.url + "/").status_code == 200


def test_a_reload_under_load_loses_no_request(edge: Edge) -> None:
    with ThreadPoolExecutor(8) as pool:
        request = {"act": "stream", "events": 3, "interval_s": 0.1}
        answers = []
        for _ in range(6):
            answers += [pool.submit(chat, edge, request) for _ in range(8)]
            edge.signal(signal.SIGHUP)
            time.sleep(0.2)
        for future in answers:
            assert future.result().text.endswith("data: [DONE]\n\n")
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_killed_nginx_worker_leaves_no_requests_in_the_count(edge: Edge) -> None:
    with socket.create_connection(("127.0.0.1", edge.port)) as link:
        link.sendall(post_head(CHAT, 15) + b'{"act": "hang"}')
        wait_until(lambda: sum(edge.in_flight()) == 1)
        for pid in edge.worker_pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _is_answering(edge))
        wait_until(lambda: edge.in_flight() == [0, 0])


def _is_answering(edge: Edge) -> bool:
    try:
        return httpx.get(edge.url + "/health").status_code == 200
    except httpx.TransportError:
        return False


# Life of the process


def test_nothing_was_written_outside_and_no_alarm_was_logged(edge: Edge) -> None:
    log = edge.log.read_text()
    assert not re.findall(r"\[(?:emerg|crit)\].*", log)
    assert not re.findall(r"lua.*(?:error|traceback).*", log)
    for line in (edge.run_dir / "access.log").read_text().splitlines():
        assert json.loads(line)["status"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start nginx as somebody else")
def test_it_runs_without_root() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="mirror-edge-"))
    edge = Edge(run_dir, gateways=1, user="nobody")
    try:
        edge.start()
        edge.gateways[0].path.chmod(0o777)
        assert chat(edge, {"pad": "x" * 200_000}).status_code == 200
        assert edge.metric("mirror_edge_gateway_scrape_ok") == 1
    finally:
        edge.stop()
        shutil.rmtree(run_dir)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"classes": "cpu,abacus"}, "abacus"), ({"gateway_servers": ""}, "at least one gateway")],
)
def test_bad_settings_keep_nginx_from_starting(
    edge: Edge, change: dict[str, str], reason: str
) -> None:
    conf = edge.run_dir / "bad.conf"
    conf.write_text(edge.rendered(listen=f"127.0.0.1:{free_port()}", error_log="stderr", **change))
    command = [str(edge.nginx.binary), "-p", str(edge.run_dir / "nginx"), "-c", str(conf)]
    start = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert start.returncode != 0
    assert reason in start.stderr
