"""From target logits to tokens: in C++ where the extension is built, else in numpy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from mirror_sd.backends.protocol import Float32
from mirror_sd.messages import SamplingParams, TokenLogprob
from mirror_sd.speculative import numpy_sampling
from mirror_sd.speculative.numpy_sampling import NumpyChooser
from mirror_sd.speculative.sampling import InvalidLogits, Judgement, TokenChooser

logger = logging.getLogger(__name__)
try:
    from mirror_sd import _native

    # The instruction set in use. Raises ValueError where MIRROR_SD_ISA names none of this machine;
    # the native engine then does not start.
    NATIVE_ISA: str | None = _native.sampling_isa()
except (ImportError, ValueError) as error:
    NATIVE_ISA = None
    logger.warning("sampling in numpy, which is slower: %s", error)

_REASONS = (None, "stop", "length")
_LONGEST_TOP_K = 2**31
_MASK64 = 2**64 - 1


class NativeChooser:
    """See `sampling.TokenChooser`. The GIL is released while it works. `isa` forces an instruction
    set; the tokens are the same with each."""

    def __init__(
        self, params: SamplingParams, completion: Iterable[int] = (), isa: str = ""
    ) -> None:
        self._chooser = _native.Chooser(
            temperature=params.temperature,
            top_k=min(params.top_k, _LONGEST_TOP_K),
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed & _MASK64,
            bias=list(params.logit_bias.items()),
            stop_tokens=list(params.stop_token_ids),
            completion=list(completion),
            isa=isa,
        )

    def commit(self, token: int) -> None:
        self._chooser.commit(token)

    def choose(self, logits: Float32, position: int) -> int:
        try:
            return self._chooser.choose(logits, position)
        except _native.InvalidLogits as error:
            raise InvalidLogits(str(error)) from None

    def judge(self, logits: Float32, draft: Sequence[int], position: int, room: int) -> Judgement:
        try:
            tokens, accepted, reason = self._chooser.judge(logits, draft, position, room)
        except _native.InvalidLogits as error:
            raise InvalidLogits(str(error)) from None
        return Judgement(tokens, accepted, _REASONS[reason])


def open_chooser(params: SamplingParams, completion: Iterable[int] = ()) -> TokenChooser:
    """The chooser of a sequence of which `completion` is generated already.

    Raises ValueError where the temperature or top_p is not a number.
    """
    return (
        NumpyChooser(params, completion)
        if NATIVE_ISA is None
        else NativeChooser(params, completion)
    )


def token_logprob(logits: Float32, token: int, best: int) -> TokenLogprob:
    """log softmax of the raw row at `token`, and at the `best` most probable tokens.

    Raises `InvalidLogits`.
    """
    if NATIVE_ISA is None:
        return numpy_sampling.token_logprob(logits, token, best)
    try:
        logprob, top = _native.token_logprob(logits, token, best)
    except _native.InvalidLogits as error:
        raise InvalidLogits(str(error)) from None
    return TokenLogprob(token_id=token, logprob=logprob, top=tuple(top))
