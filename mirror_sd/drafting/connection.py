"""The drafters of a worker, as the configuration names them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from mirror_sd import model_store
from mirror_sd.backends.protocol import Capabilities
from mirror_sd.config import Config
from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.drafting import addresses
from mirror_sd.drafting.client import DraftClient
from mirror_sd.drafting.frames import Hello, Proposal
from mirror_sd.drafting.loading import tokenizer_digest
from mirror_sd.run_dir import RunDir
from mirror_sd.speculative.drafters.remote import Terms
from mirror_sd.speculative.remote_drafting import RemoteDrafting


def connector(
    config: Config,
    run: RunDir,
    device_class: str,
    on_proposal: Callable[[Proposal], None] | None = None,
) -> Callable[[Capabilities], RemoteDrafting] | None:
    """What connects a worker of the class to its drafters; None where it has none."""
    if not config.drafters:
        return None
    from mirror_sd import planning

    plan = planning.splitter(config).plan()
    planned = {pair.drafter: pair.length for pair in plan.drafters_of(device_class)}
    endpoints = [
        (name, address, _terms(config.drafter(name), planned.get(name)))
        for name, address in addresses.endpoints_for(config, run, device_class, plan)
    ]
    if not endpoints:
        return None

    def connect(abilities: Capabilities) -> RemoteDrafting:
        hello = Hello(
            verifier=f"{device_class}-{os.getpid()}",
            vocab_size=abilities.vocab_size,
            tokenizer=tokenizer_digest(model_store.resolve(config.model.path)),
        )
        return RemoteDrafting(
            DraftClient(endpoints, hello),
            vocab_size=abilities.vocab_size,
            most_tokens=config.speculation.max_tokens,
            clock=time.monotonic,
            on_proposal=on_proposal,
        )

    return connect


def _terms(settings: DrafterConfig, planned: int | None) -> Terms:
    terms = Terms(length=settings.length, overlaps=settings.overlap)
    return terms if planned is None else replace(terms, first_length=planned)
