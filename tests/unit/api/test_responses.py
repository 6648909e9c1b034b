from __future__ import annotations

import json

from mirror_sd.api.choice import Delta, ScoredToken
from mirror_sd.api.responses import (
    ChatForm,
    ChoiceUsage,
    CompletionForm,
    Envelope,
    WholeChoice,
    event,
    usage,
)
from mirror_sd.messages import SequenceUsage, TokenLogprob
from tests.unit.api.small_model import small_tokenizer

VOCABULARY = small_tokenizer().vocabulary
A, HALF = (VOCABULARY.tokenizer.token_to_id(token) for token in ("a", "ä"))
SCORED = ScoredToken(A, 3, TokenLogprob(A, -0.5, ((A, -0.5), (HALF, -2.0))))


def test_text_and_finish_reason_never_share_a_chunk() -> None:
    for form in (
        ChatForm(VOCABULARY, with_logprobs=True),
        CompletionForm(VOCABULARY, with_logprobs=True),
    ):
        text, finish = form.chunks(Delta(0, "a", (SCORED,), "stop"))
        assert (text["finish_reason"], finish["finish_reason"]) == (None, "stop")
        assert finish.get("delta", {}) == {} and finish.get("text", "") == ""
        assert text["logprobs"] is not None and finish["logprobs"] is None


def test_only_the_opening_of_a_chat_carries_the_role_and_the_seed() -> None:
    form = ChatForm(VOCABULARY, with_logprobs=False)
    opening = form.opening(1, 7)
    assert opening["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert (opening["index"], opening["seed"]) == (1, 7)
    assert all("role" not in chunk["delta"] for chunk in form.chunks(Delta(1, "x", (), "stop")))


def test_chat_logprobs_have_token_bytes_and_alternatives() -> None:
    whole = WholeChoice(0, 1)
    whole.add(Delta(0, "a", (SCORED,), "stop"))
    entry = ChatForm(VOCABULARY, with_logprobs=True).whole(whole)
    assert entry["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "bytes:\\xe4", "logprob": -2.0, "bytes": [0xE4]},
            ],
        }
    ]
    assert entry["message"]["content"] == "a" and entry["finish_reason"] == "stop"


def test_completion_logprobs_are_parallel_lists() -> None:
    first = ScoredToken(HALF, 0, None)
    minus_infinity = ScoredToken(A, 4, TokenLogprob(A, float("-inf")))
    choice = WholeChoice(0, 1, ["xya"], [first, SCORED, minus_infinity], "length")
    logprobs = CompletionForm(VOCABULARY, with_logprobs=True).whole(choice)["logprobs"]
    assert logprobs == {
        "tokens": ["bytes:\\xe4", "a", "a"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [None, {"a": -0.5, "bytes:\\xe4": -2.0}, {"a": -9999.0}],
        "text_offset": [0, 3, 4],
    }


def test_usage_counts_a_prompt_once_and_adds_completions_up() -> None:
    report = SequenceUsage(
        cached_tokens=16,
        drafted_tokens=8,
        accepted_tokens=5,
        verify_rounds=3,
        draft_sources={"lookup": (5, 2), "head": (3, 3)},
    )
    choices = [
        ChoiceUsage(0, 20, 5, report),
        ChoiceUsage(0, 20, 7, report),
        ChoiceUsage(1, 30, 1, SequenceUsage(verify_rounds=1)),
    ]
    assert usage(choices) == {
        "prompt_tokens": 50,
        "completion_tokens": 13,
        "total_tokens": 63,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "speculation": {
            "drafted_tokens": 16,
            "accepted_tokens": 10,
            "verify_rounds": 7,
            "sources": {
                "head": {"drafted_tokens": 6, "accepted_tokens": 6},
                "lookup": {"drafted_tokens": 10, "accepted_tokens": 4},
            },
        },
    }
    # A stop string ended the last: what is known of the others does not go with all tokens.
    partial = usage([*choices, ChoiceUsage(1, 30, 1, None)])
    assert partial["completion_tokens"] == 14 and "speculation" not in partial


def test_an_event_is_one_line_of_json() -> None:
    block = event({"text": "a\nb 你\u2028"})
    assert block.startswith(b"data: ") and block.endswith(b"\n\n")
    assert block.count(b"\n") == 2
    assert json.loads(block[6:]) == {"text": "a\nb 你\u2028"}


def test_chunks_of_a_chat_have_an_object_type_of_their_own() -> None:
    chat = Envelope("i", "chat.completion", 1, "m", "fp", "default")
    text = Envelope("i", "text_completion", 1, "m", "fp", "default")
    assert chat.wrap([])["object"] == "chat.completion"
    assert chat.wrap([], is_chunk=True)["object"] == "chat.completion.chunk"
    assert text.wrap([], is_chunk=True)["object"] == "text_completion"
