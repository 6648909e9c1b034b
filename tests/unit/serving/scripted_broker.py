"""Stands in for the broker and its workers in tests of the gateway: only their timing and the
tokens are made up; the interface is `broker_client.BrokerClient`'s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from mirror_sd.errors import MirrorError
from mirror_sd.messages import Chunk, Finished, SequenceUsage, Stats, Submit, TokenLogprob
from mirror_sd.serving.generation import Event


class ScriptedBroker:
    """Answers every submit with `tokens`, then `error` or a `Finished`.

    With `hang_after` it makes no more tokens after so many. `running` are the live requests,
    `cancelled` those that were left before their end.
    """

    def __init__(
        self,
        tokens: Sequence[int] = (),
        *,
        per_chunk: int = 1,
        reason: str = "stop",
        error: MirrorError | Exception | None = None,
        hang_after: int | None = None,
        stats: Stats | MirrorError | None = None,
    ) -> None:
        self.alive = True
        self.submits: list[Submit] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.begun = asyncio.Event()
        self.has_cancelled = asyncio.Event()
        self._tokens = tuple(tokens)
        self._per_chunk = per_chunk
        self._reason = reason
        self._error = error
        self._hang_after = hang_after
        self._stats = stats

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def stats(self) -> Stats:
        if isinstance(self._stats, Stats):
            return self._stats
        raise self._stats or AssertionError("no stats were given")

    def open(self, submit: Submit, on_event: Callable[[Event], None]) -> Callable[[], None]:
        self.submits.append(submit)
        self.running.add(submit.request_id)
        task = asyncio.create_task(self._answer(submit, on_event))

        def leave() -> None:
            if submit.request_id in self.running:
                self.running.discard(submit.request_id)
                self.cancelled.append(submit.request_id)
                self.has_cancelled.set()
            task.cancel()

        return leave

    async def _answer(self, submit: Submit, on_event: Callable[[Event], None]) -> None:
        try:
            async for frame in self._frames(submit):
                if isinstance(frame, Finished):
                    self.running.discard(submit.request_id)
                on_event(frame)
        except Exception as error:  # noqa: BLE001 - handed to the gateway
            on_event(error)

    async def _frames(self, submit: Submit) -> AsyncGenerator[Chunk | Finished, None]:
        tokens = self._tokens[: submit.params.max_tokens]
        for index in range(0, len(tokens), self._per_chunk):
            if self._hang_after is not None and index >= self._hang_after:
                break
            await asyncio.sleep(0)
            yield chunk_of(submit, index, tokens[index : index + self._per_chunk])
            self.begun.set()
        self.begun.set()
        if self._hang_after is not None:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        usage = SequenceUsage(
            prompt_tokens=len(submit.prompt),
            completion_tokens=len(tokens),
            cached_tokens=2,
            drafted_tokens=4,
            accepted_tokens=3,
            verify_rounds=2,
        )
        yield Finished(request_id=submit.request_id, reason=self._reason, usage=usage)


def chunk_of(submit: Submit, index: int, tokens: Sequence[int]) -> Chunk:
    wants = submit.params.logprobs is not None
    prompt = (None, *(TokenLogprob(token, -1.0) for token in submit.prompt[1:]))
    return Chunk(
        request_id=submit.request_id,
        index=index,
        tokens=tuple(tokens),
        logprobs=tuple(TokenLogprob(token, -0.5) for token in tokens) if wants else None,
        prompt_logprobs=prompt if submit.params.prompt_logprobs and index == 0 else None,
    )
