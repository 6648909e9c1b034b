"""Which drafters a worker is connected to, and on which cores they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mirror_sd import config as configuration
from mirror_sd import planning
from mirror_sd.backends.protocol import Capabilities
from mirror_sd.drafting import addresses, connection, loading
from mirror_sd.drafting.client import DraftClient
from mirror_sd.drafting.connection import connector
from mirror_sd.errors import ConfigError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import preflight
from mirror_sd.supervisor.edge import Nginx
from mirror_sd.supervisor.stack import Stack
from tests.unit.backends.native.models import PLAIN, write_directory
from workers import drafter
from workers.pool import chosen_cores

RUN = RunDir(Path("/run/m"))
POOLS = ("pools.cpu.engine=native", "pools.gpu.engine=emulated", "pools.tpu.engine=xla")


def endpoints(verifier: str, *overrides: str) -> list[tuple[str, str]]:
    config = configuration.load(overrides=[*POOLS, *overrides], environ={})
    return addresses.endpoints_for(config, RUN, verifier, planning.splitter(config).plan())


def test_a_drafter_drafts_for_the_classes_that_the_settings_name() -> None:
    assert endpoints("tpu", "drafters.cpu.serves=[tpu]") == [
        ("cpu", "ipc:///run/m/drafter-cpu-0.sock")
    ]
    assert endpoints("gpu", "drafters.cpu.serves=[tpu]") == []
    assert endpoints("cpu", "drafters.cpu.serves=[cpu]") != []


def test_without_settings_it_drafts_for_whom_the_plan_pairs_it_with() -> None:
    config = configuration.load(overrides=[*POOLS, "drafters.cpu={}"], environ={})
    plan = planning.splitter(config).plan()
    planned = {pair.verifier for pair in plan.verifiers_of("cpu")} or {"gpu", "tpu"}
    assert {name for name in ("cpu", "gpu", "tpu") if endpoints(name, "drafters.cpu={}")} == planned


@pytest.mark.parametrize("source", ["lookup", "history", "head"])
def test_no_drafter_is_asked_or_started_where_drafts_have_one_source_on_the_worker(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["drafters.cpu.serves=[cpu]", f"speculation.drafter={source}"]
    config = configuration.load(overrides=settings, environ={})
    assert endpoints("cpu", *settings) == []
    assert connector(config, RUN, "cpu") is None
    assert not Stack(config, RUN, Nginx(Path("/usr/sbin/nginx"), ()))._drafters
    preflight.check_drafters(config)
    assert f"no drafter is started: speculation.enabled is true, speculation.drafter {source}" in (
        caplog.text
    )


@pytest.mark.parametrize("serves", ["", "tpu", "tpu, gpu"])
def test_a_drafter_that_would_draft_for_nobody_fails_the_start(serves: str) -> None:
    config = configuration.load(overrides=[f"drafters.cpu.serves=[{serves}]"], environ={})
    with pytest.raises(
        ConfigError, match=r"^drafters\.cpu would draft for nobody: the pools are cpu"
    ):
        preflight.check_drafters(config)


def test_each_worker_of_a_drafter_listens_at_a_place_of_its_own() -> None:
    two = ("drafters.cpu.serves=[tpu]", "drafters.cpu.workers=2")
    assert len(set(endpoints("tpu", *two))) == 2
    assert endpoints("tpu", *two, "drafters.cpu.address=tcp://10.0.0.7:7100") == [
        ("cpu", "tcp://10.0.0.7:7100"),
        ("cpu", "tcp://10.0.0.7:7101"),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "drafters.cpu.address=http://a:1",
        "drafters.cpu.address=tcp://a",
        "drafters.cpu.address=tcp://127.0.0.1:7100/",
        "drafters.cpu.address=tcp://127.0.0.1:7100?a=1",
        "drafters.cpu.address=tcp://me@127.0.0.1:7100",
        "drafters.cpu.address=tcp://*:7100",
        "drafters.cpu.address=TCP://127.0.0.1:7100",
        "drafters.cpu.address='tcp://[::1]:7100'",
        "drafters.cpu.address=tcp://127.0.0.1:0",
        "drafters.cpu.address=tcp://127.0.0.1:65536",
        "drafters.cpu={address: 'tcp://127.0.0.1:65535', workers: 2}",
        "drafters.cpu.length=33",
        "drafters.cpu.length=17",
        "drafters.cpu.cores=[]",
        "drafters.cpu.serves=[npu]",
        "drafters.npu={}",
        "drafters.cpu.nonsense=1",
    ],
)
def test_a_bad_setting_is_refused_by_its_name(bad: str) -> None:
    with pytest.raises(ConfigError, match="drafters"):
        configuration.load(overrides=[bad], environ={})


def test_cores_that_are_not_there_are_refused_with_those_that_are() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert chosen_cores(None, "pools.cpu.cores") == allowed
    assert chosen_cores([allowed[0], allowed[0]], "pools.cpu.cores") == allowed[:1]
    with pytest.raises(ConfigError, match=r"pools\.cpu\.cores names 9999; usable here are"):
        chosen_cores([9999], "pools.cpu.cores")


def test_drafters_of_one_class_draft_each_by_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(connection, "tokenizer_digest", str)
    settings = [
        *POOLS,
        f"model.path={tmp_path}",
        "drafters.cpu={serves: [tpu], overlap: false, length: 12}",
        "drafters.gpu={serves: [tpu], length: 4}",
    ]
    config = configuration.load(overrides=settings, environ={})
    connect = connection.connector(config, RunDir(tmp_path), "tpu")
    assert connect is not None
    link = connect(Capabilities("x", "cpu", "bf16", 64, 512, True))._link
    assert isinstance(link, DraftClient)
    terms = {peer.name: peer.offer.terms for peer in link._peers}
    link.close_all()
    assert [(terms[n].length, terms[n].overlaps) for n in ("cpu", "gpu")] == [
        (12, False),
        (4, True),
    ]


def test_a_drafter_that_is_not_configured_does_not_start() -> None:
    with pytest.raises(ConfigError, match="no drafter 'cpu' is configured"):
        drafter.load(configuration.load(environ={}), RUN, "cpu", 0)


def test_a_drafter_without_its_device_names_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(loading, "tokenizer_digest", str)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.xpu.is_available", lambda: False)
    settings = ["drafters.gpu={}", f"model.path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"^drafters\.gpu\.device is auto") as found:
        loading.load(configuration.load(overrides=settings, environ={}), "gpu", threads=1)
    assert "pools." not in found.value.message
    assert "emulated" not in found.value.message


@pytest.mark.parametrize(
    ("engine", "workers_cache"), [("torch", "int8"), ("torch", "fp32"), ("native", "int8")]
)
def test_a_drafters_cache_has_a_format_of_its_engine_whatever_the_workers_have(
    engine: str, workers_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_directory(PLAIN, tmp_path / "tiny")
    monkeypatch.setattr(loading, "tokenizer_digest", str)
    settings = [
        "pools.cpu.engine=native",
        f"engine.kv_precision={workers_cache}",
        "engine.kv_cache_mb=8",
        f"drafters.tpu={{engine: {engine}, device: cpu, serves: [cpu], sessions: 1}}",
        f"model.path={files.path}",
        "model.max_context=64",
    ]
    made, _ = loading.load(configuration.load(overrides=settings, environ={}), "tpu", threads=1)
    assert made.capabilities.name == engine


def test_the_stack_starts_each_drafter_with_a_log_and_a_role_of_its_own() -> None:
    config = configuration.load(overrides=["drafters.cpu.workers=2"], environ={})
    stack = Stack(config, RUN, Nginx(Path("/usr/sbin/nginx"), ()))
    specs = [child.spec for child in stack._drafters.values()]
    assert [spec.name for spec in specs] == ["drafter-cpu-0", "drafter-cpu-1"]
    assert [spec.argv[-4:] for spec in specs] == [
        ["--class", "cpu", "--index", "0"],
        ["--class", "cpu", "--index", "1"],
    ]
    assert {spec.env["MIRROR_SD_ROLE"] for spec in specs} == {"drafter"}
    assert len({spec.log for spec in specs}) == 2
