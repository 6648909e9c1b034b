"""The picture is drawn from reports as the benches print them, and complaints name what lacks."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mirror_sd import drawing
from mirror_sd.bench import plot
from mirror_sd.bench.cli import app
from mirror_sd.errors import ConfigError, SetupError

PEERS = {
    "machine": {"cpu": "A CPU", "cores": 2, "at": "2026-11-29T10:00:00Z"},
    "model": "m",
    "threads": 2,
    "streams": 16,
    "speeds": {
        "one_stream": {"mirror-sd-int8": 200.0, "llamacpp-q8_0": 100.0},
        "streams": {"mirror-sd-int8": 900.0, "openvino-int8": 500.0},
    },
    "ratios": {"one_stream": {"mirror-sd-int8": {}}},
}
FORWARD = {
    "rows": [
        {"precision": p, "tokens": t, "context": c, "ms": 3.0 + t, "floor_ms": 2.5, "ratio": 2.0}
        for p in ("int8", "bf16")
        for c in (128, 2048)
        for t in (1, 8)
    ]
}


@pytest.fixture
def reports(tmp_path):
    for name, report in (("peers", PEERS), ("forward", FORWARD)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    return ["--peers", str(tmp_path / "peers.json"), "--forward", str(tmp_path / "forward.json")]


def test_two_reports_become_one_picture(tmp_path, reports):
    out = tmp_path / "out.png"
    result = CliRunner().invoke(app, ["plot", *reports, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_bars_are_in_order_and_lines_are_of_the_shortest_context(monkeypatch, tmp_path):
    shown = []
    pyplot = drawing.pyplot()
    monkeypatch.setattr(pyplot, "close", shown.append)
    plot.draw(PEERS, FORWARD, tmp_path / "out.png")
    one, several, lines = shown[0].axes
    assert [bar.get_width() for bar in one.patches] == [100, 200]
    assert [text.get_text() for text in one.get_yticklabels()] == [
        "llama.cpp Q8_0",
        "Mirror-SD int8",
    ]
    assert several.get_title() == "16 streams" and one.get_xlabel() == "tokens per second"
    assert [list(line.get_ydata()) for line in lines.get_lines()] == [[4, 11], [2.5, 2.5]] * 2
    assert lines.get_ylabel() == "milliseconds" and "128" in lines.get_title()
    assert "A CPU" in shown[0].get_suptitle() and "2026-11-29" in shown[0].get_suptitle()


@pytest.mark.parametrize(
    ("engine", "label"),
    [
        ("mirror-sd-int8-lookup", "Mirror-SD int8, lookup"),
        ("mirror-sd-bf16-auto", "Mirror-SD bf16, auto"),
        ("llamacpp-q4_1", "llama.cpp Q4_1"),
        ("openvino-int8", "OpenVINO GenAI int8"),
        ("other-fp8", "other-fp8"),
    ],
)
def test_engines_have_readable_names(engine, label):
    assert plot.label(engine) == label


@pytest.mark.parametrize(
    ("peers", "forward", "says"),
    [
        (PEERS | {"speeds": {}}, FORWARD, "bench peers has no 'speeds'"),
        (PEERS | {"speeds": {"prefill": {"x": 1.0}}}, FORWARD, "neither one stream nor several"),
        (PEERS, {"rows": []}, "bench forward has no 'rows'"),
        (PEERS | {"speeds": [1]}, FORWARD, "bench peers is damaged: 'speeds'"),
        (PEERS | {"machine": {"cpu": "x"}}, FORWARD, "bench peers is damaged: 'machine'"),
        (PEERS | {"ratios": [1]}, FORWARD, "bench peers is damaged: 'ratios'"),
        (PEERS, {"rows": 5}, "bench forward is damaged: 'rows'"),
        (PEERS, {"rows": [{}]}, "bench forward is damaged: 'rows'"),
    ],
)
def test_a_report_without_a_part_is_named(tmp_path, peers, forward, says):
    with pytest.raises(ConfigError, match=says):
        plot.draw(peers, forward, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*/none/out.png: No such file"):
        plot.draw(PEERS, FORWARD, tmp_path / "none" / "out.png")


def test_a_picture_is_a_png_whatever_its_name(tmp_path):
    plot.draw(PEERS, FORWARD, tmp_path / "out.xyz")
    assert (tmp_path / "out.xyz").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot read"), ("{", "not the JSON"), ("[]", "not the JSON")]
)
def test_a_file_that_is_no_report_is_named(tmp_path, text, says):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        plot.read(path)


def test_a_missing_matplotlib_is_told_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"pip install -e '\.\[bench\]'"):
        plot.draw(PEERS, FORWARD, tmp_path / "out.png")
