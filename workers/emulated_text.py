"""The text of emulated answers: harmless words, a function of the prompt and the position alone, so
that a resumed or merged answer is the one that its client would have got alone."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mirror_sd.errors import ModelError

_SENTENCE = (
    "the morning light was soft and the water in the garden was clear while people came to sit "
    "under the old tree with bread tea and time to talk about what they had seen that day"
)
_SPACES = ("\u0120", "\u2581")
# The first of these that are neither special nor beyond the vocabulary, where it has no words.
_FALLBACK_IDS = range(32, 127)


class EmulatedText:
    """Token ids of the words of one vocabulary, in turn."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)

    def start(self, prompt: Sequence[int]) -> int:
        """Where in the words the answer to a prompt begins."""
        return zlib.crc32(array("q", prompt).tobytes())

    def token(self, start: int, position: int) -> int:
        return self._ids[(start + position) % len(self._ids)]


def word_ids(tokenizer_json: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of whole words in a tokenizer file; raises `ModelError` where it cannot be read."""
    try:
        document = msgspec.json.decode(tokenizer_json.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"cannot read {tokenizer_json}: {error}") from error
    known = _vocabulary(document)
    special = {entry["id"] for entry in document.get("added_tokens") or []}
    spelled = ([known.get(space + word) for space in _SPACES] for word in _SENTENCE.split())
    found = [next((id for id in ids if id is not None), None) for ids in spelled]
    words = tuple(id for id in found if id is not None and id not in special)
    if words:
        return words
    return tuple(id for id in _FALLBACK_IDS if id < vocab_size and id not in special) or (0,)


def _vocabulary(document: dict[str, Any]) -> dict[str, int]:
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # a unigram model lists its pieces with their scores
        return {piece[0]: id for id, piece in enumerate(vocabulary)}
    return dict(vocabulary)
