"""What the broker's merger is told of each sequence.

The gateway makes it, because it has the text and the parameters, and because the broker is one
process for all. What makes it is imported late: numpy and datasketch would delay the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from mirror_sd.config import MergeConfig
from mirror_sd.messages import MergeProfile, SamplingParams


class MergeProfiler:
    """For one served model. Thread-safe; a profile takes up to a millisecond once `is_prepared`."""

    def __init__(self, model: str, config: MergeConfig) -> None:
        self._model = model
        self._config = config
        self.is_prepared = not config.enabled

    def prepare(self) -> None:
        """Import what the first profile would wait for, about a second; call it in a thread."""
        if self._config.enabled:
            from mirror_sd.scheduler.shingles import signature_of

            signature_of("ready", self._config.permutations)
            self.is_prepared = True

    def profile(
        self,
        tenant: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        messages: Sequence[tuple[str, str]] | None,
        is_seed_chosen: bool,
    ) -> MergeProfile | None:
        """The profile; None where nothing can match. `messages`, of (role, content), are what is
        compared with other requests, None where the text is not known or not to be compared."""
        compare = messages is not None and params.max_tokens >= self._config.min_answer_tokens
        is_random = params.temperature > 0 and not is_seed_chosen
        if not self._config.enabled or (is_random and not compare):
            return None
        from mirror_sd.scheduler.merge_profile import profile_of, texts_of

        system, user = texts_of(messages) if messages is not None and compare else ("", "")
        made = profile_of(
            tenant,
            self._model,
            prompt,
            params,
            system,
            user,
            self._config.permutations,
            is_seed_chosen=is_seed_chosen,
            compare=compare,
        )
        self.is_prepared = self.is_prepared or compare
        return made
