from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder

from mirror_sd.api.detokeniser import TableDetokeniser, WindowedDetokeniser, detokeniser
from mirror_sd.api.vocabulary import Vocabulary
from tests.unit.api.small_model import (
    byte_level_encoder,
    metaspace_encoder,
    sentencepiece_encoder,
    wordpiece_encoder,
)

BYTE_LEVEL = byte_level_encoder()
SENTENCEPIECE = sentencepiece_encoder()
METASPACE = metaspace_encoder()
WORDPIECE = wordpiece_encoder()
ENCODERS = [BYTE_LEVEL, SENTENCEPIECE, METASPACE, WORDPIECE]
TEXTS = [
    "plain English, with punctuation!",
    "  spaces \n\n and\ttabs  ",
    "你好，世界。订单 12345",
    "🙂👩‍👩‍👧 emoji",
    "naïve café ﷽ \U0001f469\U0001f3fd",
    "",
]


def stream(encoder: Encoder, ids: list[int]) -> list[str]:
    pieces = detokeniser(Vocabulary(encoder), is_text_start=True)
    return [*(pieces.push(id) for id in ids), pieces.finish()]


def whole(encoder: Encoder, ids: list[int]) -> str:
    return encoder.decode(ids, skip_special_tokens=True)


any_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40)


@given(ids=any_ids)
def test_any_byte_level_ids_give_the_whole_decode(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids)) == whole(BYTE_LEVEL, ids)


@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_byte_level_tokens(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = stream(BYTE_LEVEL, ids)
    assert "".join(pieces) == whole(BYTE_LEVEL, ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def fits_decoders_rule(encoder: Encoder, ids: list[int]) -> bool:
    """Whether every run of byte tokens is UTF-8 by itself."""
    run = b""
    for id in [*ids, -1]:
        token = encoder.id_to_token(id) if id >= 0 else ""
        if token and token.startswith("<0x"):
            run += bytes.fromhex(token[3:5])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@pytest.mark.parametrize("encoder", [SENTENCEPIECE, METASPACE], ids=["strip", "metaspace"])
@given(data=st.data())
def test_sentencepiece_ids_give_the_whole_decode(encoder: Encoder, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text(alphabet="aehlo ▁你🙂\n<0xE4>", max_size=8), max_size=4))
    specials = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2)
    ids: list[int] = []
    for text in texts:
        ids += encoder.encode(text, add_special_tokens=False).ids + data.draw(specials)
    skipped = [id for id in ids if id not in Vocabulary(encoder).special_ids]
    if encoder is SENTENCEPIECE:
        assert fits_decoders_rule(encoder, skipped)
        assert "".join(stream(encoder, ids)) == whole(encoder, ids)
    elif not any(encoder.id_to_token(id).startswith("<0x") for id in ids):
        assert "".join(stream(encoder, ids)) == whole(encoder, ids)


@given(ids=st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1), max_size=30))
def test_any_sentencepiece_ids_give_text(ids: list[int]) -> None:
    text = "".join(stream(SENTENCEPIECE, ids))
    text.encode("utf-8")
    known = [id for id in ids if id not in Vocabulary(SENTENCEPIECE).special_ids]
    if fits_decoders_rule(SENTENCEPIECE, known):
        assert text == whole(SENTENCEPIECE, ids)


@given(ids=st.lists(st.integers(0, 11), max_size=20))
def test_a_decoder_of_another_kind_is_followed_by_its_window(ids: list[int]) -> None:
    vocabulary = Vocabulary(WORDPIECE)
    assert not vocabulary.is_tabular
    assert isinstance(detokeniser(vocabulary, is_text_start=True), WindowedDetokeniser)
    assert whole(WORDPIECE, ids).startswith("".join(stream(WORDPIECE, ids))[:1])


@pytest.mark.parametrize("text", ["hello world", "unaffable, do", "hello , hello"])
def test_a_wordpiece_text_is_streamed_whole(text: str) -> None:
    ids = WORDPIECE.encode(text, add_special_tokens=False).ids
    assert "".join(stream(WORDPIECE, ids)) == whole(WORDPIECE, ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "make", [byte_level_encoder, sentencepiece_encoder], ids=["bytes", "sentencepiece"]
)
def test_no_piece_has_a_part_of_a_character(make: Callable[[], Encoder], text: str) -> None:
    encoder = make()
    ids = encoder.encode(text, add_special_tokens=False).ids
    pieces = stream(encoder, ids)
    assert "".join(pieces) == whole(encoder, ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    vocabulary = Vocabulary(BYTE_LEVEL)
    ids = [BYTE_LEVEL.token_to_id("<|im_end|>"), *BYTE_LEVEL.encode("password").ids]
    shown = TableDetokeniser(vocabulary, is_text_start=True, with_specials=True)
    assert "".join(stream(BYTE_LEVEL, ids)) == "password"
    assert "".join(map(shown.push, ids)) == "<|im_end|>password"


def test_a_completion_keeps_the_space_that_a_text_start_loses() -> None:
    vocabulary = Vocabulary(SENTENCEPIECE)
    ids = SENTENCEPIECE.encode("hello", add_special_tokens=False).ids
    texts = []
    for is_text_start in (True, False):
        pieces = detokeniser(vocabulary, is_text_start=is_text_start)
        texts.append("".join(map(pieces.push, ids)))
    assert texts == ["hello", " hello"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    ids = BYTE_LEVEL.encode("🙂").ids
    if len(ids) == 1:
        ids = [BYTE_LEVEL.token_to_id(letter) for letter in "ðŁ"]
    pieces = detokeniser(Vocabulary(BYTE_LEVEL), is_text_start=True)
    assert [pieces.push(id) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert pieces.finish() == "\ufffd"


def test_a_token_is_shown_as_text_or_as_bytes() -> None:
    vocabulary = Vocabulary(BYTE_LEVEL)
    half = BYTE_LEVEL.token_to_id("ä")
    assert vocabulary.token_text(half) == "bytes:\\xe4"
    assert vocabulary.token_bytes(half) == b"\xe4"
    assert vocabulary.token_text(BYTE_LEVEL.token_to_id("<|im_end|>")) == "<|im_end|>"
    assert vocabulary.token_bytes(10_000) == b""
