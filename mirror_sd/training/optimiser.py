"""One AdamW over parameters that are stored in different precisions, and their moving average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mirror_sd.training.plan import HALF_RATE, INT8_RATE, TrainPlan
from mirror_sd.uir.draft_file import VECTORS, Precision

_BETAS = (0.9, 0.95)
_LAST_RATE = 0.02


def create(model: nn.Module, precision: Precision, plan: TrainPlan) -> torch.optim.AdamW:
    """In fp32 one pace for all but the head's rows. Else int8 fake-quantised matrices, matrices in
    fp16 or bf16, and the norms, which stay fp32, are groups of their own, each with the rate of
    what it is stored in. The parameters, their gradients and moments are fp32 always."""
    parts: dict[str, list[Tensor]] = {"norms": [], "head": [], "matrices": []}
    for name, parameter in model.named_parameters():
        part = "norms" if name in VECTORS else "head" if name == "head" else "matrices"
        parts[part].append(parameter)
    if precision == "fp32":
        rates = {"norms": plan.rate, "head": plan.rate * plan.head_share, "matrices": plan.rate}
    else:
        own = INT8_RATE if precision == "int8" else HALF_RATE
        rates = {"norms": HALF_RATE, "head": own, "matrices": own}
    groups: list[dict[str, Any]] = [
        {
            "params": parameters,
            "lr": rates[part],
            "weight_decay": plan.weight_decay if part == "matrices" else 0.0,
            "stored": "fp32" if part == "norms" else precision,
        }
        for part, parameters in parts.items()
    ]
    for group in groups:
        group["peak"] = group["lr"]
    return torch.optim.AdamW(groups, betas=_BETAS, fused=True)


def set_rates(optimiser: torch.optim.Optimizer, step: int, steps: int, warmup: int) -> None:
    """Linear warm-up, then a cosine down to a fiftieth of each group's rate."""
    if step < warmup:
        share = (step + 1) / warmup
    else:
        along = (step - warmup) / max(steps - warmup, 1)
        share = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * along))
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * share


def synchronise(parameters: Iterable[Tensor]) -> None:
    """Average the gradients over the processes of a distributed run, in fp32.

    `mirror-sd distil` is one process. A program that trains in several starts their group itself,
    and gives each process's `Trainer` a seed of its own, so that each draws other batches.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for parameter in parameters:
        if parameter.grad is not None:
            wide = parameter.grad.float()
            distributed.all_reduce(wide)
            parameter.grad.copy_(wide / distributed.get_world_size())


class Average:
    """The exponential moving average of a model's parameters, in fp32. Early on it forgets faster,
    so that the start does not weigh on it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._updates = 0
        self.values = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self._updates += 1
        decay = min(self._decay, self._updates / (self._updates + 10))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.values[name].lerp_(parameter.float(), 1 - decay)

    def copy_to(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.values[name])

    def state(self) -> dict[str, Any]:
        return {"updates": self._updates, "values": self.values}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = int(state["updates"])
        for name, value in state["values"].items():
            self.values[name].copy_(value)
