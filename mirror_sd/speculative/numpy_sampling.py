"""Sampling in numpy: the same chain as `src/sampling.cpp`, where that is not built.

The two give the same token unless rounding decides: their exp and log differ in the last bit, which
matters where two noisy scores, or a nucleus's probability and top_p, agree to about 15 digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Float32
from mirror_sd.messages import SamplingParams, TokenLogprob
from mirror_sd.philox import GREEDY_BELOW, MAX_GUMBEL, gumbel
from mirror_sd.speculative.sampling import InvalidLogits, Judgement, judge_rows

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class NumpyChooser:
    """See `sampling.TokenChooser`."""

    def __init__(self, params: SamplingParams, completion: Iterable[int] = ()) -> None:
        if not math.isfinite(params.temperature) or math.isnan(params.top_p):
            raise ValueError(f"temperature {params.temperature}, top_p {params.top_p}")
        self._params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._is_greedy = params.temperature < GREEDY_BELOW
        self._penalised = bool(params.presence_penalty or params.frequency_penalty)
        self._counts: Counter[int] = Counter(completion if self._penalised else ())

    def commit(self, token: int) -> None:
        if self._penalised:
            self._counts[token] += 1

    def choose(self, logits: Float32, position: int) -> int:
        row = self._adjusted(logits)
        if self._is_greedy:
            return checked_argmax(row)
        scaled = row.astype(np.float64) / self._params.temperature
        checked_argmax(scaled)
        kept = _top_k_top_p(scaled, self._params.top_k, self._params.top_p)
        if kept is None:
            kept = _reachable(scaled, self._params.seed, position)
        scores = scaled[kept] + gumbel(self._params.seed, position, kept)
        best = scores.max()
        return int(kept[scores == best].min())

    def judge(self, logits: Float32, draft: Sequence[int], position: int, room: int) -> Judgement:
        stops = self._params.stop_token_ids
        return judge_rows(
            self, logits, draft, position, room, stops=stops, keeps=lambda _, ours, its: ours == its
        )

    def _adjusted(self, logits: Float32) -> Float32:
        if self._bias_ids.size == 0 and not self._counts:
            return logits
        row = logits.copy()
        row[self._bias_ids] += self._bias
        if self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            row[ids] -= np.float32(self._params.presence_penalty)
            row[ids] -= np.float32(self._params.frequency_penalty) * counts
        return row


def checked_argmax(row: NDArray[np.floating]) -> int:
    """The lowest index of the maximum; raises `InvalidLogits` where it is not finite."""
    token = int(row.argmax())
    if not np.isfinite(row[token]):
        raise InvalidLogits(f"logit {row[token]} at token {token}")
    return token


def token_logprob(logits: Float32, token: int, best: int) -> TokenLogprob:
    """See `sampler.token_logprob`."""
    peak = np.float64(logits[checked_argmax(logits)])
    row = logits.astype(np.float64)
    row -= peak + np.log(np.exp(row - peak).sum())
    top = _largest(row, best) if best > 0 else np.empty(0, dtype=np.int64)
    return TokenLogprob(
        token_id=token,
        logprob=float(row[token]),
        top=tuple((int(i), float(row[i])) for i in top),
    )


def _largest(row: Float64, count: int) -> Int64:
    """Indexes of the `count` largest, best first, ties to the lower index."""
    if count >= row.size:
        candidates = np.arange(row.size)
    else:
        threshold = np.partition(row, row.size - count)[row.size - count]
        candidates = np.flatnonzero(row >= threshold)
    order = np.argsort(-row[candidates], kind="stable")
    largest: Int64 = candidates[order][:count]
    return largest


def _top_k_top_p(scaled: Float64, top_k: int, top_p: float) -> Int64 | None:
    """Token ids left by both masks, best first; None if both are off."""
    if 0 < top_k < scaled.size:
        kept = _largest(scaled, top_k)
        return kept if top_p >= 1.0 else kept[: _nucleus(scaled[kept], top_p, None)]
    if top_p >= 1.0:
        return None
    weights = np.exp(scaled - scaled.max())
    total = float(weights.sum())
    # The nucleus is nearly always among a few hundred tokens: sort no more than needed.
    for count in (256, 4096, scaled.size):
        kept = _largest(scaled, count)
        size = _nucleus(scaled[kept], top_p, total)
        if size < kept.size or kept.size == scaled.size:
            break
    return kept[:size]


def _nucleus(ordered: Float64, top_p: float, total: float | None) -> int:
    """Length of the shortest prefix of descending `ordered` with probability >= top_p.

    `total` is the sum of exp(x - max) over all tokens if `ordered` is not all of them.
    """
    weights = np.exp(ordered - ordered[0])
    cumulative = np.cumsum(weights) / (weights.sum() if total is None else total)
    return min(int(np.searchsorted(cumulative, top_p, side="left")) + 1, ordered.size)


def _reachable(scaled: Float64, seed: int, position: int) -> Int64:
    """The tokens that noise can lift to the top, a superset of the winner.

    Noise for all of a large vocabulary costs a millisecond; no token lower than a noisy lead by
    more than the largest possible noise can win, so it needs none.
    """
    leaders = np.flatnonzero(scaled >= scaled.max() - 2.0)[:1024]
    lead = float((scaled[leaders] + gumbel(seed, position, leaders)).max())
    return np.flatnonzero(scaled >= lead - MAX_GUMBEL)
