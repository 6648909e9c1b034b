"""`mirror-sd distil` as a user runs it: a smoke run on the real model, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mirror_sd import model_store
from mirror_sd.uir import draft_file

MODEL = "smollm2-135m-instruct"
is_pulled = any(m.name == MODEL and m.path is not None for m in model_store.available())


def _distil(*arguments: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mirror_sd.cli", "distil", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


# Half a minute on two cores of its own; its tests may share them with others.
@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_pulled, reason=f"{MODEL} is not pulled")
def test_a_smoke_run_learns_exports_and_can_be_resumed(tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path), "--smoke", "--precision", "int8,fp16", "--json")
    done = _distil(*arguments, timeout_s=600.0)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    losses = np.array([losses[0] for _, losses in report["curves"]["fp32"]["losses"]])
    assert losses[-6:].mean() < 0.6 * losses[:6].mean()
    assert report["curves"]["fp32"]["acceptance"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / f"{MODEL}.md").read_text(encoding="utf-8")
    assert f"mirror-sd distil --out {tmp_path} --smoke" in card
    for precision in ("int8", "fp16"):
        row = report["exports"][precision]
        assert row["points_lost"] < 2.0
        assert row["tokens_per_verify"] > 1.0
        program = draft_file.read(tmp_path / row["file"])
        assert program.spec.precision == precision
        assert program.spec.target == MODEL

    refused = _distil(*arguments)
    assert refused.returncode == 1
    assert "--resume goes on with it" in refused.stderr
    again = _distil(*arguments, "--resume", timeout_s=300.0)
    assert again.returncode == 0, again.stderr
    resumed = json.loads(again.stdout)
    assert resumed["exports"] == report["exports"]
    stages = {name: spent for name, spent in report["seconds"].items() if name != "all"}
    assert stages.items() <= resumed["seconds"].items() and stages["data"] > 0
    assert resumed["seconds"]["all"] >= sum(stages.values()) - len(stages)
    snapshot = _distil(*arguments, "--snapshot", timeout_s=300.0)
    assert snapshot.returncode == 0, snapshot.stderr
    assert json.loads(snapshot.stdout)["step"] == report["plan"]["train"]["steps"]
    # Of the fp32 weights, not of those that the export before it has rounded to 8 bits.
    matrix = draft_file.read(tmp_path / report["exports"]["fp16"]["file"]).weights["q"]
    codes, scales = draft_file.quantise(matrix)
    rounding = np.abs(draft_file.dequantise(codes, scales) - matrix).mean()
    assert rounding > 0.1 * scales.astype(np.float32).mean()
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "data").iterdir())
    for other, said in (
        (("--answers", "24"), "has no data of these options"),
        (("--steps", "40"), "has no checkpoint of these options"),
    ):
        refused = _distil(*arguments, "--snapshot", *other)
        assert refused.returncode == 1
        assert said in " ".join(refused.stderr.split())
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "data").iterdir())
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--precision", "int4"), 2, "'int4' is not one of int8, fp16, bf16, fp32"),
        (("--taps", "3,x"), 2, "'3,x' is not a comma list of layers"),
        (("--taps", "3,31"), 1, "--taps names layer 31; smollm2-135m-instruct has 30"),
        (("--device", "nosuch"), 1, "--device nosuch cannot be used"),
        (("--device", "meta:x"), 1, "--device meta:x cannot be used"),
        (("--seed", str(2**80)), 2, "less than or equal to 4294967295"),
        (("--threads", "100000"), 2, "less than or equal to 1024"),
        (("--data", "none.json"), 1, "cannot read the data none.json"),
        (("--model", "no-such-model"), 1, "no-such-model"),
        (("--set", "engine.block_size=0"), 1, "block_size"),
    ],
)
def test_bad_usage_is_one_sentence_and_no_traceback(
    arguments: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    done = _distil("--out", str(tmp_path / "run"), *arguments)
    assert done.returncode == status, done.stderr
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not is_pulled, reason=f"{MODEL} is not pulled")
def test_data_of_which_nothing_can_be_held_out_are_refused_before_the_answers(
    tmp_path: Path,
) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n', encoding="utf-8")
    arguments = ("--smoke", "--self-asked", "0", "--data", str(data))
    done = _distil("--out", str(tmp_path / "run"), *arguments)
    assert done.returncode == 1, done.stderr
    assert "at least two conversations are needed" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "answers.jsonl").exists()


@pytest.mark.skipif(not is_pulled, reason=f"{MODEL} is not pulled")
def test_a_place_that_cannot_be_written_is_told_without_a_traceback(tmp_path: Path) -> None:
    # A directory where the answers are to go: told by the system in the middle of the run.
    (tmp_path / "questions.jsonl").mkdir()
    done = _distil("--out", str(tmp_path), "--smoke", "--self-asked", "0")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stderr.split())
    assert "questions.jsonl: Is a directory; with that put right, --resume goes on" in said
    assert "Traceback" not in done.stderr


def test_a_plain_file_for_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("", encoding="utf-8")
    done = _distil("--out", str(tmp_path / "x"))
    assert done.returncode == 1
    assert "is a file; a directory is wanted" in done.stderr
