"""Quantisation, parameter groups, the loss, and a stage that is stopped and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError
from mirror_sd.training import answers, export, features, optimiser, report
from mirror_sd.training.answers import Answer
from mirror_sd.training.dataset import Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.training.evaluation import evaluate
from mirror_sd.training.fake_quantise import stored
from mirror_sd.training.loss import cross_entropy
from mirror_sd.training.plan import TrainPlan
from mirror_sd.training.trainer import Trainer
from mirror_sd.uir import draft_file
from mirror_sd.uir.draft_file import MATRICES, VECTORS, Precision
from tests.unit.training import tiny

PLAN = TrainPlan(
    unroll=2, batch_tokens=64, warmup=2, rate=1e-2, ema=0.9, evaluate_every=4, checkpoint_every=3
)


@pytest.mark.parametrize("inputs", [32, 64, 40, 7])
def test_fake_quantised_weights_are_those_of_the_file(inputs: int) -> None:
    matrix = torch.randn(48, inputs, generator=torch.Generator().manual_seed(inputs))
    matrix[0] = 0.0
    matrix[1, 0] = 1e-9
    codes, scales = draft_file.quantise(matrix.numpy())
    expected = draft_file.dequantise(codes, scales)
    np.testing.assert_array_equal(stored(matrix, "int8").numpy(), expected)


@pytest.mark.parametrize("precision", ["int8", "fp16", "bf16", "fp32"])
def test_the_model_computes_with_what_its_file_will_hold(
    precision: Precision, tmp_path: Path
) -> None:
    model = tiny.model()
    path = tmp_path / "x.draft.safetensors"
    vocabulary = np.arange(tiny.DRAFT_VOCABULARY, dtype=np.int32)
    draft_file.write(path, export.program(model, vocabulary, precision))
    found = draft_file.read(path)
    with torch.no_grad():
        expected = {k: v.detach() for k, v in model.weights(precision).items()}
    assert found.spec.precision == precision
    for name in (*VECTORS, *MATRICES):
        np.testing.assert_allclose(
            found.weights[name], expected[name].numpy(), rtol=1e-6, atol=1e-9, err_msg=name
        )


def test_the_gradient_passes_straight_through_the_rounding() -> None:
    matrix = torch.randn(8, 64, requires_grad=True)
    wanted = torch.randn(8, 64)
    (stored(matrix, "int8") * wanted).sum().backward()
    assert matrix.grad is not None
    torch.testing.assert_close(matrix.grad, wanted)


@pytest.mark.parametrize(
    ("precision", "rate"), [("int8", 5e-5), ("fp16", 1e-4), ("bf16", 1e-4), ("fp32", 1e-2)]
)
def test_each_parameter_has_the_rate_of_what_it_is_stored_in(
    precision: Precision, rate: float
) -> None:
    model = tiny.model()
    groups = optimiser.create(model, precision, PLAN).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: g for g in groups for p in g["params"]}
    assert set(found) == {*VECTORS, *MATRICES}
    others = [name for name in MATRICES if name != "head"]
    assert {found[name]["lr"] for name in others} == {rate}
    assert found["head"]["lr"] == (rate * PLAN.head_share if precision == "fp32" else rate)
    assert {found[name]["stored"] for name in MATRICES} == {precision}
    assert {found[name]["stored"] for name in VECTORS} == {"fp32"}
    assert {found[name]["lr"] for name in VECTORS} == {1e-2 if precision == "fp32" else 1e-4}


def test_the_loss_and_its_gradient_are_those_of_a_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    # More rows than one chunk.
    hidden = torch.randn(1100, 16, generator=generator, requires_grad=True)
    head = torch.randn(30, 16, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(30, generator=generator)[:5] for _ in range(1100)])
    shares = torch.rand(1100, 5, generator=generator).softmax(dim=1)
    dense = torch.zeros(1100, 30).scatter_(1, ids, shares)
    expected = functional.cross_entropy(hidden @ head.T, dense, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, head))
    loss = cross_entropy(hidden, head, ids, shares, torch.float32)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _trainer(model: DraftModel, directory: Path, precision: Precision, steps: int) -> Trainer:
    data = tiny.dataset(directory)
    file = directory / "checkpoint"
    return Trainer(
        model,
        data,
        replace(PLAN, steps=steps),
        precision,
        steps=steps,
        seed=5,
        dtype=torch.float32,
        file=file,
        mark="tiny",
    )


def _measure(model: DraftModel) -> dict[str, Any]:
    return {"tokens_per_verify": float(model.head.detach().sum()), "acceptance": 0.0}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_stage_that_was_cut_short_ends_as_one_that_was_not(
    precision: Precision, tmp_path: Path
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = _trainer(tiny.model(), tmp_path / "whole", precision, 8)
    whole.run(_measure, lambda step, loss: None)
    cut = _trainer(tiny.model(), tmp_path / "cut", precision, 8)

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.run(_measure, stop)
    # Other weights: all that is trained comes from the checkpoint.
    model = tiny.model()
    for parameter in (*model.parameters(), model.feature_scale):
        parameter.data.zero_()
    again = _trainer(model, tmp_path / "cut", precision, 8)
    assert again.resume() == 3
    again.run(_measure, lambda step, loss: None)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=0, atol=0)
    assert again.curves.losses == whole.curves.losses
    assert again.curves.acceptance == whole.curves.acceptance


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_a_damaged_checkpoint_is_told(tmp_path: Path, kept: int) -> None:
    trainer = _trainer(tiny.model(), tmp_path, "fp32", 3)
    trainer.run(_measure, lambda step, loss: None)
    file = tmp_path / "checkpoint"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="checkpoint is damaged"):
        _trainer(tiny.model(), tmp_path, "fp32", 3).resume()


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    trainer = _trainer(tiny.model(), tmp_path, "fp32", 3)
    (tmp_path / "checkpoint.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"is the disk full.*checkpoint\.partial"):
        trainer.run(_measure, lambda step, loss: None)


def test_room_for_the_hidden_states_is_taken_before_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    features._file(path, np.uint16, (1000, 1000))
    assert 512 * path.stat().st_blocks >= path.stat().st_size > 2_000_000


@pytest.mark.parametrize("line", [b"garbage", b"[]", b'{"key": "x"}', b"\xff\xfe"])
def test_damaged_answers_of_a_run_are_told_with_their_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "answers.jsonl"
    whole = Answer((1, 2, 3), 1, "en", is_held_out=False, is_whole=True)
    file.write_text(json.dumps({"key": "a", **asdict(whole)}) + "\n", encoding="utf-8")
    with file.open("ab") as log:
        log.write(line + b"\n")
    engine = cast(Engine, None)
    with pytest.raises(ConfigError, match=r"answers\.jsonl, line 2 is damaged"):
        answers.answer(engine, "m", [], (), file, lambda done: None)


def test_a_checkpoint_of_another_stage_is_not_taken_up(tmp_path: Path) -> None:
    trainer = _trainer(tiny.model(), tmp_path, "fp32", 3)
    trainer.run(_measure, lambda step, loss: None)
    other = Trainer(
        tiny.model(),
        tiny.dataset(tmp_path),
        PLAN,
        "fp32",
        steps=3,
        seed=5,
        dtype=torch.float32,
        file=tmp_path / "checkpoint",
        mark="other",
    )
    assert other.resume() == 0


def test_training_learns_what_follows_from_the_token_before(tmp_path: Path) -> None:
    trainer = _trainer(tiny.model(), tmp_path, "fp32", 80)
    data = tiny.dataset(tmp_path)
    held_out = data.conversations(held_out=True)
    before = evaluate(trainer.model, data, held_out, 3, "fp32", torch.float32)
    trainer.run(_measure, lambda step, loss: None)
    after = evaluate(trainer.model, data, held_out, 3, "fp32", torch.float32)
    assert before["tokens_per_verify"] < 1.5
    assert after["tokens_per_verify"] > 1.8
    assert set(after["languages"]) == {"en", "zh"}
    first, last = (trainer.curves.losses[at][1] for at in (0, -1))
    assert (len(first), len(last)) == (1, 2)
    assert max(last) < 0.7 * first[0]


def test_prompts_are_learnt_from_too_but_only_answers_are_the_targets_own_choice(
    tmp_path: Path,
) -> None:
    trainer = _trainer(tiny.model(), tmp_path, "fp32", 3)
    data = tiny.dataset(tmp_path)
    batch = data.batch([0, 1])
    lengths, prompts = data.lengths[:2], data.prompt_lengths[:2]
    assert batch.is_known.sum(dim=1).tolist() == (lengths - 1).tolist()
    assert batch.is_answer.sum(dim=1).tolist() == (lengths - prompts).tolist()
    ids, shares, _ = trainer._goal(batch)
    assert len(ids) == len(shares) == int(batch.is_known.sum())
    of_answers = batch.is_answer[batch.is_known]
    hard = PLAN.hard_share
    assert hard > 0 and (shares[~of_answers, -1] == 0).all()
    torch.testing.assert_close(shares[~of_answers, :-1], batch.shares[~of_answers])
    assert (shares[of_answers, -1] == hard).all()
    torch.testing.assert_close(shares[of_answers, :-1], (1 - hard) * batch.shares[of_answers])
    labels = batch.labels[batch.is_answer]
    assert (labels >= 0).all() and torch.equal(ids[of_answers, -1], labels)


@pytest.mark.parametrize(("steps", "drawn"), [(1, 1), (8, 7), (60, 46), (150, 131)])
def test_curves_of_few_steps_are_still_lines(steps: int, drawn: int) -> None:
    line = report.smoothed(np.full(steps, 2.5))
    assert len(line) == drawn and np.allclose(line, 2.5)


@pytest.mark.parametrize(
    ("name", "kept"), [("index.npz", 100), ("index.npz", 0), ("tokens.npy", 40), ("ids.npy", 0)]
)
def test_damaged_data_are_told_with_what_to_do(tmp_path: Path, name: str, kept: int) -> None:
    tiny.dataset(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"is broken: .* --resume makes it anew"):
        Dataset(tmp_path)


def test_files_of_two_runs_are_no_data(tmp_path: Path) -> None:
    tiny.dataset(tmp_path)
    np.save(tmp_path / "tokens.npy", np.zeros(3, np.int32))
    with pytest.raises(ConfigError, match="not all of its files have"):
        Dataset(tmp_path)


_WORKER = """
import sys
import torch
from torch import distributed
from mirror_sd.training import optimiser

rank = int(sys.argv[2])
distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
half = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
# Their sum is beyond fp16, their mean is not.
half.grad = torch.tensor([60000.0 - 64 * rank, float(rank)], dtype=torch.float16)
frozen = torch.nn.Parameter(torch.zeros(1))
optimiser.synchronise([half, frozen])
print(half.grad.tolist(), frozen.grad)
distributed.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without distributed training"
)
def test_gradients_of_several_processes_are_averaged_in_fp32(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path / "group"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=90)[0].strip() for worker in workers]
    assert said == ["[59968.0, 0.5] None"] * 2
