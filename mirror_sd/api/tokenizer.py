"""Prompts to token ids, from the files that the supervisor lays out for the gateways.

In a chat, special tokens come from the template alone: `SpecialTokens` makes typed ones harmless
before the template is rendered, and cuts the rendered text at those that the template wrote. The
pieces between them are encoded with special tokens off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Encoder
from tokenizers.pre_tokenizers import Metaspace

from mirror_sd.api.chat_template import ChatTemplate
from mirror_sd.api.special_tokens import SpecialTokens, absent_character
from mirror_sd.api.vocabulary import Vocabulary
from mirror_sd.errors import InvalidRequest, ModelError

# The library's own threads would compete with the workers for the cores these are pinned to.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A token of natural text or code has 4 characters or fewer; a cut changes the last few tokens only.
_PROBE_CHARACTERS = 8
_PROBE_MARGIN = 64
# A piece is what stands between two special tokens, such as a message; some 10 MB at most.
_REMEMBERED_PIECES = 2048
_REMEMBERED_CHARACTERS = 1024


class ModelFacts(msgspec.Struct, frozen=True):
    """`model.json`: what a gateway must know of the model beside its tokenizer. `eos_token` is what
    the chat template means by that name; where it is not given, the first of `eos_token_ids`."""

    name: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token: str | None = None


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
        self._known_piece = lru_cache(_REMEMBERED_PIECES)(self._encode_piece)
        self._specials = SpecialTokens(encoder)
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

    def encode_chat(
        self, messages: Sequence[tuple[str, str]], limit: int | None = None, owner: str = ""
    ) -> list[int]:
        """The prompt ids of (role, content) pairs; the template alone adds special tokens.

        A text that has more than `limit` tokens may be encoded up to somewhere beyond them only.
        What `owner` has sent before, such as a system prompt, is remembered for `owner` alone, so
        that no other can learn from the time it takes.
        Raises `InvalidRequest` where the model has no template or its template refuses.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        sentinel = absent_character([content for _, content in messages])
        safe = [(role, self._specials.defuse(text, sentinel)) for role, text in messages]
        rendered = self._template.render(safe)
        return self._encode(self._specials.split(rendered), sentinel, limit, owner)

    def encode_prompt(self, prompt: str, limit: int | None = None, owner: str = "") -> list[int]:
        """The ids of a raw prompt. Special tokens written in it are read as such, as other
        servers do; a begin token is put in front where the model wants one. `limit` and `owner`
        as above."""
        ids = self._encode(self._specials.split(prompt), None, limit, owner)
        bos = self.facts.bos_token_id
        if self.facts.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self._encoder.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(
        self, parts: list[int | str], sentinel: str | None, limit: int | None, owner: str
    ) -> list[int]:
        if sentinel is not None:
            parts = [
                part.replace(sentinel, "") if isinstance(part, str) else part for part in parts
            ]
        if limit is not None:
            beginning = _cut(parts, _PROBE_CHARACTERS * limit)
            if len(beginning) < len(parts) or beginning[-1:] != parts[-1:]:
                # A megabyte takes a second or two: find out first whether there is any use in it.
                ids = self._encode_whole(beginning, owner)
                if len(ids) > limit + _PROBE_MARGIN:
                    return ids
        return self._encode_whole(parts, owner)

    def _encode_whole(self, parts: list[int | str], owner: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if not isinstance(part, str):
                ids.append(part)
            elif len(part) <= _REMEMBERED_CHARACTERS:
                ids.extend(self._known_piece(owner, index == 0, part))
            else:
                ids.extend(self._encode_piece(owner, index == 0, part))
        return ids

    def _encode_piece(self, _owner: str, is_first: bool, text: str) -> tuple[int, ...]:
        encoder = self._encoder if is_first else self._continuation_encoder
        # Only the batch call releases the interpreter lock (tokenizers 0.23, measured).
        [encoded] = encoder.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoded.ids)

    def _named_tokens(self) -> dict[str, str]:
        named = {}
        if self.facts.bos_token_id is not None:
            named["bos_token"] = self._encoder.id_to_token(self.facts.bos_token_id)
        if self.facts.eos_token is not None:
            named["eos_token"] = self.facts.eos_token
        elif self.facts.eos_token_ids:
            named["eos_token"] = self._encoder.id_to_token(self.facts.eos_token_ids[0])
        return {name: token or "" for name, token in named.items()}


def _cut(parts: list[int | str], characters: int) -> list[int | str]:
    """The beginning of `parts`, about so many characters."""
    beginning: list[int | str] = []
    for part in parts:
        if isinstance(part, str):
            beginning.append(part[:characters])
            characters -= len(part)
        else:
            beginning.append(part)
            characters -= 1
        if characters <= 0:
            break
    return beginning


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
