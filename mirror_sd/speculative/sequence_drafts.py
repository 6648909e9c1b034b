"""The sources that one sequence can be drafted from, and how they fare in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirror_sd.drafting.frames import LONGEST
from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.acceptance import Record
from mirror_sd.speculative.drafters import Drafter, DraftSource
from mirror_sd.speculative.drafters.hint import HintSource
from mirror_sd.speculative.drafters.remote import RemoteSource
from mirror_sd.speculative.length_controller import WindowController
from mirror_sd.speculative.remote_drafting import RemoteDrafting
from mirror_sd.speculative.repetition import RepetitionWatch
from mirror_sd.speculative.trial import Trial

_MOST_TRIALS = 12


class SequenceDrafts:
    """Opens the sources when they are first asked and tells them what was committed since they were
    asked last, so that a sequence that is never drafted for costs nothing.

    `tokens`: the sequence's own list, which grows; `prompt_length` of them are its prompt.
    `only`: the one drafter to ask, or auto; all are told how it ended. `longest`: most tokens of a
    draft. `window`: the rule of the draft length, None where it is
    learned over all sequences. `uses_head`: the draft head may be asked as well. `longest_remote`:
    most tokens of a draft that another device makes, 0 for none.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        tokens: list[int],
        *,
        tenant: str,
        prompt_length: int,
        longest: int,
        only: str = "auto",
        window: WindowController | None = None,
        uses_head: bool = True,
        takes_hints: bool = True,
        longest_remote: int = LONGEST,
        is_sampled: bool = False,
    ) -> None:
        self._drafters = drafters
        self._tokens = tokens
        self._tenant = tenant
        self._prompt_length = prompt_length
        self._only = only
        self._longest = longest
        self._window = window
        self._takes_hints = takes_hints
        self._is_sampled = is_sampled
        self._opened: dict[str, DraftSource] = {}
        self._hint: HintSource | None = None
        # Tokens that the opened sources and the hint have been told of.
        self._seen = self._hint_seen = 0
        self._records: dict[str, Record] = {}
        self._repetition = RepetitionWatch()
        self.uses_head = uses_head
        self._longest_remote = longest_remote
        self._drafting: RemoteDrafting | None = None
        self.remote: RemoteSource | None = None
        self.trials: list[Trial] = []
        self.counts: dict[str, tuple[int, int]] = {}

    @property
    def limit(self) -> int:
        """Most tokens to draft now."""
        limit = self._longest if self._window is None else min(self._window.length, self._longest)
        return -(-limit // 2) if self._repetition.is_repeating else limit

    def record(self, source: str) -> Record:
        found = self._records.get(source)
        if found is None:
            found = self._records[source] = Record(is_sampled=self._is_sampled)
        return found

    def sources(self) -> list[DraftSource]:
        """All sources but the head, up to date, the hint first."""
        if not self._opened:
            self._open()
        length = len(self._tokens)
        if self._seen < length:
            fresh = self._tokens[self._seen :]
            for source in self._opened.values():
                source.commit(fresh)
            self._seen = length
        found: list[DraftSource] = list(self._opened.values())
        if self.remote is not None and self.remote.is_open:
            found.append(self.remote)
        if self._hint is None:
            return found
        self._tell_hint(self._hint)
        return [self._hint, *found]

    def draft_remotely(self, drafting: RemoteDrafting, params: SamplingParams) -> None:
        """Have another device draft as well, which begins by reading the prompt."""
        if self._longest_remote > 0 and self.remote is None:
            self._drafting = drafting
            self.remote = drafting.open(
                self._tokens, params, self._tenant, most_tokens=self._longest_remote
            )

    def tell_remote(self, tokens: Sequence[int]) -> None:
        """The target's next tokens, which are not in the sequence's list yet."""
        if self._drafting is not None and self.remote is not None:
            self._drafting.commit(self.remote, tokens)

    def _open(self) -> None:
        for name, drafter in self._drafters.items():
            if self._only in ("auto", name):
                self._opened[name] = drafter.open(
                    self._tokens, tenant=self._tenant, prompt_length=self._prompt_length
                )
        self._seen = len(self._tokens)

    def _tell_hint(self, hint: HintSource) -> None:
        if self._hint_seen < len(self._tokens):
            hint.commit(self._tokens[self._hint_seen :])
            self._hint_seen = len(self._tokens)

    def hint(self, index: int, tokens: Sequence[int], limit: int) -> None:
        """Draft from another answer as well, see `HintSource.extend`."""
        if not self._takes_hints:
            return
        if self._hint is None:
            self._hint = HintSource(self._tokens[self._prompt_length :], limit)
            self._hint_seen = len(self._tokens)
            if self._window is not None:
                self._window.trust()
        self._tell_hint(self._hint)
        self._hint.extend(index, tokens)

    def switch_off(self) -> None:
        """Draft no more for the sequence."""
        self._longest = 0

    def watch(self, trial: Trial) -> None:
        """Compare the proposal with the tokens to come. One that was verified in part goes on to be
        compared beside the next: what more it would have brought is to be known."""
        if len(self.trials) == _MOST_TRIALS:
            del self.trials[0]
        self.trials.append(trial)

    def account(self, source: str, draft: Sequence[int], accepted: int) -> bool:
        """Take in a verified draft; whether the sequence has begun to go round in circles."""
        drafted_before, accepted_before = self.counts.get(source, (0, 0))
        self.counts[source] = (drafted_before + len(draft), accepted_before + accepted)
        if self._window is not None:
            self._window.observe(len(draft), accepted)
        return self._repetition.observe(draft[:accepted])

    def close(self) -> None:
        """The sequence has ended, or was dropped."""
        if self._drafting is not None and self.remote is not None:
            self._drafting.close(self.remote)
        for name, drafter in self._drafters.items():
            drafter.close(
                self._opened.get(name),
                self._tokens,
                tenant=self._tenant,
                prompt_length=self._prompt_length,
            )
