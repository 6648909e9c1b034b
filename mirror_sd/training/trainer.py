"""Fits a head: first in fp32, then as each precision will store it.

A stage goes on from its last checkpoint, and ends as if it had never been stopped: batches come in
an order of the seed, and nothing else is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EIO
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from mirror_sd.errors import ConfigError
from mirror_sd.training import optimiser as optimisers
from mirror_sd.training.dataset import Batch, Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.training.loss import cross_entropy, entropy
from mirror_sd.training.plan import TrainPlan
from mirror_sd.uir.draft_file import Precision

# Of what a later step weighs beside the one before it: chains get that far less often.
_STEP_WEIGHT = 0.8
Measure = Callable[[DraftModel], dict[str, Any]]
Note = Callable[[int, float], None]


@dataclass(slots=True)
class Curves:
    """What the report draws. `losses`: (step, nats above the target's entropy, by unrolled step);
    `acceptance`: (step, tokens per verify, acceptance) on held-out conversations."""

    losses: list[tuple[int, list[float]]] = field(default_factory=list)
    acceptance: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0


class Trainer:
    """One stage: `steps` updates in one precision. `file`: where its checkpoint is kept."""

    def __init__(
        self,
        model: DraftModel,
        data: Dataset,
        plan: TrainPlan,
        precision: Precision,
        *,
        steps: int,
        seed: int,
        dtype: torch.dtype,
        file: Path,
        mark: str,
    ) -> None:
        self.model, self.curves, self.step = model, Curves(), 0
        self._data, self._plan, self._steps, self._seed = data, plan, steps, seed
        self._dtype, self._file, self._mark = dtype, file, mark
        model.precision = precision
        self._optimiser = optimisers.create(model, precision, plan)
        self._average = optimisers.Average(model, plan.ema)
        self._device = model.embedding.device
        needs_scaling = dtype == torch.float16
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=needs_scaling)

    def run(self, measure: Measure, note: Note) -> None:
        """Train to the end, from where it is; the model then has the average of its weights.
        `note` gets (step, loss) after each step."""
        batches = self._data.epochs(self._plan.batch_tokens, self._seed)
        begin = time.monotonic()
        before = self.curves.seconds
        for conversations in islice(batches, self.step, self._steps):
            losses = self._update(self._data.batch(conversations))
            self.step += 1
            self.curves.losses.append((self.step, losses))
            note(self.step, losses[0])
            is_last = self.step == self._steps
            if is_last or self.step % self._plan.evaluate_every == 0:
                self._measure(measure)
            self.curves.seconds = before + time.monotonic() - begin
            if is_last or self.step % self._plan.checkpoint_every == 0:
                self._save()
        self.take_average()

    def _update(self, batch: Batch) -> list[float]:
        optimisers.set_rates(self._optimiser, self.step, self._steps, self._plan.warmup)
        self._optimiser.zero_grad(set_to_none=True)
        total, losses = self._loss(batch)
        torch.autograd.backward(self._scaler.scale(total))
        self._scaler.unscale_(self._optimiser)
        parameters = list(self.model.parameters())
        optimisers.synchronise(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, self._plan.clip)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        self._average.update(self.model)
        return losses

    def _loss(self, batch: Batch) -> tuple[Tensor, list[float]]:
        """(what is minimised, nats above the target's entropy of each unrolled step)."""
        device, low = self._device, self._dtype
        tokens, features = batch.token_ids.to(device), batch.features.to(device)
        ids, shares, floor = (t.to(device) for t in self._goal(batch))
        total, losses = torch.zeros((), device=device), []
        with torch.autocast(device.type, low, enabled=low != torch.float32):
            weights = self.model.weights()
            states = self.model.unroll(weights, tokens, features, self._unroll())
            for depth, state in enumerate(states):
                wanted = _started(batch.is_known, depth)
                among = wanted[batch.is_known].to(device)
                hidden = self.model.norm(state[wanted.to(device)].float(), weights["final_norm"])
                loss = cross_entropy(hidden, weights["head"], ids[among], shares[among], low)
                loss = loss / max(len(hidden), 1)
                total = total + _STEP_WEIGHT**depth * loss
                losses.append(float(loss.detach()) - float(floor[among].mean()))
        return total, losses

    def _unroll(self) -> int:
        is_first = self.model.precision == "fp32"
        is_first = is_first and self.step < self._plan.first_share * self._steps
        return 1 if is_first else self._plan.unroll

    def _goal(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, shares, entropy [N]) of the known rows: the target's distribution, and in answers a
        share of the target's own token. Nobody chose those of a prompt."""
        known = batch.is_known
        labels = batch.labels[known][:, None]
        own = self._plan.hard_share * (batch.is_answer[known][:, None] & (labels >= 0))
        ids = torch.cat((batch.ids, labels.clamp(min=0)), dim=1)
        shares = torch.cat((batch.shares * (1 - own), own.float()), dim=1)
        return ids, shares, entropy(batch.shares)

    def _measure(self, measure: Measure) -> None:
        """Of the average, not of the weights as they are."""
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._average.copy_to(self.model)
        row = measure(self.model)
        self.curves.acceptance.append((self.step, row["tokens_per_verify"], row["acceptance"]))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(own[name])

    def _save(self) -> None:
        """Raises `OSError` where there is no room for it."""
        state = {
            "mark": self._mark,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "scaler": self._scaler.state_dict(),
            "average": self._average.state(),
            "losses": self.curves.losses,
            "acceptance": self.curves.acceptance,
            "seconds": self.curves.seconds,
        }
        partial = self._file.with_suffix(".partial")
        try:
            torch.save(state, partial)
        except RuntimeError as error:
            # So torch tells of a file that cannot be written, a full disk among the reasons.
            partial.unlink(missing_ok=True)
            told = str(error).partition("\n")[0]
            raise OSError(EIO, f"{told} (is the disk full?)", str(partial)) from error
        partial.replace(self._file)

    def take_average(self) -> None:
        """Give the model the average of its weights so far."""
        self._average.copy_to(self.model)

    def resume(self) -> int:
        """Go back to the checkpoint, if there is one of this very stage; the steps done.

        Raises `ConfigError` for a damaged file.
        """
        if not self._file.exists():
            return 0
        try:
            state = torch.load(self._file, weights_only=True)
            mark = state["mark"]
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, UnpicklingError) as error:
            raise ConfigError(
                f"the checkpoint {self._file} is damaged ({type(error).__name__}); without it the"
                " stage begins anew"
            ) from error
        if mark != self._mark:
            return 0
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._scaler.load_state_dict(state["scaler"])
        self._average.load(state["average"])
        self.curves = Curves(state["losses"], state["acceptance"], float(state["seconds"]))
        return self.step


def _started(is_known: Tensor, depth: int) -> Tensor:
    """The rows [B, L] that a chain begun `depth` tokens earlier, in the same text, reaches."""
    if depth == 0:
        return is_known
    earlier = torch.zeros_like(is_known)
    earlier[:, depth:] = is_known[:, :-depth]
    return is_known & earlier
