"""Stand-ins: a model that mostly agrees with the target, and a link to a drafter without a wire."""

from __future__ import annotations

import numpy as np

from mirror_sd.drafting.draft_engine import DraftEngine, Refusal
from mirror_sd.drafting.frames import DraftParams, Open
from mirror_sd.speculative.drafters.remote import Offer, Terms
from tests.unit.speculative.hash_target import HashTarget


class NearTarget(HashTarget):
    """The target's logits with some noise of its own, so that it is wrong now and then."""

    def __init__(self, noise: float = 0.05, **fields) -> None:
        super().__init__(**fields)
        self.noise = noise

    def row(self, history):
        row = super().row(history)
        own = np.random.default_rng(int(history.sum()) + len(history)).standard_normal(row.size)
        return (row + self.noise * own).astype(np.float32)


def drafter(blocks=256, sessions=8, noise=0.05, **target) -> DraftEngine:
    return DraftEngine(
        NearTarget(noise=noise, **target), kv_cache_mb=blocks, most_sessions=sessions
    )


def request(tokens=(1, 2, 3), session=1, length=4, **fields) -> Open:
    params = DraftParams(**fields.pop("params", {}))
    return Open(session=session, tokens=tuple(tokens), params=params, length=length, **fields)


class NearLink:
    """A drafter in the same process. Each `receive` lets it make `steps` forwards."""

    def __init__(self, engine: DraftEngine, steps: int = 3, **terms) -> None:
        self.engine, self.steps, self.terms = engine, steps, Terms(**terms)
        self.ready = 1
        self.outbox: list = []
        self.gone: list[int] = []

    def assign(self, session, length):
        return Offer(self.terms, self.engine.max_context) if self.ready else None

    def open(self, request):
        self.outbox.append(lambda: self.engine.open(request.session, request))
        self.outbox[-1].session = request.session

    def commit(self, commit):
        self.outbox.append(lambda: self.engine.commit(commit.session, commit))
        self.outbox[-1].session = commit.session

    def close(self, session):
        self.outbox.append(lambda: self.engine.close(session))
        self.outbox[-1].session = session

    def flush(self):
        for action in self.outbox:
            try:
                action()
            except Refusal:
                self.gone.append(action.session)
        self.outbox.clear()

    def receive(self, timeout_s):
        proposals = []
        for _ in range(self.steps):
            proposals += [proposal for _, proposal in self.engine.step()]
        self.engine.check_integrity()
        self.gone += [session for session, _ in self.engine.refused]
        self.engine.refused.clear()
        gone, self.gone = self.gone, []
        return proposals, gone

    def is_answering(self, session):
        return True

    def was_late(self, sessions):
        pass
