from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror_sd.api.choice import Choice, Delta, Echo, ScoredToken
from mirror_sd.api.detokeniser import detokeniser
from mirror_sd.api.stop_strings import StopStrings
from mirror_sd.messages import Chunk, TokenLogprob
from tests.unit.api.small_model import small_tokenizer

TOKENIZER = small_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode_prompt(text)


def letters(text: str) -> list[int]:
    """One token a byte of the byte-level alphabet."""
    return [TOKENIZER.vocabulary.tokenizer.token_to_id(letter) for letter in text]


def choice(*stops: str, echo: Echo | None = None) -> Choice:
    pieces = detokeniser(TOKENIZER.vocabulary, is_text_start=True)
    return Choice(0, pieces, StopStrings(stops), echo)


def chunk(ids: list[int], *, scored: bool = False) -> Chunk:
    scores = tuple(TokenLogprob(id, -float(i)) for i, id in enumerate(ids)) if scored else None
    return Chunk(request_id="r", index=0, tokens=tuple(ids), logprobs=scores)


def run(of: Choice, ids: list[int], reason: str = "length", per_chunk: int = 1) -> list[Delta]:
    deltas = []
    for start in range(0, len(ids), per_chunk):
        delta = of.feed(chunk(ids[start : start + per_chunk], scored=True))
        if delta is not None:
            deltas.append(delta)
        if of.is_stopped:
            return deltas
    return [*deltas, of.finish(reason)]


@given(text=st.text(max_size=20), per_chunk=st.integers(1, 6), stop=st.sampled_from("ea你 \n"))
def test_the_answer_does_not_depend_on_how_tokens_are_grouped(
    text: str, per_chunk: int, stop: str
) -> None:
    ids = ids_of(text)
    one, many = choice(stop), choice(stop)
    alone, grouped = run(one, ids), run(many, ids, per_chunk=per_chunk)
    for deltas in (alone, grouped):
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert "".join(d.text for d in alone) == "".join(d.text for d in grouped)
    assert one.tokens_delivered == many.tokens_delivered
    assert sum(len(d.scores) for d in alone) == one.tokens_delivered
    assert alone[-1].finish_reason == grouped[-1].finish_reason


def test_a_stop_cuts_text_scores_and_count_at_its_last_token() -> None:
    subject = choice("cd")
    delta = subject.feed(chunk(letters("abcdefgh"), scored=True))
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("ab", "stop")
    assert len(delta.scores) == subject.tokens_delivered == 4


def test_the_stop_beats_the_length_cap() -> None:
    deltas = run(choice("cd"), letters("abcd"), reason="length")
    assert deltas[-1].finish_reason == "stop"


def test_held_back_text_and_scores_come_when_the_choice_ends() -> None:
    subject = choice("cde")
    assert subject.feed(chunk(ids_of("c"), scored=True)) is None
    last = subject.finish("length")
    assert (last.text, last.finish_reason, len(last.scores)) == ("c", "length", 1)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_character_that_the_end_cuts_in_half_is_left_out(reason: str) -> None:
    subject = choice()
    assert subject.feed(chunk(letters("ðŁ"), scored=True)) is None
    last = subject.finish(reason)
    assert (last.text, last.finish_reason, len(last.scores)) == ("", reason, 2)


def test_offsets_count_characters_and_half_characters_share_one() -> None:
    deltas = run(choice(), letters("aðŁĻĤb"))
    assert "".join(delta.text for delta in deltas) == "a🙂b"
    assert [score.offset for delta in deltas for score in delta.scores] == [0, 1, 1, 1, 1, 2]


def test_an_echo_comes_first_with_the_prompts_scores_and_is_not_searched_for_stops() -> None:
    prompt = ids_of("ab")
    subject = choice("b", echo=Echo("ab", tuple(prompt), (0, 1)))
    scores = (None, TokenLogprob(prompt[1], -2.0))
    first = Chunk(
        request_id="r",
        index=0,
        tokens=(ids_of("c")[0],),
        logprobs=(TokenLogprob(ids_of("c")[0], -1.0),),
        prompt_logprobs=scores,
    )
    delta = subject.feed(first)
    assert delta is not None
    assert (delta.text, subject.is_stopped, subject.tokens_delivered) == ("abc", False, 1)
    assert [score.offset for score in delta.scores] == [0, 1, 2]
    assert delta.scores[0] == ScoredToken(prompt[0], 0, None)


def test_an_echo_without_tokens_comes_at_the_end() -> None:
    assert choice(echo=Echo("ab", (1, 2), (0, 1))).finish("stop").text == "ab"
