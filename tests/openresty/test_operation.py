"""Real nginx: balance, metrics, reload, start and stop."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mirror_sd.supervisor.preflight import free_ports
from tests.openresty.stack import (
    CHAT,
    Edge,
    chat,
    post_head,
    wait_until,
)

pytestmark = pytest.mark.system


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


def test_a_reload_loses_no_request_of_clients_that_keep_their_connections(edge: Edge) -> None:
    is_over = threading.Event()

    def load() -> int:
        count = 0
        with httpx.Client(base_url=edge.url, timeout=30) as client:
            while not is_over.is_set():
                assert client.post(CHAT, json={}).status_code == 200
                assert client.get("/v1/models").status_code == 200
                count += 2
        return count

    with ThreadPoolExecutor(12) as pool:
        loads = [pool.submit(load) for _ in range(12)]
        for _ in range(10):
            time.sleep(0.3)
            edge.signal(signal.SIGHUP)
        is_over.set()
        assert sum(one.result() for one in loads) > 500


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
    [port] = free_ports(1)
    conf.write_text(edge.rendered(listen=f"127.0.0.1:{port}", error_log="stderr", **change))
    command = [str(edge.nginx.binary), "-p", str(edge.run_dir / "nginx"), "-c", str(conf)]
    start = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert start.returncode != 0
    assert reason in start.stderr
