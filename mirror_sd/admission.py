"""Which sequences an engine can never run."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mirror_sd.backends.protocol import Capabilities
from mirror_sd.errors import ContextLengthExceeded, InvalidRequest
from mirror_sd.messages import Submit


def check(
    submit: Submit,
    model_name: str,
    max_context: int,
    capabilities: Capabilities,
    running: Iterable[str],
) -> None:
    """Raises `InvalidRequest` for a sequence that can never run on an engine of this model and
    context. `running`: the ids of the requests that it has."""
    params = submit.params
    if submit.model != model_name:
        raise InvalidRequest(
            f"this worker serves {model_name!r}, not {submit.model!r}", param="model"
        )
    if submit.request_id in running:
        raise InvalidRequest(f"request {submit.request_id} is already running")
    if not submit.prompt:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    if params.max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}; at least 1 is needed", param="max_tokens"
        )
    if not math.isfinite(params.temperature) or math.isnan(params.top_p):
        raise InvalidRequest("temperature and top_p must be finite numbers")
    if len(submit.prompt) >= max_context:
        raise ContextLengthExceeded(
            f"the prompt has {len(submit.prompt)} tokens; this worker's context of {max_context}"
            " must leave room for an answer"
        )
    vocab = capabilities.vocab_size
    for token in (*submit.prompt, *submit.delivered, *params.logit_bias):
        if not 0 <= token < vocab:
            raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab}")
