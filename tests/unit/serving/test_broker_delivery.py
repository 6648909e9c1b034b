"""What a gateway keeps of a request, so that any other process may die."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror_sd.messages import Chunk, Finished, SamplingParams, SequenceUsage, Submit, TokenLogprob
from mirror_sd.serving.delivery import Delivery, Gap


def make_delivery(delivered: tuple[int, ...] = (), **params: object) -> Delivery:
    return Delivery(
        Submit(
            request_id="a",
            model="m",
            prompt=(1, 2),
            params=SamplingParams(max_tokens=50, seed=1, **params),
            delivered=delivered,
        )
    )


def chunk(index: int, *tokens: int, **fields: object) -> Chunk:
    return Chunk(request_id="a", index=index, tokens=tokens, **fields)


def finished(completion_tokens: int) -> Finished:
    usage = SequenceUsage(completion_tokens=completion_tokens)
    return Finished(request_id="a~2", reason="stop", usage=usage)


@given(st.lists(st.tuples(st.integers(-4, 1), st.integers(0, 6)), max_size=40))
def test_overlapping_chunks_give_each_token_once_and_a_gap_gives_none(
    spans: list[tuple[int, int]],
) -> None:
    delivery = make_delivery(logprobs=0)
    tokens: list[int] = []
    for offset, length in spans:
        index = max(0, len(tokens) + offset)
        span = range(index, index + length)
        logprobs = tuple(TokenLogprob(1000 + i, -float(i)) for i in span)
        frame = chunk(index, *(1000 + i for i in span), logprobs=logprobs)
        if index > len(tokens):
            with pytest.raises(Gap):
                delivery.accept(frame)
            continue
        fresh = delivery.accept(frame)
        if fresh is not None:
            assert fresh.index == len(tokens) and fresh.tokens
            assert fresh.logprobs is not None
            assert [entry.token_id for entry in fresh.logprobs] == list(fresh.tokens)
            tokens += fresh.tokens
    assert tokens == [1000 + i for i in range(len(tokens))]
    assert delivery.remainder().delivered == tuple(tokens)


def test_prompt_logprobs_are_given_once_and_asked_for_until_then() -> None:
    delivery = make_delivery(prompt_logprobs=True)
    scores = (None, TokenLogprob(2, -1.0))
    assert delivery.remainder().params.prompt_logprobs
    first = delivery.accept(chunk(0, 7, prompt_logprobs=scores))
    assert first is not None and first.prompt_logprobs == scores
    second = delivery.accept(chunk(0, 7, 8, prompt_logprobs=scores))
    assert second is not None and second.prompt_logprobs is None
    assert not delivery.remainder().params.prompt_logprobs


def test_a_finish_with_tokens_missing_is_a_gap() -> None:
    delivery = make_delivery()
    delivery.accept(chunk(0, 7, 8))
    with pytest.raises(Gap):
        delivery.complete(finished(3))
    assert delivery.complete(finished(2)).request_id == "a"


def test_logprobs_that_do_not_match_their_tokens_are_a_gap() -> None:
    with pytest.raises(Gap):
        make_delivery(logprobs=0).accept(chunk(0, 7, 8, logprobs=(TokenLogprob(7, -1.0),)))


def test_a_resumed_request_continues_after_what_it_was_given() -> None:
    delivery = make_delivery(delivered=(5, 6))
    fresh = delivery.accept(chunk(1, 6, 7))
    assert fresh is not None and (fresh.index, fresh.tokens) == (2, (7,))


def test_each_attempt_after_a_gap_has_its_own_id_on_the_wire() -> None:
    delivery = make_delivery()
    assert delivery.remainder().request_id == "a"
    delivery.renew()
    assert delivery.remainder().request_id == delivery.wire_id == "a~2"
    fresh = delivery.accept(Chunk(request_id="a~2", index=0, tokens=(1,)))
    assert fresh is not None and fresh.request_id == "a"
