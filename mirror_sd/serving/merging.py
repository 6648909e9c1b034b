"""The broker's merger at work: who gets a generation's tokens besides the request that began it.

Tokens are decoded only of generations that several requests share or that are the source of
another's drafts; all others are passed on unread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from mirror_sd import telemetry
from mirror_sd.config import Config
from mirror_sd.errors import ProtocolError
from mirror_sd.messages import Chunk, DraftHint, Failed, Finished, Submit, decode_chunk
from mirror_sd.scheduler.minhash_merger import Answer, Match, MinHashMerger, rules_of
from mirror_sd.serving.outbox import Outbox
from mirror_sd.serving.peers import Generation, Member

_log = logging.getLogger(__name__)

# Tokens in the first hint: what drafts can reach before the source's next ones come.
_HINT_TOKENS = 4096
# Generations that get one's tokens as they come; each costs a frame a step.
_LISTENERS = 16


class Merging:
    def __init__(self, config: Config, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._is_enabled = config.merge.enabled
        self._outbox = outbox
        self._merger = MinHashMerger(rules_of(config), clock)
        # Who drafts from a live answer: the generation and its worker.
        self._listeners: dict[Answer, dict[str, bytes]] = {}

    @property
    def draft_sources(self) -> int:
        """Finished answers kept."""
        return self._merger.finished

    def match(self, submit: Submit) -> Match:
        return self._merger.match(submit) if self._is_enabled else Match()

    def begin(self, generation: Generation, submit: Submit, source: Answer | None) -> None:
        """A generation starts to wait; `source` is what `match` found for it."""
        if self._is_enabled:
            generation.answer = self._merger.begin(generation.name, submit)
            generation.source = source
            if source is not None:
                _count("hinted", generation)

    def join(self, generation: Generation, submit: Submit, member: Member, kind: str) -> None:
        """Another request is answered by the generation: it gets the tokens so far."""
        assert generation.answer is not None
        request_id = submit.request_id
        generation.followers[request_id] = member
        for chunk in generation.answer.log.replay(request_id, len(submit.delivered)):
            self._outbox.send("gateway", member.gateway, chunk)
        _count("coalesced" if kind == "exact" else "shared", generation)
        _log.info("%s: merged with %s (%s)", request_id, generation.name, kind)

    def dispatched(self, generation: Generation, worker_id: str) -> None:
        """A worker has the generation: tell it what there is to draft from."""
        if generation.answer is not None:
            generation.answer.worker_id = worker_id
        source = generation.source
        if source is None:
            return
        identity = worker_id.encode()
        tokens = tuple(source.log.read()[:_HINT_TOKENS])
        if tokens:
            self._hint(identity, generation.name, 0, tokens)
        if source.is_live:
            listeners = self._listeners.setdefault(source, {})
            if len(listeners) < _LISTENERS:
                listeners[generation.name] = identity

    def fan_out(
        self, generation: Generation, answer: Answer, item: msgspec.Raw
    ) -> Sequence[tuple[bytes, Chunk]]:
        """Take note of a chunk of the answer; what goes to gateways besides the leader's."""
        listeners = self._listeners.get(answer)
        if not generation.followers and not listeners:
            answer.log.append(bytes(memoryview(item)))
            return ()
        try:
            chunk = decode_chunk(item)
        except ProtocolError as error:
            # The followers' gateways will find the gap, and have it made anew.
            _log.error("%s: %s", generation.name, error)
            answer.log.is_broken = True
            return ()
        answer.log.add(chunk)
        for name, identity in (listeners or {}).items():
            self._hint(identity, name, chunk.index, chunk.tokens)
        return [
            (member.gateway, msgspec.structs.replace(chunk, request_id=name))
            for name, member in generation.followers.items()
        ]

    def end(self, generation: Generation, *, is_complete: bool) -> None:
        """The generation is over."""
        answer, source = generation.answer, generation.source
        if source is not None and (listeners := self._listeners.get(source)) is not None:
            listeners.pop(generation.name, None)
            if not listeners:
                del self._listeners[source]
        if answer is None:
            return
        self._listeners.pop(answer, None)
        if is_complete:
            self._merger.finish(answer)
        else:
            self._merger.drop(answer)

    def tick(self) -> None:
        self._merger.purge()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if an answer that is over is listened to."""
        self._merger.check_integrity()
        if any(not answer.is_live or not who for answer, who in self._listeners.items()):
            raise AssertionError("listening to what is over")

    def _hint(self, worker: bytes, name: str, index: int, tokens: tuple[int, ...]) -> None:
        hint = DraftHint(request_id=name, index=index, tokens=tokens)
        self._outbox.send("worker", worker, hint)


def last_for(name: str, member: Member, last: Finished | Failed) -> Finished | Failed:
    """The last frame of a generation, for one of its followers."""
    if isinstance(last, Failed):
        return msgspec.structs.replace(last, request_id=name)
    # Its own prompt may be another, of an answer that is shared.
    usage = msgspec.structs.replace(
        last.usage,
        prompt_tokens=member.prompt_tokens,
        cached_tokens=min(last.usage.cached_tokens, member.prompt_tokens),
    )
    return msgspec.structs.replace(last, request_id=name, usage=usage)


def _count(kind: str, generation: Generation) -> None:
    telemetry.MERGED.labels(kind, generation.ticket.device_class).inc()
