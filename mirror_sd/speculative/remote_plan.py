"""When a step waits for drafters on other devices, and what they are told of it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from mirror_sd.speculative.acceptance import AcceptanceModel
from mirror_sd.speculative.batch_plan import Slice
from mirror_sd.speculative.draft_report import Market
from mirror_sd.speculative.drafters.remote import NAME
from mirror_sd.speculative.remote_drafting import Await, RemoteDrafting

# What a token that is not drafted yet is taken for.
_USUAL_STRENGTH = 6


class RemotePlan:
    """One per engine; without `drafting` it does nothing. Chances come from `model`."""

    def __init__(self, drafting: RemoteDrafting | None, model: AcceptanceModel) -> None:
        self._drafting = drafting
        self._model = model

    def flush(self) -> None:
        if self._drafting is not None:
            self._drafting.flush()

    def gather(self, pieces: Ordered[Slice], market: Market, step_s: float) -> None:
        """Have the proposals for these, waiting for those that are worth it."""
        if self._drafting is None or not pieces:
            return
        wanted = []
        for piece in pieces:
            drafts = piece.sequence.drafts
            if drafts is not None and drafts.remote is not None:
                context = (NAME, _USUAL_STRENGTH, drafts.record(NAME).level)
                survival = self._model.survival(context)
                wanted.append(Await(drafts.remote, piece.draft_limit, survival))
        self._drafting.gather(wanted, market.rate, step_s)

    def learn(self, piece: Slice, tokens: Ordered[int], accepted: int) -> None:
        """The target chose `tokens` next; `accepted` of the draft were among them."""
        drafts = piece.sequence.drafts
        if drafts is None or drafts.remote is None:
            return
        if piece.source == NAME:
            drafts.remote.observe(len(piece.draft), accepted)
        drafts.tell_remote(tokens)
