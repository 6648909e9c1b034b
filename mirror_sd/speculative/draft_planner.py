"""Drafts of a step: asks the sources, weighs their proposals, calls the head, hands out rows.

What it learns from: the time of each step, and the target's tokens, with which all proposals are
compared, those too that were not verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.memory.block_pool import BlockPool
from mirror_sd.memory.prefix_cache import PrefixCache
from mirror_sd.speculative.acceptance import AcceptanceModel
from mirror_sd.speculative.asking import Asking
from mirror_sd.speculative.batch_plan import Slice
from mirror_sd.speculative.chooser import Offer, Prices, Purse, Rates, allot, best, cautious
from mirror_sd.speculative.cost_model import MOST_ROWS, VerifyCost
from mirror_sd.speculative.draft_report import DraftReport, Market
from mirror_sd.speculative.drafters import STRENGTHS
from mirror_sd.speculative.head_plan import HeadPlan
from mirror_sd.speculative.head_source import HeadDrafting, HeadRequest
from mirror_sd.speculative.length_bandit import LengthBandit
from mirror_sd.speculative.remote_drafting import RemoteDrafting
from mirror_sd.speculative.remote_plan import RemotePlan
from mirror_sd.speculative.sequence import Sequence
from mirror_sd.speculative.trial import Trial

logger = logging.getLogger(__name__)
# Share of all time for drafts that do not seem to pay, and the most that is saved up of it.
_TRYING_SHARE, _TRYING_MOST_S = 0.004, 0.2
_READ_AGAIN = 256  # tokens of a cached prefix that are computed again for a head to read
_TAKE_IN_FROM = 32  # tokens that a head takes in where it does not draft
_USUAL = 17  # most tokens that a head takes in after drafting


class DraftPlanner:
    """One per engine. `head` is None without a draft head."""

    def __init__(
        self,
        config: SpeculationConfig,
        pool: BlockPool,
        *,
        block_size: int,
        clock: Callable[[], float],
        head: HeadDrafting | None = None,
        remote: RemoteDrafting | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._block_size = block_size
        self._clock = clock
        self._model = AcceptanceModel()
        self.cost = VerifyCost()
        self._rates = Rates()
        self._prices = Prices()
        self._purse = Purse(_TRYING_SHARE, _TRYING_MOST_S)
        self._asking = Asking()
        self._bandit = LengthBandit(config.max_tokens) if config.length == "bandit" else None
        self._heads = HeadPlan(self._model)
        self.head = head
        self._remote = RemotePlan(remote, self._model)
        self._market = Market(0, 0, 0.0, 0.0)
        self._asked, self._ask_s = 0, 0.0
        self.report = DraftReport()

    def time_head(self) -> None:
        """Before the first request."""
        seconds = self.head.pass_seconds(self._clock) if self.head is not None else None
        if seconds is not None:
            self._heads.measure_pass(seconds)

    def wants_head(self, sequences: int) -> bool:
        """Whether a sequence that starts beside others, `sequences` with it, shall have a head."""
        if self.head is None or not self.head.is_on:
            return False
        if self._config.min_tokens > 0:
            return True
        rate = self._rates.rate(sequences, self.cost.seconds(sequences))
        return self._heads.pays(sequences, self._config.max_tokens, self.cost, rate)

    def shall_open_head(self, sequence: Sequence, sequences: int, cache: PrefixCache) -> bool:
        """Whether a sequence that is about to start, beside others, `sequences` with it, gets a
        head. Its prefix, just taken from `cache`, is given up from where no head has read it."""
        drafts = sequence.drafts
        if self.head is None or drafts is None or not drafts.uses_head:
            return False
        if not self.wants_head(sequences):
            return False
        covered = self.head.covered(sequence.table)
        missing = sequence.table[covered:]
        if len(missing) * self._block_size > _READ_AGAIN:
            return False
        cache.give_up(missing)
        del sequence.table[covered:]
        return True

    def plan(self, pieces: Ordered[Slice]) -> None:
        """Give the slices that decode their drafts."""
        self.report = DraftReport()
        self._asked = 0
        self._remote.flush()
        begin = self._clock()
        ready = [piece for piece in pieces if piece.is_decoding]
        self._market = self._open_market(len(ready), sum(piece.count for piece in pieces))
        able = [piece for piece in ready if piece.draft_limit > 0]
        if able or any(piece.sequence.head is not None for piece in pieces):
            offers = self._ask(able)
            self._call_head(pieces, able, offers)
            self._allot(offers)
            self.report.seconds = self._clock() - begin

    def _open_market(self, sequences: int, base: int) -> Market:
        if not sequences:
            return Market(0, base, 0.0, 0.0)
        rate = self._rates.rate(sequences, self.cost.seconds(sequences))
        table = self.cost.table()
        high = min(base + sequences, MOST_ROWS)
        low = max(high - sequences, 0)
        price = rate * (table[high] - table[low]) / (high - low)
        return Market(sequences, base, rate, self._prices.price(sequences, price))

    def _ask(self, able: Ordered[Slice]) -> list[tuple[Slice, Offer]]:
        """The best proposal for each sequence that has one."""
        market, found = self._market, []
        part = 1
        if self._config.min_tokens == 0 and able:
            step_s = self.cost.seconds(market.base)
            part = self._asking.who(market.sequences, market.rate, step_s)
        asked = [p for p in able if part and p.sequence.arrival % part == 0]
        self._remote.gather(asked, market, self.cost.seconds(market.base))
        begin = self._clock()
        for piece in asked:
            try:
                offers = self._offers(piece)
            except Exception:
                # A source is never worth a request, nor the worker.
                logger.exception("request %s goes on without drafts", piece.sequence.request_id)
                assert piece.sequence.drafts is not None
                piece.sequence.drafts.switch_off()
                continue
            # Where all is lost at this price, the likeliest is kept for a try.
            chosen = best(offers, market.price) or max(
                offers, key=lambda offer: offer.survival[0], default=None
            )
            if chosen is not None:
                found.append((piece, chosen))
        self._asked, self._ask_s = len(asked), self._clock() - begin
        return found

    def _offers(self, piece: Slice) -> list[Offer]:
        drafts, limit = piece.sequence.drafts, piece.draft_limit
        assert drafts is not None
        offers = []
        watched = {trial.source for trial in drafts.trials}
        for source in drafts.sources():
            tokens = source.propose(limit)
            if not tokens:
                continue
            strengths, level = source.strengths(), drafts.record(source.name).level
            contexts = [(source.name, strength, level) for strength in strengths]
            key = LengthBandit.key(self._market.sequences, source.name, strengths[0])
            trial = Trial(source.name, tokens, contexts, key, self._market.price)
            if source.name not in watched:
                drafts.watch(trial)
            offer = self._offer(trial, self._model.along(contexts))
            if offer.survival:
                offers.append(offer)
        return offers

    def _offer(self, trial: Trial, survival: Ordered[float]) -> Offer:
        length = trial.proposed
        if self._bandit is not None and self._config.min_tokens == 0:
            length = min(length, self._bandit.longest(trial.key))
        return Offer(trial, survival[:length])

    def _call_head(
        self,
        pieces: Ordered[Slice],
        able: Ordered[Slice],
        offers: list[tuple[Slice, Offer]],
    ) -> None:
        """Let the head draft where it promises more than the other sources, and take in what has
        come together elsewhere."""
        if self.head is None or not self.head.is_on:
            return
        drafting = self._head_requests(able, {id(piece): offer for piece, offer in offers})
        requests = [request for _, request in drafting]
        chosen = {id(request.sequence) for request in requests}
        for piece in pieces:
            state = piece.sequence.head
            if state is None or id(piece.sequence) in chosen or state.pending < _TAKE_IN_FROM:
                continue
            if piece.is_decoding and not self.wants_head(self._market.sequences):
                piece.sequence.head = None
            else:
                requests.append(HeadRequest(piece.sequence, 0, 1.0))
        if not requests:
            return
        # What is taken in beside drafting, as a prompt is, says nothing about a pass.
        is_usual = max(r.sequence.head.pending for r in requests if r.sequence.head) <= _USUAL
        begin = self._clock()
        passes = self.head.draft(requests)
        if passes and drafting and is_usual:
            self._heads.observe_call(len(drafting), passes, self._clock() - begin)
        for piece, request in drafting:
            if request.tokens:
                self._take_head_draft(piece, request, offers)
            elif passes and (drafts := piece.sequence.drafts) is not None:
                # A head that is not sure of any token has cost its pass all the same.
                self._heads.observe_draft(drafts.record("head").level, 0, 0, was_full=False)

    def _head_requests(
        self, able: Ordered[Slice], offers: dict[int, Offer]
    ) -> list[tuple[Slice, HeadRequest]]:
        market = self._market
        candidates = [piece for piece in able if piece.has_head]
        if not candidates:
            return []
        is_fixed = self._config.min_tokens > 0
        asked = candidates if is_fixed else self._worth_a_pass(candidates, offers)
        count = max(len(asked), 1)
        floor = 0.0 if is_fixed else self._heads.floor(count, market.rate, market.price)
        drafting = []
        for piece in asked:
            steps = piece.draft_limit
            if not is_fixed:
                # Some more than pays on the average: the floor stops where it does not.
                _, pays = self._prospect(piece, count)
                steps = min(steps, pays + (2 if count == 1 else 1))
            steps = self._cover(piece.sequence, steps)
            if steps > 0:
                drafting.append((piece, HeadRequest(piece.sequence, steps, floor)))
        return drafting

    def _prospect(self, piece: Slice, count: int) -> tuple[float, int]:
        assert piece.sequence.drafts is not None
        market, level = self._market, piece.sequence.drafts.record("head").level
        return self._heads.prospect(level, piece.draft_limit, count, market.rate, market.price)

    def _worth_a_pass(self, candidates: Ordered[Slice], offers: dict[int, Offer]) -> Ordered[Slice]:
        """The sequences for which the head promises more than the other sources. They share its
        passes, so the fewer they are the more each has to bring."""
        price, rate = self._market.price, self._market.rate
        rivals = {
            id(piece): offers[id(piece)].worth(price) if id(piece) in offers else 0.0
            for piece in candidates
        }
        asked = candidates
        while asked:
            kept = [p for p in asked if self._prospect(p, len(asked))[0] > rivals[id(p)]]
            if len(kept) == len(asked):
                return asked
            asked = kept
        piece = candidates[0]
        loss = rivals[id(piece)] - self._prospect(piece, 1)[0]
        # Taking in, a draft of some tokens, and rows that may be lost.
        cost_s = max(loss / rate if rate > 0 else 0.0, 0.0) + 3 * self._heads.share_s(1)
        return [piece] if self._purse.spend(cost_s) else []

    def _take_head_draft(
        self, piece: Slice, request: HeadRequest, offers: list[tuple[Slice, Offer]]
    ) -> None:
        drafts = piece.sequence.drafts
        assert drafts is not None
        level = drafts.record("head").level
        product, survival, contexts = 1.0, [], []
        for depth, probability in enumerate(request.probabilities):
            strength = min(max(int(probability * STRENGTHS), 0), STRENGTHS - 1)
            contexts.append(("head", strength, level))
            product *= self._model.chance(contexts[-1], depth, probability)
            survival.append(product)
        key = LengthBandit.key(self._market.sequences, "head", 0)
        trial = Trial("head", request.tokens, contexts, key, self._market.price)
        trial.asked = request.steps
        drafts.watch(trial)
        offer = self._offer(trial, survival)
        index = next((i for i, (other, _) in enumerate(offers) if other is piece), None)
        if index is None:
            offers.append((piece, offer))
        elif offer.worth(self._market.price) > offers[index][1].worth(self._market.price):
            offers[index] = (piece, offer)

    def _allot(self, offers: Ordered[tuple[Slice, Offer]]) -> None:
        if not offers:
            return
        market, least = self._market, self._config.min_tokens
        chances = [offer.survival for _, offer in offers]
        rate = cautious(market.rate, len(offers))
        allotment = allot(chances, market.base, self.cost.table(), rate)
        if market.base == market.sequences > 1:
            self._prices.observe(market.sequences, allotment.price)
        lengths = allotment.lengths
        if least > 0:
            lengths = [
                max(min(least, offer.trial.proposed), length)
                for (_, offer), length in zip(offers, lengths, strict=True)
            ]
        elif allotment.gain <= 0 and not (
            market.rate > 0 and self._purse.spend(-allotment.gain / market.rate)
        ):
            return
        for (piece, offer), length in zip(offers, lengths, strict=True):
            count = self._cover(piece.sequence, length) if length > 0 else 0
            if count:
                trial, drafts = offer.trial, piece.sequence.drafts
                assert drafts is not None
                piece.draft, piece.source = list(trial.tokens[:count]), trial.source
                if trial not in drafts.trials:
                    drafts.watch(trial)

    def _cover(self, sequence: Sequence, count: int) -> int:
        """Of `count` tokens to draft those that the block table has place for. A draft takes free
        blocks but displaces nobody."""
        size = self._block_size
        wanted = -(-(len(sequence.tokens) + count) // size)
        while len(sequence.table) < wanted and self._pool.free > 0:
            block = self._pool.allocate()
            if self.head is not None:
                self.head.forget(block)
            sequence.table.append(block)
        return max(min(count, len(sequence.table) * size - len(sequence.tokens)), 0)

    def learn(self, piece: Slice, tokens: Ordered[int], accepted: int) -> None:
        """The target chose `tokens` next; `accepted` of the draft were among them."""
        drafts = piece.sequence.drafts
        if drafts is None:
            return
        self._remote.learn(piece, tokens, accepted)
        going_on = []
        for trial in drafts.trials:
            trial.observe(tokens, self._model, drafts.record(trial.source))
            if trial.is_over:
                self._close_trial(trial)
            else:
                going_on.append(trial)
        drafts.trials = going_on
        if piece.draft:
            counts = self.report.by_source.setdefault(piece.source, [0, 0])
            counts[0] += len(piece.draft)
            counts[1] += accepted
            self.report.accepted_lengths.append(accepted)
            self.report.repetitions += drafts.account(piece.source, piece.draft, accepted)

    def _close_trial(self, trial: Trial) -> None:
        if self._bandit is not None:
            self._bandit.observe(trial.key, trial.proposed, trial.matched, trial.price)
        if trial.source == "head":
            level, was_full = trial.contexts[0][2], trial.proposed == trial.asked
            self._heads.observe_draft(level, trial.proposed, trial.matched, was_full)

    def _learn_asking(self, rows: int) -> None:
        """From what was accepted, not what was hoped for: the best of many guesses is too high."""
        market = self._market
        sources = self.report.by_source.items()
        accepted = sum(counts[1] for source, counts in sources if source != "head")
        drafted = sum(counts[0] for source, counts in sources if source != "head")
        table = self.cost.table()
        before = min(rows, MOST_ROWS) - drafted
        time_s = table[min(rows, MOST_ROWS)] - table[max(before, 0)]
        gain = accepted - market.rate * time_s
        self._asking.observe(market.sequences, self._asked, gain, self._ask_s)

    def finish(self, tokens: int, rows: int, seconds: float) -> None:
        """The forward and what followed it took so long, and brought so many tokens."""
        self._remote.flush()
        market = self._market
        if self._asked:
            self._learn_asking(rows)
        self.cost.observe(rows, seconds)
        whole = seconds + self.report.seconds
        self._purse.save(whole)
        if market.sequences and market.base == market.sequences:
            self._rates.observe(market.sequences, tokens, whole)
