"""Tokens to text, one by one, with never a part of a character.

The pieces of a stream, joined, are what decoding all its tokens at once gives, special tokens left
out. One exception: where a SentencePiece model writes byte tokens that are no UTF-8, the decoder
of the `tokenizers` library also discards the valid characters written by the byte tokens before
them; here those were delivered long ago, and stay.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from mirror_sd.api.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"


class Detokeniser(Protocol):
    """One per sequence. `is_light`: a token takes a look-up, not a call of the tokenizer."""

    is_light: bool

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        ...


class TableDetokeniser:
    """For decoders that work token by token: a look-up and an incremental UTF-8 decoder.

    `is_text_start` is True where the tokens begin a text and False where they go on from a prompt
    whose text is kept in front of them; it decides whether a SentencePiece leading space is
    stripped. `with_specials` shows special tokens too, as an echoed prompt does.
    """

    is_light = True

    def __init__(
        self, vocabulary: Vocabulary, *, is_text_start: bool, with_specials: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = frozenset[int]() if with_specials else vocabulary.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = is_text_start
        self._spaces_to_strip = vocabulary.leading_spaces if is_text_start else 0

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        if self._is_first:
            self._is_first = False
            spelled = self._vocabulary.first_token_bytes(token)
        else:
            spelled = self._vocabulary.token_bytes(token)
        while self._spaces_to_strip and spelled:
            if not spelled.startswith(b" "):
                self._spaces_to_strip = 0
                break
            self._spaces_to_strip -= 1
            spelled = spelled[1:]
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowedDetokeniser:
    """For any other decoder: decodes a short window of tokens again with each new one.

    The window begins at the tokens of the last complete piece, because a decoder may join a token
    to the one before it.
    """

    is_light = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._tokens: list[int] = []
        self._window = 0
        self._read = 0
        self._delivered: list[str] = []

    def push(self, token: int) -> str:
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._read])
        after = self._decode(self._tokens[self._window :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._tokens)
        self._delivered.append(after[len(before) :])
        return self._delivered[-1]

    def finish(self) -> str:
        delivered = "".join(self._delivered)
        whole = self._decode(self._tokens)
        return whole[len(delivered) :] if whole.startswith(delivered) else ""

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def detokeniser(vocabulary: Vocabulary, *, is_text_start: bool) -> Detokeniser:
    """The detokeniser that fits the vocabulary's decoder."""
    if vocabulary.is_tabular:
        return TableDetokeniser(vocabulary, is_text_start=is_text_start)
    return WindowedDetokeniser(vocabulary)
