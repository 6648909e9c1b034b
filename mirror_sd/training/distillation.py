"""`mirror-sd distil` from beginning to end: data, fit in fp32, fit in each precision, exports.

Everything that takes long is kept in the output directory as it comes, under a mark of what it
depends on, and is not done again by a run that resumes.
"""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mirror_sd.backends.cpu_features import has_bf16_products
from mirror_sd.config import Config
from mirror_sd.drafts import SUFFIX
from mirror_sd.errors import ConfigError
from mirror_sd.training import evaluation, export, initial, tree
from mirror_sd.training.corpus import Target, collect
from mirror_sd.training.dataset import Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.training.plan import Plan, fingerprint
from mirror_sd.training.progress import Reporter
from mirror_sd.training.trainer import Curves, Trainer
from mirror_sd.uir import draft_file
from mirror_sd.uir.draft_file import Precision

# Held-out conversations that the curves are measured on along the way, and the chain they take.
_GLANCE, _GLANCE_CHAIN = 24, 4
_TREE_NODES = 8
Report = dict[str, Any]


@dataclass(slots=True)
class Distillation:
    """One run. `out` is made; with `device` "cpu" everything is computed there."""

    config: Config
    plan: Plan
    out: Path
    data: Path | None
    device: str
    reporter: Reporter
    _fitted_s: float = field(default=0.0, init=False)

    def run(self) -> Report:
        """Train, evaluate, export. The `seconds` of the report are those of all the processes that
        had a part in it. Raises `ConfigError`, `ModelError` or `UnsupportedModel`."""
        target, data, facts = self._collect()
        begin = time.monotonic()
        model = self._fresh(target, data)
        curves = {"fp32": self._fit(model, data, facts["mark"], "fp32", self.plan.train.steps)}
        parent = self._evaluate(model, data, "fp32")
        self.reporter.say(f"fp32: {_sentence(parent)}")
        exports = {}
        for precision in self.plan.precisions:
            one = copy.deepcopy(model)
            if precision != "fp32":
                steps = self.plan.train.mixed_steps
                curves[precision] = self._fit(one, data, facts["mark"], precision, steps)
            exports[precision] = self._export(one, data, target.name, precision, parent)
        report = {
            "model": target.name,
            "plan": self.plan.as_json(),
            "data": facts["facts"],
            "exports": exports,
            "parent": parent,
            "tree": self._tree(model, data),
            "curves": {name: asdict(found) for name, found in curves.items()},
        }
        stages = {"data": facts["seconds"]} | {name: c.seconds for name, c in curves.items()}
        rest_s = time.monotonic() - begin - self._fitted_s
        report["seconds"] = {name: round(spent) for name, spent in stages.items()}
        report["seconds"]["all"] = round(sum(stages.values()) + rest_s)
        return report

    def snapshot(self) -> Report:
        """Export what the checkpoint of the fp32 stage holds now, in each precision.

        Raises `ConfigError` where there is none of this plan.
        """
        target, data, facts = self._collect(may_make=False)
        model = self._fresh(target, data)
        trainer = self._trainer(model, data, facts["mark"], "fp32", self.plan.train.steps)
        step = trainer.resume()
        if step == 0:
            raise ConfigError(f"{self.out} has no checkpoint of these options (yet)")
        trainer.take_average()
        parent = self._evaluate(model, data, "fp32")
        exports = {
            precision: self._export(copy.deepcopy(model), data, target.name, precision, parent)
            for precision in self.plan.precisions
        }
        return {"model": target.name, "step": step, "parent": parent, "exports": exports}

    def _collect(self, *, may_make: bool = True) -> tuple[Target, Dataset, Report]:
        self.out.mkdir(parents=True, exist_ok=True)
        target = Target.of(self.config, self.out)
        data, facts = collect(
            self.config,
            target,
            self.plan,
            self.data,
            self.out,
            self.reporter,
            may_make=may_make,
        )
        told = facts["facts"]
        self.reporter.say(
            f"{told['conversations']} conversations with {told['answer_tokens']} answer tokens;"
            f" held out: {told['held_out_conversations']}"
        )
        return target, data, facts

    def _fresh(self, target: Target, data: Dataset) -> DraftModel:
        taps = self.plan.train.taps or _taps(data, target)
        spec = initial.draft_spec(
            target.spec, target.name, target.tokenizer_digest, taps, len(data.vocabulary)
        )
        return initial.draft_model(spec, target.head, data, self.plan.seed).to(self.device)

    def _trainer(
        self, model: DraftModel, data: Dataset, mark: str, precision: Precision, steps: int
    ) -> Trainer:
        train = asdict(self.plan.train)
        of_fp32 = {key: value for key, value in train.items() if key != "mixed_steps"}
        return Trainer(
            model,
            data,
            self.plan.train,
            precision,
            steps=steps,
            seed=self.plan.seed + (precision != "fp32"),
            dtype=_compute_dtype(self.device, precision),
            file=self.out / f"{precision}.checkpoint",
            mark=fingerprint(mark, of_fp32 if precision == "fp32" else train, precision, steps),
        )

    def _fit(
        self, model: DraftModel, data: Dataset, mark: str, precision: Precision, steps: int
    ) -> Curves:
        trainer = self._trainer(model, data, mark, precision, steps)
        begin = time.monotonic()
        done = trainer.resume()
        glance = data.conversations(held_out=True)[:_GLANCE]
        with self.reporter.stage(f"training, {precision}", steps) as advance:
            advance(done, "")
            trainer.run(
                lambda one: self._evaluate(one, data, precision, glance, _GLANCE_CHAIN),
                lambda step, loss: advance(1, _note(trainer, loss)),
            )
        self._fitted_s += time.monotonic() - begin
        return trainer.curves

    def _evaluate(
        self,
        model: DraftModel,
        data: Dataset,
        precision: Precision,
        conversations: list[int] | None = None,
        chain: int | None = None,
    ) -> Report:
        if conversations is None:
            conversations = data.conversations(held_out=True)
        dtype = _compute_dtype(self.device, precision)
        return evaluation.evaluate(
            model, data, conversations, chain or self.plan.chain, precision, dtype
        )

    def _export(
        self, model: DraftModel, data: Dataset, name: str, precision: Precision, parent: Report
    ) -> Report:
        """Write the file, read it again, and evaluate what it holds, which the model then has."""
        path = self.out / f"{name}.{precision}{SUFFIX}"
        draft_file.write(path, export.program(model, data.vocabulary, precision))
        export.load(model, path)
        found = self._evaluate(model, data, "fp32")
        lost = parent["acceptance"] - found["acceptance"]
        self.reporter.say(f"{path}: {_sentence(found)}, {100 * lost:+.1f} points lost to fp32")
        if lost >= export.MOST_LOST:
            self.reporter.say(
                f"warning: {precision} loses {100 * lost:.1f} points of acceptance; less than"
                f" {100 * export.MOST_LOST:.0f} are expected: raise --mixed-steps"
            )
        size = path.stat().st_size
        return {
            "file": path.name,
            "bytes": size,
            "points_lost": round(100 * lost, 2),
            "is_within_bound": lost < export.MOST_LOST,
            **found,
        }

    def _tree(self, model: DraftModel, data: Dataset) -> Report:
        """A static tree fitted to half of the held-out answers, on the other half."""
        held_out = data.conversations(held_out=True)
        chain, dtype = self.plan.chain, _compute_dtype(self.device, "fp32")
        model.precision = "fp32"
        ranks = evaluation.answer_ranks(model, data, held_out, max(chain, _TREE_NODES), dtype)
        fitted, other = ranks[::2], ranks[1::2]
        made = tree.best_tree(fitted, _TREE_NODES)
        return {
            "nodes": _TREE_NODES,
            "paths": sorted(list(path) for path in made),
            "tokens_per_verify": round(tree.tokens_per_verify(other, made), 4),
            f"chain_{chain}": round(tree.tokens_per_verify(other, tree.chain(chain)), 4),
            f"chain_{_TREE_NODES}": round(
                tree.tokens_per_verify(other, tree.chain(_TREE_NODES)), 4
            ),
        }


def write(report: Report, out: Path) -> Path:
    path = out / "report.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def prepare_threads(threads: int | None) -> int:
    """Set torch's threads (default: the cores available); how many they are."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def _taps(data: Dataset, target: Target) -> tuple[int, ...]:
    from mirror_sd.training.features import default_taps

    taps = default_taps(target.spec.num_layers)
    assert len(taps) * target.spec.hidden_size == data.feature_size
    return taps


def _compute_dtype(device: str, precision: Precision) -> torch.dtype:
    """What products are computed in; weights, gradients and sums over many rows are fp32."""
    if device != "cpu":
        return torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.bfloat16 if has_bf16_products() else torch.float32


def _note(trainer: Trainer, loss: float) -> str:
    latest = trainer.curves.acceptance[-1:]
    return f"loss {loss:.3f}" + "".join(f", {row[1]:.2f} tokens per verify" for row in latest)


def _sentence(row: Report) -> str:
    return f"{row['tokens_per_verify']:.2f} tokens per verify, acceptance {row['acceptance']:.3f}"
