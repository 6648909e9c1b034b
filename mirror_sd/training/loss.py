"""The distillation loss: the divergence from the target's distribution over the draft vocabulary.

Logits of thousands of rows by thousands of tokens are the largest thing in training. Their gradient
is computed along with the loss, chunk by chunk, so that no logits outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_ROWS_AT_ONCE = 1024


class _CrossEntropy(torch.autograd.Function):
    """Sum over rows of -sum_k p_k log softmax(h @ head.T)[id_k]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, shares: Tensor, dtype: torch.dtype
    ) -> Tensor:
        low, narrow = hidden.to(dtype), head.to(dtype)
        loss = hidden.new_zeros((), dtype=torch.float64)
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head)
        for begin in range(0, len(hidden), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            logits = functional.linear(low[part], narrow).float()
            p = shares[part]
            chosen = logits.gather(1, ids[part])
            total = logits.logsumexp(dim=1, keepdim=True)
            loss += (p * (total - chosen)).sum()
            gradient = logits.sub_(total).exp_().mul_(p.sum(dim=1, keepdim=True))
            gradient = gradient.scatter_add_(1, ids[part], -p).to(dtype)
            of_hidden[part] = gradient @ narrow
            of_head += gradient.T @ low[part]
        ctx.save_for_backward(of_hidden, of_head)
        return loss.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        [grad] = grads
        return of_hidden * grad, of_head * grad, None, None, None


def cross_entropy(
    hidden: Tensor, head: Tensor, ids: Tensor, shares: Tensor, dtype: torch.dtype
) -> Tensor:
    """Summed over the N rows, in nats.

    hidden [N, h] after the final norm; head [V, h]; ids [N, K] indexes into the draft vocabulary,
    none twice in a row unless its share is 0; shares [N, K] probabilities. `dtype`: of products.
    """
    loss: Tensor = _apply(hidden, head, ids, shares, dtype)
    return loss


_apply: Callable[..., Tensor] = _CrossEntropy.apply


def entropy(shares: Tensor) -> Tensor:
    """[N], of each row of shares [N, K]: what its cross entropy cannot fall below."""
    total: Tensor = torch.special.xlogy(shares, shares).sum(dim=1)
    return -total
