"""The tokens of one generation, as they come: read only when somebody else wants them.

Most answers are never asked for by a second request, so their chunks are kept as they came, a copy
each, and decoded at the first question.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from mirror_sd.errors import ProtocolError
from mirror_sd.messages import Chunk, decode_chunks


class TokenLog:
    """`delivered` are the tokens before the first chunk. `with_chunks`: keep the chunks too, for
    what they hold besides tokens. A log that cannot be read, or has a gap, is broken for good."""

    def __init__(self, delivered: Sequence[int], *, with_chunks: bool) -> None:
        self.is_broken = False
        self._unread: list[bytes] = []
        self._base = len(delivered)
        self._tokens = array("q")
        self._with_chunks = with_chunks
        self._chunks: list[Chunk] = []
        self._extend(0, delivered)

    def append(self, chunk: bytes) -> None:
        """An encoded chunk, whose memory is its own."""
        if not self.is_broken:
            self._unread.append(chunk)

    def read(self) -> array[int]:
        """All tokens so far; not to be changed."""
        if self._unread:
            unread, self._unread = self._unread, []
            try:
                for chunk in decode_chunks(unread):
                    self._keep(chunk)
            except ProtocolError:
                self.is_broken = True
        return self._tokens

    def add(self, chunk: Chunk) -> None:
        """As `append`, of one that is decoded already."""
        self.read()
        self._keep(chunk)

    def can_continue(self, delivered: Sequence[int], *, with_prompt: bool) -> bool:
        """Whether a request that has `delivered` gets the rest of its answer from here."""
        tokens = self.read()
        count = len(delivered)
        if self.is_broken or tokens[:count].tolist() != list(delivered):
            return False
        return not self._with_chunks or (count >= self._base and not (with_prompt and self._base))

    def replay(self, request_id: str, start: int) -> list[Chunk]:
        """Chunks of all tokens from index `start` on, for another request."""
        tokens = self.read()
        if self._with_chunks:
            return [
                msgspec.structs.replace(chunk, request_id=request_id)
                for chunk in self._chunks
                if chunk.index + len(chunk.tokens) > start or chunk.prompt_logprobs is not None
            ]
        if len(tokens) <= start:
            return []
        return [Chunk(request_id=request_id, index=start, tokens=tuple(tokens[start:]))]

    def forget_chunks(self) -> None:
        """Keep the tokens only."""
        self._chunks.clear()

    def _keep(self, chunk: Chunk) -> None:
        self._extend(chunk.index, chunk.tokens)
        if self._with_chunks:
            self._chunks.append(chunk)

    def _extend(self, index: int, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if index != known:
            if not 0 <= index < known:
                self.is_broken = True
                return
            tokens = tokens[known - index :]
        try:
            self._tokens.extend(tokens)
        except OverflowError:
            self.is_broken = True
