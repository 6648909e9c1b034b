"""The bytes that a token id stands for, by the rules of the tokenizer's decoder.

Two families of decoder work token by token: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where
every character of a token is one byte in disguise, and SentencePiece (Llama 2, Mistral), where
U+2581 is a space and `<0xNN>` is a byte. Both then are a table from id to bytes. Any other decoder
is left to `WindowedDetokeniser`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    # GPT-2's bytes_to_unicode: printable bytes stand for themselves, the others from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Ids to token bytes, worked out once per id and kept.

    `is_tabular` is False where the decoder is of neither family; `token_bytes` is then good enough
    for showing a token, not for joining tokens to text. `leading_spaces` is how many spaces the
    decoder strips from the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        stages = _decoder_stages(tokenizer)
        kinds = [stage["type"] for stage in stages]
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._bares_first_token = any(map(_is_prepending_metaspace, stages))
        self.is_tabular = _is_tabular(stages)
        self.leading_spaces = sum(
            stage["start"] for stage in stages if stage["type"] == "Strip" and self.is_tabular
        )
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; b"" for an id that no token has (padding of the vocabulary)."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def first_token_bytes(self, token: int) -> bytes:
        """The bytes of a token that begins a text: Metaspace drops all its spaces there."""
        spelled = self.token_bytes(token)
        return spelled.replace(b" ", b"") if self._bares_first_token else spelled

    def token_text(self, token: int) -> str:
        """The token as a readable string; `bytes:\\xe4\\xbd` where it is no whole UTF-8 text."""
        spelled = self.token_bytes(token)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _spell(self, token: int) -> bytes:
        text: str | None = self.tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes([_ALPHABET[character] for character in text])
            except KeyError:
                return text.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(text) if self._has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode("utf-8")


def _decoder_stages(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    # The only way to a component's JSON that does not serialise the whole vocabulary with it.
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    top = json.loads(decoder.__getstate__())
    return list(top["decoders"]) if top["type"] == "Sequence" else [top]


def _is_tabular(stages: list[dict[str, Any]]) -> bool:
    kinds = [stage["type"] for stage in stages]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return True
    # Strip works on each token unless Fuse has joined them before.
    if kinds[-2:] == ["Fuse", "Strip"]:
        if stages[-1]["content"] != " " or stages[-1]["stop"] != 0:
            return False
        kinds.pop()
    return kinds == ["Replace", "ByteFallback", "Fuse"] and (
        stages[0]["pattern"] == {"String": "\u2581"} and stages[0]["content"] == " "
    )


def _is_prepending_metaspace(stage: dict[str, Any]) -> bool:
    return stage["type"] == "Metaspace" and stage.get("prepend_scheme") != "never"
