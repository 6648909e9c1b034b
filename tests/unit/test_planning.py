"""`mirror-sd plan`: offline by what is expected, live by what a stand-in for an admin port says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mirror_sd import plan_cli, planning
from mirror_sd.config import load
from mirror_sd.errors import SetupError
from mirror_sd.planning import Report
from mirror_sd.run_dir import RunDir
from mirror_sd.scheduler.measurements import Traffic
from tests.unit.test_admin_cli import PORT, _Admin, admin

__all__ = ["admin"]  # a fixture

EMULATED = [f"pools.{name}.engine=emulated" for name in ("cpu", "gpu", "tpu")]


def explain(*settings: str, **wish: float) -> Report:
    return planning.explain(wish, PORT, None, settings)


def cli(*arguments: str) -> str:
    app = typer.Typer()
    plan_cli.register(app)
    done = CliRunner().invoke(app, [*arguments, "--port", str(PORT)])
    if isinstance(done.exception, SetupError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_without_a_stack_the_plan_goes_by_the_profiles_of_the_configured_classes() -> None:
    report = explain(*EMULATED, "pools.gpu.workers=2", "pools.tpu.emulation.latency_ms=60")
    assert not report.is_live
    steps = {device.device_class: device.latency_s for device in report.devices}
    assert steps == pytest.approx({"cpu": 0.12, "gpu": 0.02, "tpu": 0.06})
    found = {device.device_class: (device.workers, device.slots) for device in report.devices}
    assert found == {"cpu": (1, 8), "gpu": (2, 32), "tpu": (1, 64)}
    assert report.plan.shares_of(30)["gpu"] == 1.0


def test_a_configured_drafter_is_paired_and_its_length_told() -> None:
    report = explain(*EMULATED[1:], 'drafters.cpu={"serves": ["gpu"]}', "speculation.max_tokens=3")
    [pair] = report.plan.pairs
    assert (pair.drafter, pair.verifier) == ("cpu", "gpu")
    assert 1 <= pair.length <= 3
    words = "\n".join(planning.in_words(report))
    assert f"drafter cpu for gpu: {pair.length} tokens a draft" in words
    assert "no stack was asked" in words


@pytest.mark.parametrize(
    ("target", "draft", "acceptance"),
    [
        ("model", None, 0.9),
        ("model", "model", 0.9),
        ("model", "alias", 0.9),
        ("model", "other", 0.7),
        ("none", "none", 0.9),
        ("none", "model", 0.7),
    ],
)
def test_the_targets_own_model_is_known_by_whatever_name(
    tmp_path: Path, target: str, draft: str | None, acceptance: float
) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "alias").symlink_to("model")
    named = "" if draft is None else f', "model": "{tmp_path / draft}"'
    report = explain(
        *EMULATED[1:],
        f"model.path={tmp_path / target}",
        'drafters.cpu={"serves": ["gpu"]' + named + "}",
    )
    [drafter] = report.drafters
    assert drafter.acceptance == acceptance


def test_the_plan_of_a_stack_goes_by_what_its_workers_measured(
    admin: _Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_metrics", lambda config: "")
    fast = {"curve": [[1, 0.001], [16, 0.002]], "prefill_tok_s": 9_000.0}
    slow = {"curve": [[1, 0.5], [32, 0.5]], "prefill_tok_s": 90.0}
    workers = [
        {"device_class": "cpu", "slots": 16, "in_flight": 2, "pace": fast},
        {"device_class": "gpu", "slots": 32, "in_flight": 0, "pace": slow},
    ]
    edge: dict[str, Any] = {"qps": {"all": 0.5}, "weights_stale": False}
    admin.answers["/admin/state"] = (200, {"edge": edge, "workers": workers})
    classes = {"cpu": {"factor": 0.3, "health": 0.5}, "gpu": {"factor": 1.0}}
    admin.answers["/admin/weights"] = (200, {"classes": classes, "draft_factor": 0.5})
    document = json.loads(cli("--json"))
    assert document["is_live"] and document["demand"]["requests_per_s"] == 0.5
    assert [device["origin"] for device in document["devices"]] == ["measured", "measured"]
    assert document["factors"] == {"health": {"cpu": 0.5, "gpu": 1.0}, "draft": 0.5}
    assert document["plan"]["splits"][0]["shares"] == pytest.approx({"cpu": 0.5, "gpu": 0.5})

    edge["weights_stale"] = True
    assert explain().plan.shares_of(10) == {"cpu": 1.0, "gpu": 0.0}, "old factors count for nothing"
    workers.clear()
    assert all(device.workers == 0 for device in explain().devices)


def test_the_plan_of_a_stack_goes_by_what_its_drafters_take(
    admin: _Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = RunDir.of_port(PORT).config_json
    resolved.write_text(
        json.dumps(json.loads(resolved.read_text()) | {"drafters": {"cpu": {"serves": ["gpu"]}}})
    )
    admin.answers["/admin/state"] = (200, {"edge": {}, "workers": []})
    text = ""
    monkeypatch.setattr(planning, "_metrics", lambda config: text)
    [expected] = explain().drafters
    assert expected.device.origin == "default"
    text = 'mirror_drafter_seconds_per_token{class="cpu"} 0.0\n'
    assert explain().drafters == (expected,), "none has drafted yet"
    text = 'mirror_drafter_seconds_per_token{class="cpu"} 0.25\n'
    [found] = explain().drafters
    assert found.device.origin == "measured" and found.device.latency_s == 0.25
    assert found.device.step_s(16) == pytest.approx(
        expected.device.step_s(16) * 0.25 / expected.device.latency_s
    )


def test_a_drafter_whose_length_is_set_is_planned_with_it() -> None:
    settings = (*EMULATED[1:], 'drafters.cpu={"serves": ["gpu"]}')
    [free] = explain(*settings).plan.pairs
    [fixed] = explain(*settings, "drafters.cpu.length=2").plan.pairs
    assert fixed.length == 2 < free.length and fixed.speedup < free.speedup


def test_the_plan_as_a_policy_keeps_the_rest_of_the_policy(
    admin: _Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_metrics", lambda config: "")
    admin.answers["/admin/state"] = (200, {"edge": {}, "workers": []})
    admin.answers["/admin/policy"] = (200, {"prompt_buckets": [], "fallback": {"cpu": 1}})
    policy = json.loads(cli("--policy"))
    assert policy["fallback"] == {"cpu": 1}
    assert [bucket.get("below") for bucket in policy["prompt_buckets"]] == [50, 500, 2000, None]
    for bucket in policy["prompt_buckets"]:
        assert sum(bucket["weights"].values()) == pytest.approx(1.0)


def test_a_policy_is_not_made_up_where_no_stack_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path))
    with pytest.raises(SetupError, match="none was asked"):
        cli("--policy")


@pytest.mark.parametrize("option", ["--qps", "--prompt-tokens", "--answer-tokens"])
@pytest.mark.parametrize("number", ["inf", "nan", "-1", "1e300"])
def test_a_load_that_is_no_number_of_requests_or_tokens_is_refused(
    option: str, number: str
) -> None:
    app = typer.Typer()
    plan_cli.register(app)
    done = CliRunner().invoke(app, [option, number, "--json", "--set", EMULATED[0]])
    assert done.exit_code == 2
    assert option in done.output


def test_requests_that_were_refused_do_not_count_for_the_mean_length() -> None:
    text = """
mirror_gateway_requests_total{class="cpu",tier="vip",status="200"} 8.0
mirror_gateway_requests_total{class="gpu",tier="vip",status="200"} 4.0
mirror_gateway_requests_total{class="cpu",tier="vip",status="429"} 100.0
mirror_gateway_prompt_tokens_total{class="cpu"} 2400.0
mirror_gateway_completion_tokens_total{class="cpu"} 600.0
mirror_gateway_disconnects_total 5.0
"""
    assert planning.traffic(text) == Traffic(12.0, 2400.0, 600.0)


def test_xla_on_a_core_is_planned_with_as_such_and_not_as_a_tpu() -> None:
    named = ("pools.tpu.engine=xla", "pools.tpu.device=cpu", "drafters.cpu={}")
    here, there = explain(*named), explain(named[0], named[2])
    steps = [report.devices[-1].latency_s for report in (here, there)]
    assert steps[0] > 2 * steps[1]
    assert here.plan.drafters_of("tpu")[0].length > there.plan.drafters_of("tpu")[0].length


def test_every_shipped_profile_can_be_planned_with() -> None:
    from workers.profile import expected

    for name in ("cpu", "gpu", "tpu"):
        for engine in ("auto", "native", "torch", "xla", "emulated"):
            settings = load(overrides=[f"pools.{name}.engine={engine}"]).pools[name]  # type: ignore[index]
            for device in ("auto", "cpu"):
                found = expected(name, engine, device, 16, settings.emulation)
                assert found.tokens_per_s > 0 and found.origin == "default"


def test_run_directory_of_another_port_is_not_asked(admin: _Admin) -> None:
    assert RunDir.of_port(PORT + 1).path.exists() is False
    assert not planning.explain({}, PORT + 1, None, ()).is_live
