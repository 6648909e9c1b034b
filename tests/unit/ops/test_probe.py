"""The probe against a small edge over real HTTP: what it reads, tells, and keeps to itself."""

from __future__ import annotations

import itertools
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror_sd.config import Config
from mirror_sd.run_dir import RunDir
from ops.edge_client import EdgeClient
from ops.probe import Probe
from ops.readers.gpus import Gpus
from ops.readers.host import Host
from ops.readings import DeviceReading
from ops.webhook import Webhook
from tests.unit.ops.small_edge import TOKEN, SmallEdge, small_edge, worker


class StillHost(Host):
    """Sensors that read what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = DeviceReading(temperature_c=50.0, utilisation=0.4, memory_pressure=0.3)

    def read(self) -> DeviceReading:
        return self.reading


class HotGpus(Gpus):
    """Real ones, which the emulated class must not be taken for."""

    def read(self) -> DeviceReading:
        return DeviceReading(temperature_c=99.0)


class Bench:
    """A probe whose clock the test moves on."""

    def __init__(
        self, edge: SmallEdge, directory: Path, split: str = "policy", **probe: Any
    ) -> None:
        self.edge = edge
        self.now = 100.0
        self.host = StillHost()
        self.token = directory / "admin-token"
        self.token.write_text(TOKEN)
        port = edge.server_port
        config = Config.model_validate(
            {
                "pools": {"cpu": {}, "gpu": {"engine": "emulated"}},
                "probe": probe,
                "scheduler": {"split": split},
            }
        )
        self.webhook = Webhook(f"http://127.0.0.1:{port}/hook", first_pause_s=0.05)
        self.probe = Probe(
            config,
            EdgeClient("127.0.0.1", port, port, self.token, timeout_s=0.5),
            host=self.host,
            gpus=HotGpus(),
            webhook=self.webhook,
            source="test",
            clock=lambda: self.now,
            unix_clock=lambda: 1000.0 + self.now,
        )

    def run(self, seconds: int = 1) -> dict[str, Any] | None:
        """The last document that the edge has taken."""
        for _ in range(seconds):
            self.probe.run_once()
            self.now += 1.0
        return self.edge.documents[-1] if self.edge.documents else None

    def gpu(self, **health: float) -> None:
        gpu = worker("gpu", emulated=True, in_flight=3, health=health)
        self.edge.state = {"workers": [worker("cpu", slots=16), gpu], "queues": []}


@pytest.fixture
def edge() -> Iterator[SmallEdge]:
    with small_edge() as server:
        yield server


@pytest.fixture
def bench(edge: SmallEdge, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(edge, tmp_path)
    bench.webhook.start()
    yield bench
    bench.webhook.stop()


def test_document_has_what_is_known_and_nothing_else(bench: Bench) -> None:
    bench.gpu(temperature_c=61.5, utilisation=0.5)
    assert bench.run() == {
        "version": 1,
        "at": 1100.0,
        "classes": {
            "cpu": {
                "factor": 1.0,
                "health": 1.0,
                "utilisation": 0.4,
                "temperature_c": 50.0,
                "memory_pressure": 0.3,
                "in_flight": 0,
                "slots": 16,
                "emulated": False,
            },
            "gpu": {
                "factor": 1.0,
                "health": 1.0,
                "utilisation": 0.5,
                "temperature_c": 61.5,
                "in_flight": 3,
                "slots": 8,
                "emulated": True,
            },
        },
        "degrade_level": 0,
        "draft_factor": 1.0,
    }


def test_measured_shares_are_in_the_document_where_they_are_asked_for(
    edge: SmallEdge, tmp_path: Path
) -> None:
    pace = {"curve": [[1, 0.01]], "prefill_tok_s": 1000.0}
    told = [worker(name, pace=pace) for name in ("cpu", "gpu")]
    for split in ("policy", "measured"):
        bench = Bench(edge, tmp_path, split=split)
        edge.state = {"workers": told, "queues": [], "edge": {"qps": {"all": 0.0}}}
        document = bench.run()
        assert document is not None
        shares = [item["shares"] for item in document.get("splits", [])]
        assert len(shares) == (4 if split == "measured" else 0)


def test_sensors_of_this_machine_say_nothing_of_an_emulated_class(bench: Bench) -> None:
    bench.gpu()
    document = bench.run()
    assert document is not None
    assert "temperature_c" in document["classes"]["cpu"]
    assert "temperature_c" not in document["classes"]["gpu"]


def test_hot_class_is_weighed_less_with_the_next_document(bench: Bench) -> None:
    bench.gpu(temperature_c=60.0)
    bench.run(3)
    bench.gpu(temperature_c=86.0)
    document = bench.run()
    assert document is not None
    assert document["classes"]["gpu"]["factor"] == 0.4
    assert document["classes"]["cpu"]["factor"] == 1.0


@pytest.mark.parametrize(
    "lie",
    [
        {"temperature_c": 1e9, "utilisation": -4.0, "memory_pressure": 17.0},
        {"temperature_c": "hot", "utilisation": None, "memory_pressure": True},
        {"temperature_c": -300, "utilisation": 1.5, "memory_pressure": []},
        {"temperature_c": math.nan, "utilisation": math.inf, "memory_pressure": -math.inf},
    ],
)
def test_sensor_that_lies_moves_no_traffic(bench: Bench, lie: dict[str, Any]) -> None:
    bench.gpu(**lie)
    document = bench.run(30)
    assert document is not None
    assert document["classes"]["gpu"] == {
        "factor": 1.0,
        "health": 1.0,
        "in_flight": 3,
        "slots": 8,
        "emulated": True,
    }


@pytest.mark.parametrize("state", [[], "x", {"workers": 7}, {"workers": [{"slots": "many"}, 3]}])
def test_nonsense_from_the_broker_does_not_end_the_probe(bench: Bench, state: Any) -> None:
    bench.edge.state = state
    bench.run(3)


def test_silent_or_draining_worker_does_not_count(bench: Bench) -> None:
    bench.edge.state = {
        "workers": [
            worker("cpu"),
            worker("gpu", silent_s=60.0),
            worker("gpu", draining=True),
        ]
    }
    document = bench.run()
    assert document is not None
    assert document["classes"]["gpu"] == {
        "factor": 0.0,
        "health": 0.0,
        "in_flight": 0,
        "emulated": False,
    }


def test_without_a_state_nothing_is_said_to_the_edge(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.gpu(temperature_c=60.0)
    bench.run(2)
    bench.token.write_text("another token")
    taken = len(bench.edge.documents)
    with caplog.at_level(logging.INFO):
        bench.run(10)
        assert len(bench.edge.documents) == taken
        bench.token.write_text(TOKEN)
        bench.run(1)
    assert len(bench.edge.documents) == taken + 1
    told = [record.getMessage() for record in caplog.records if "state" in record.getMessage()]
    assert told == ["state: GET /admin/state?tenants=no: 401 no", "state: well again"]


def test_refused_document_is_told_as_an_alert(bench: Bench) -> None:
    bench.gpu(temperature_c=60.0)
    bench.edge.status = 400
    bench.run(8)
    bench.edge.status = 200
    bench.run(8)
    bench.webhook.stop(5)
    told = [(alert["alert"], alert["state"]) for alert in bench.edge.alerts]
    assert told == [("MirrorProbeStale", "firing"), ("MirrorProbeStale", "resolved")]


def scrape(gaps: dict[str, int], drafted: int = 0, accepted: int = 0) -> str:
    name = "mirror_gateway_inter_token_latency_seconds"
    lines = [f"# TYPE {name} histogram"]
    for bound, count in gaps.items():
        lines.append(f'{name}_bucket{{class="cpu",le="{bound}",tier="vip"}} {count}.0')
    lines.append(f'mirror_worker_drafted_tokens_total{{class="cpu"}} {drafted}.0')
    lines.append(f'mirror_worker_accepted_tokens_total{{class="cpu"}} {accepted}.0')
    lines.append('mirror_pool_worker_restarts_total{class="cpu"} 0.0')
    return "\n".join([*lines, ""])


def test_slow_tokens_degrade_and_fast_ones_restore(bench: Bench) -> None:
    bench.gpu(temperature_c=60.0)
    slow = fast = 0
    seen = []
    for second in range(60):
        slow += 500 * (second < 15)
        fast += 500 * (second >= 15)
        bench.edge.metrics = scrape({"0.1": fast, "0.5": slow + fast, "+Inf": slow + fast})
        document = bench.run()
        assert document is not None
        seen.append(document["degrade_level"])
    assert max(seen) == 2
    assert seen[-1] == 0
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(seen))


def test_rejected_drafts_are_alerted(bench: Bench) -> None:
    bench.gpu(temperature_c=60.0)
    for second in range(50):
        bench.edge.metrics = scrape({}, drafted=100 * second, accepted=50 * second)
        bench.run()
    bench.webhook.stop(5)
    [alert] = bench.edge.alerts
    assert (alert["alert"], alert["state"]) == ("MirrorDraftsRejected", "firing")
    assert alert["value"] == pytest.approx(0.5)


def test_receiver_that_hangs_does_not_hold_up_the_readings(bench: Bench) -> None:
    bench.edge.delay_s = 3.0
    bench.gpu(temperature_c=90.0)
    begin = time.monotonic()
    bench.run(20)
    assert time.monotonic() - begin < 2.0
    assert len(bench.edge.documents) == 20


def test_failed_post_is_repeated_and_given_up_after_five(bench: Bench) -> None:
    bench.edge.failures = 2
    bench.webhook.send({"summary": "first"})
    bench.webhook.send({"summary": "second"})
    until(lambda: len(bench.edge.alerts) == 2)
    assert [alert["summary"] for alert in bench.edge.alerts] == ["first", "second"]
    assert bench.edge.posts == 4
    bench.edge.failures = 5
    bench.webhook.send({"summary": "lost"})
    bench.webhook.send({"summary": "third"})
    until(lambda: len(bench.edge.alerts) == 3)
    assert bench.edge.alerts[-1]["summary"] == "third"
    assert bench.edge.posts == 10


def test_what_fires_is_resolved_when_the_probe_stops(bench: Bench) -> None:
    bench.gpu(temperature_c=91.0)
    bench.run(5)
    bench.probe.close()
    bench.probe.close()
    bench.webhook.stop(5)
    told = [(alert["alert"], alert["class"], alert["state"]) for alert in bench.edge.alerts]
    assert told == [("MirrorDeviceHot", "gpu", state) for state in ("firing", "resolved")]
    last = "the probe stops; the last it saw: class gpu is too hot: 91 C, the limit is 85 C"
    assert bench.edge.alerts[-1]["summary"] == last


@pytest.mark.parametrize(("delay_s", "resolved"), [(0.0, 1), (6.0, 0)])
def test_terminated_process_resolves_and_ends_whether_or_not_the_receiver_answers(
    edge: SmallEdge, tmp_path: Path, delay_s: float, resolved: int
) -> None:
    edge.state = {"workers": [worker("gpu", emulated=True, health={"temperature_c": 91.0})]}
    run = RunDir(tmp_path)
    run.admin_token.write_text(TOKEN)
    run.metrics.mkdir(parents=True)
    port = edge.server_port
    config = Config.model_validate(
        {
            "server": {"port": port, "admin_port": port},
            "pools": {"gpu": {"engine": "emulated"}},
            "probe": {"webhook": f"http://127.0.0.1:{port}/hook", "interval_s": 0.5},
        }
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    environment = {
        **os.environ,
        "MIRROR_SD_CONFIG_JSON": str(tmp_path / "config.json"),
        "PROMETHEUS_MULTIPROC_DIR": str(run.metrics),
    }
    with subprocess.Popen([sys.executable, "-m", "ops.probe"], env=environment) as process:
        try:
            until(lambda: edge.alerts, 20.0)
            edge.delay_s = delay_s
            process.terminate()
            assert process.wait(3.0) == 0
        finally:
            process.kill()
    assert [alert["state"] for alert in edge.alerts] == ["firing", "resolved"][: 1 + resolved]


def test_receiver_that_hangs_holds_up_a_stop_for_a_second_at_most(bench: Bench) -> None:
    bench.edge.delay_s = 3.0
    bench.gpu(temperature_c=91.0)
    bench.run(5)
    begin = time.monotonic()
    bench.probe.close()
    bench.webhook.stop()
    assert time.monotonic() - begin < 1.5


def test_full_queue_of_alerts_gives_the_oldest_up(edge: SmallEdge) -> None:
    webhook = Webhook(f"http://127.0.0.1:{edge.server_port}/hook")
    for number in range(70):
        webhook.send({"summary": str(number)})
    webhook.start()
    webhook.stop(10)
    assert [alert["summary"] for alert in edge.alerts] == [str(n) for n in range(6, 70)]


def until(claim: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.02)
