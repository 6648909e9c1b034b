"""Prompts to token ids, from the files that the supervisor lays out for the gateways.

In a chat, special tokens come from the template alone. Text that a user typed stays text even if it
spells a special token: a sentinel character, one that occurs in no message, is put into each such
spelling before the template is rendered; the rendered text is cut at the special tokens that are
still whole; and the pieces between them, the sentinel taken out again, are encoded with special
tokens off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Encoder
from tokenizers.pre_tokenizers import Metaspace

from mirror_sd.api.chat_template import ChatTemplate
from mirror_sd.api.vocabulary import Vocabulary
from mirror_sd.errors import InvalidRequest, ModelError

# The library's own threads would compete with the workers for the cores these are pinned to.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Unicode's non-characters, meant for a program's own use, then the private use area, then all else.
_SENTINELS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0x10000, 0x110000))


class ModelFacts(msgspec.Struct, frozen=True):
    """`model.json`: what a gateway must know of the model beside its tokenizer."""

    name: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    add_bos: bool = False


class Tokenizer:
    """Thread-safe; encoding releases the interpreter lock."""

    def __init__(self, encoder: Encoder, template: str | None, facts: ModelFacts) -> None:
        encoder.encode_special_tokens = True
        encoder.no_truncation()
        encoder.no_padding()
        self.facts = facts
        self.vocabulary = Vocabulary(encoder)
        self._encoder = encoder
        self._continuation_encoder = _without_first_space(encoder)
        self._specials = _SpecialTokens(encoder)
        self._template = None if template is None else ChatTemplate(template, self._named_tokens())

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load tokenizer.json, model.json and, if there is one, chat_template.jinja.

        Raises `ModelError` naming the file that is missing or broken.
        """
        facts = _read_facts(directory / "model.json")
        path = directory / "tokenizer.json"
        try:
            encoder = Encoder.from_file(str(path))
        except Exception as error:
            raise ModelError(f"cannot load {path}: {error}") from error
        template = directory / "chat_template.jinja"
        try:
            source = template.read_text(encoding="utf-8") if template.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {template}: {error}") from error
        return cls(encoder, source, facts)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt ids of (role, content) pairs; the template alone adds special tokens.

        Raises `InvalidRequest` where the model has no template or its template refuses.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        sentinel = _absent_character([content for _, content in messages])
        safe = [(role, self._specials.defuse(text, sentinel)) for role, text in messages]
        rendered = self._template.render(safe)
        return self._encode(self._specials.split(rendered), sentinel)

    def encode_prompt(self, prompt: str) -> list[int]:
        """The ids of a raw prompt. Special tokens written in it are read as such, as other
        servers do; a begin token is put in front where the model wants one."""
        ids = self._encode(self._specials.split(prompt), None)
        bos = self.facts.bos_token_id
        if self.facts.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self._encoder.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, parts: list[int | str], sentinel: str | None) -> list[int]:
        if sentinel is not None:
            parts = [
                part.replace(sentinel, "") if isinstance(part, str) else part for part in parts
            ]
        texts = [part for part in parts if isinstance(part, str)]
        # Only the batch call releases the interpreter lock (tokenizers 0.23, measured).
        head = texts[:1] if parts and isinstance(parts[0], str) else []
        first = self._encoder.encode_batch_fast(head, add_special_tokens=False)
        rest = self._continuation_encoder.encode_batch_fast(
            texts[len(head) :], add_special_tokens=False
        )
        encoded = chain(first, rest)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids.extend(next(encoded).ids)
            else:
                ids.append(part)
        return ids

    def _named_tokens(self) -> dict[str, str]:
        eos = self.facts.eos_token_ids[0] if self.facts.eos_token_ids else None
        ids = {"bos_token": self.facts.bos_token_id, "eos_token": eos}
        return {
            name: self._encoder.id_to_token(token) or ""
            for name, token in ids.items()
            if token is not None
        }


class _SpecialTokens:
    """The spellings of special tokens: making typed ones harmless, finding real ones."""

    def __init__(self, encoder: Encoder) -> None:
        added = encoder.get_added_tokens_decoder().items()
        specials = {token.content: (id, token) for id, token in added if token.special}
        self._ids = {content: id for content, (id, _) in specials.items()}
        longest_first = sorted(specials, key=len, reverse=True)
        self._starts = {
            content[:length] for content in specials for length in range(1, len(content))
        }
        # A zero-width look-ahead finds overlapping spellings too.
        self._typed = re.compile(
            "(?=(?:" + "|".join(map(re.escape, longest_first)) + "))(.)", re.DOTALL
        )
        patterns = []
        for content in longest_first:
            token = specials[content][1]
            left, right = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
            patterns.append(f"{left}({re.escape(content)}){right}")
        self._real = re.compile("|".join(patterns))

    def defuse(self, text: str, sentinel: str) -> str:
        """`text` with `sentinel` inside every special token it spells, and after a beginning of one
        at its end, which the template could otherwise complete."""
        if not self._ids:
            return text
        text = self._typed.sub(rf"\1{sentinel}", text)
        longest = max(map(len, self._ids))
        tails = (text[-length:] for length in range(1, min(longest, len(text) + 1)))
        if any(tail in self._starts for tail in tails):
            text += sentinel
        return text

    def split(self, text: str) -> list[int | str]:
        """Special-token ids and the texts between them, in order, empty texts left out."""
        if not self._ids:
            return [text] if text else []
        parts: list[int | str] = []
        end = 0
        for match in self._real.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            parts.append(self._ids[match[match.lastindex or 0]])
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts


def _absent_character(texts: Sequence[str]) -> str:
    return next(
        character
        for character in map(chr, chain(*_SENTINELS))
        if not any(character in text for text in texts)
    )


def _without_first_space(encoder: Encoder) -> Encoder:
    """The encoder for text that follows a special token.

    A Metaspace tokenizer with the scheme "first" puts a space in front of the first piece only, and
    would take each piece, encoded by itself, for the first.
    """
    space = encoder.pre_tokenizer
    if not isinstance(space, Metaspace) or space.prepend_scheme != "first":
        return encoder
    continuation = Encoder.from_str(encoder.to_str())
    continuation.encode_special_tokens = True
    continuation.pre_tokenizer = Metaspace(
        replacement=space.replacement, prepend_scheme="never", split=space.split
    )
    return continuation


def _read_facts(path: Path) -> ModelFacts:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelFacts)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not what a gateway expects: {error}") from error
