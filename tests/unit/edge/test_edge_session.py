"""Answers of the direct call, held against those of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from mirror_sd import offline
from mirror_sd.edge.session import EdgeSession, Message, Options
from mirror_sd.errors import ConfigError, ContextLengthExceeded
from mirror_sd.messages import Chunk, SamplingParams, Submit

QUESTIONS = (
    "Write the numbers from one to ten in words, and then write them again.",
    "How do I return an order that arrived damaged?",
)
LENGTH = 48
OPTIONS = Options(draft_engine="cpu", max_length=LENGTH, threads=2)
# On a busy machine no draft would seem to pay.
ALWAYS_THE_HEAD = {
    "MIRROR_SD__SPECULATION__DRAFTER": "head",
    "MIRROR_SD__SPECULATION__MIN_TOKENS": "3",
}


@pytest.fixture(scope="module")
def drafting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALWAYS_THE_HEAD.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def session(drafting: None) -> EdgeSession:
    return EdgeSession(OPTIONS)


@pytest.fixture(scope="module")
def plain_answers(session: EdgeSession) -> list[str]:
    """Of the same target, without drafts."""
    tokenizer = offline.load_tokenizer(OPTIONS.config())
    answers = []
    for question in QUESTIONS:
        session.engine.add(
            Submit(
                request_id="plain",
                model=session.engine.model_name,
                prompt=tuple(tokenizer.encode_chat([("user", question)])),
                params=SamplingParams(
                    max_tokens=LENGTH,
                    seed=0,
                    temperature=0.0,
                    stop_token_ids=tokenizer.facts.eos_token_ids,
                    speculation=False,
                ),
                device_class="cpu",
            )
        )
        tokens: list[int] = []
        while session.engine.has_work:
            for output in session.engine.step():
                tokens += output.tokens if isinstance(output, Chunk) else ()
        answers.append(tokenizer.decode(tokens))
    return answers


def asked(session: EdgeSession, question: str) -> tuple[str, list[str]]:
    pieces: list[str] = []
    return session.answer([("user", question)], pieces.append), pieces


def test_drafts_on_onnxruntime_do_not_change_an_answer(
    session: EdgeSession, plain_answers: list[str]
) -> None:
    drafted = accepted = 0
    for question, expected in zip(QUESTIONS, plain_answers, strict=True):
        answer, pieces = asked(session, question)
        assert answer == expected == "".join(pieces)
        of_head = session.summary.usage.draft_sources.get("head", (0, 0))
        drafted, accepted = drafted + of_head[0], accepted + of_head[1]
    assert 0 < accepted <= drafted
    assert not list(session.notices())


def test_what_was_said_before_is_known_and_computed_once(session: EdgeSession) -> None:
    messages: list[Message] = [("user", QUESTIONS[1])]
    messages.append(("assistant", session.answer(messages, lambda _: None)))
    messages.append(("user", "And how long does it take?"))
    session.answer(messages, lambda _: None)
    assert session.summary.usage.cached_tokens >= 16


def test_a_stopped_answer_ends_soon_and_the_next_one_is_whole(
    session: EdgeSession, plain_answers: list[str]
) -> None:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 5:
            session.stop()

    answer = session.answer([("user", QUESTIONS[0])], show)
    assert session.is_stopped
    assert 5 <= session.summary.usage.completion_tokens < LENGTH
    assert plain_answers[0].startswith(answer) and len(answer) < len(plain_answers[0])
    session.engine.check_integrity()
    assert asked(session, QUESTIONS[0])[0] == plain_answers[0]
    assert not session.is_stopped


def test_the_oldest_messages_make_room_for_the_answer(session: EdgeSession) -> None:
    def turns(first: int) -> Iterator[Message]:
        for number in range(first, 40):
            yield "user", f"question {number} " + "word " * 180
            yield "assistant", f"answer {number} " + "word " * 60

    last: Message = ("user", "the last question")
    kept = session.fitting([*turns(0), last])
    assert kept[-1] == last and 20 < len(kept) < 81
    assert kept == [*turns(40 - len(kept) // 2), last]
    assert all(one[0] != other[0] for one, other in pairwise(kept))
    with pytest.raises(ContextLengthExceeded, match="9"):
        session.fitting([("user", "word " * 9000)])


def test_a_longest_answer_as_long_as_the_context_leaves_what_was_said_before(
    session: EdgeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_options", replace(OPTIONS, max_length=8192))
    messages = [("user", "My name is Ann."), ("assistant", "Hi Ann"), ("user", "What is my name?")]
    assert session.fitting(messages) == messages
    long = ("assistant", "word " * 6500)
    assert session.fitting([messages[0], long, messages[2]]) == messages[2:]


def test_the_cache_holds_the_whole_context_in_every_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EdgeSession(Options(precision="fp32", threads=2)).engine.max_context == 8192
    monkeypatch.setenv("MIRROR_SD__ENGINE__KV_CACHE_MB", "8")
    assert Options().config().engine.kv_cache_mb == 8


def test_typical_acceptance_departs_from_the_model_and_says_so(
    drafting: None, plain_answers: list[str]
) -> None:
    session = EdgeSession(replace(OPTIONS, is_typical=True))
    assert "may differ from the model's own" in " ".join(session.notices())
    answers, departures = [], 0
    for question in QUESTIONS:
        answers.append(asked(session, question)[0])
        told = session.describe_answer()
        departures += int(told.partition("; accepted")[2].rpartition("; ")[2].split()[0])
    assert departures > 0 and answers != plain_answers


def test_fp16_is_bf16_for_a_target_whose_kernels_have_no_halves() -> None:
    for asked_for, given in (("fp16", "bf16"), ("int8", "int8"), ("fp32", "fp32")):
        assert Options(precision=asked_for).config().pools["cpu"].precision == given


def test_without_a_precision_the_target_has_that_of_its_engine_or_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Options().config().pools["cpu"].precision == "auto"
    monkeypatch.setenv("MIRROR_SD__POOLS__CPU__PRECISION", "bf16")
    assert Options().config().pools["cpu"].precision == "bf16"
    assert Options(precision="int8").config().pools["cpu"].precision == "int8"


def test_a_setting_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="threads"):
        Options(threads=-1).config()
