"""What has been delivered of one request, and what to submit to get the rest.

A token at a position is the same whoever generates it, so frames of several attempts may overlap;
what was delivered already is cut off. A position may never be skipped.
"""

from __future__ import annotations

import msgspec

from mirror_sd.errors import MirrorError
from mirror_sd.messages import Chunk, Finished, Submit


class Gap(MirrorError):
    """Tokens are missing between what was delivered and a frame; the request is submitted anew."""


class Delivery:
    """`wire_id` is the request's id on the wire: another after a gap, so that frames of the
    attempt that lost tokens are told apart from those of the next."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._tokens = list(submit.delivered)
        self._attempt = 1
        self._wants_prompt_logprobs = submit.params.prompt_logprobs

    @property
    def request_id(self) -> str:
        return self._submit.request_id

    @property
    def wire_id(self) -> str:
        if self._attempt == 1:
            return self.request_id
        return f"{self.request_id}~{self._attempt}"

    @property
    def count(self) -> int:
        """Tokens delivered, those of `Submit.delivered` included."""
        return len(self._tokens)

    def renew(self) -> None:
        """Take another `wire_id`."""
        self._attempt += 1

    def remainder(self) -> Submit:
        """The submit that continues from what was delivered."""
        has_begun = self.count > len(self._submit.delivered) or (
            self._wants_prompt_logprobs != self._submit.params.prompt_logprobs
        )
        if self._attempt == 1 and not has_begun:
            return self._submit
        params = msgspec.structs.replace(
            self._submit.params, prompt_logprobs=self._wants_prompt_logprobs
        )
        return msgspec.structs.replace(
            self._submit, request_id=self.wire_id, delivered=tuple(self._tokens), params=params
        )

    def accept(self, chunk: Chunk) -> Chunk | None:
        """The new part of `chunk`, None if there is none; raises `Gap`."""
        skip = len(self._tokens) - chunk.index
        if skip == 0 and self._attempt == 1 and chunk.logprobs is chunk.prompt_logprobs is None:
            # Nearly every chunk: all of it is new, and nothing in it is to be changed.
            self._tokens.extend(chunk.tokens)
            return chunk if chunk.tokens else None
        if skip < 0:
            raise Gap(f"a chunk begins at token {chunk.index}, delivered are {self.count}")
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.tokens):
            raise Gap(f"{len(chunk.logprobs)} logprobs came for {len(chunk.tokens)} tokens")
        prompt_logprobs = chunk.prompt_logprobs if self._wants_prompt_logprobs else None
        tokens = chunk.tokens[skip:]
        if not tokens and prompt_logprobs is None:
            return None
        if prompt_logprobs is not None:
            self._wants_prompt_logprobs = False
        fresh = Chunk(
            request_id=self.request_id,
            index=self.count,
            tokens=tokens,
            logprobs=None if chunk.logprobs is None else chunk.logprobs[skip:],
            prompt_logprobs=prompt_logprobs,
        )
        self._tokens.extend(tokens)
        return fresh

    def complete(self, finished: Finished) -> Finished:
        """The last event under the caller's id; raises `Gap` if tokens before it are missing."""
        if finished.usage.completion_tokens != self.count:
            raise Gap(
                f"finished after {finished.usage.completion_tokens} tokens, "
                f"delivered are {self.count}"
            )
        return msgspec.structs.replace(finished, request_id=self.request_id)
