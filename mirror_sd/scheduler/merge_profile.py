"""From one request to what the merger compares (`messages.MergeProfile`). Pure, and for gateways:
call it off the event loop, the first call imports datasketch.

Every digest contains tenant and model, so that nothing can match across them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from mirror_sd.messages import MergeProfile, SamplingParams
from mirror_sd.scheduler.shingles import MAX_CHARACTERS, partition_terms, signature_of

_DIGEST_BYTES = 16
_encoder = msgspec.msgpack.Encoder()


def profile_of(
    tenant: str,
    model: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    system_text: str,
    user_text: str,
    permutations: int,
    *,
    is_seed_chosen: bool,
    compare: bool = True,
) -> MergeProfile:
    """`user_text` is what is compared by similarity, `system_text` the rest of the conversation,
    which must be equal for an answer to be shared (`texts_of` parts a chat). `is_seed_chosen`:
    the client gave the seed. Without `compare` only identical requests can match."""
    scope = _digest("scope", tenant, model)
    settings = _settings(params, is_seed_chosen)
    # An answer that chance makes is one of many: it may get a draft hint, not another's answer.
    exact = partition = b""
    if settings is not None:
        exact = _digest("exact", tenant, model, settings, tuple(prompt_ids))
    if not compare:
        return MergeProfile(exact=exact, scope=scope)
    signature = signature_of(user_text, permutations)
    # The signature of a longer text does not cover its middle.
    if settings is not None and signature and len(user_text) <= MAX_CHARACTERS:
        terms = partition_terms(user_text)
        partition = _digest("partition", tenant, model, settings, system_text, terms)
    return MergeProfile(
        exact=exact,
        partition=partition,
        scope=scope,
        signature=signature,
    )


def texts_of(messages: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The `system_text` and `user_text` of a chat of (role, content) messages: the last message of
    the user is compared, all before and after it must be equal."""
    last = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=-1)
    rest = [message for i, message in enumerate(messages) if i != last]
    return repr((len(messages) - last, rest)), messages[last][1] if last >= 0 else ""


def _settings(params: SamplingParams, is_seed_chosen: bool) -> SamplingParams | None:
    """The parameters that the answer depends on, which drafts are not among; None where chance is
    one of them."""
    if params.temperature != 0.0 and not is_seed_chosen:
        return None
    seed = 0 if params.temperature == 0.0 else params.seed
    in_order = dict(sorted(params.logit_bias.items()))
    return msgspec.structs.replace(
        params,
        seed=seed,
        logit_bias=in_order,
        speculation=True,
        draft_source="auto",
        draft_tokens=0,
    )


def _digest(kind: str, *parts: object) -> bytes:
    encoded = _encoder.encode((kind, *parts))
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
