"""Near-duplicates, asked one after the other: the first of a cluster teaches, the later count.

A data set has clusters of a base request and variants of known kinds (see `merge`). Of the variants
those are asked that may draft from the base's answer and must not share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench import merge
from mirror_sd.bench.decode import Prompt
from mirror_sd.bench.options import encode
from mirror_sd.config import Config
from mirror_sd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Clusters:
    """Of each prompt: its kind, None for the first of a cluster, which does not count; its tenant;
    the prompt whose answer the merger would hint, if any."""

    kinds: Sequence[str | None]
    tenants: Sequence[str]
    hints: Sequence[int | None]


def load(
    dataset: Path, limit: int | None, config: Config, tokenizer: Tokenizer, *, hinted: bool
) -> tuple[list[Prompt], Clusters]:
    """The first `limit` clusters of a file; `hinted`: find out what the merger would hint.

    Raises `ConfigError` as `merge.read` does, and where no variant is left.
    """
    lines = _asked(merge.read(dataset), limit)
    kinds = [None if line.variant == merge.BASE else line.kind for line in lines]
    if not any(kinds):
        raise ConfigError(f"{dataset} has no variant of kind {', '.join(merge.HINTED)}")
    hints: list[int | None] = [None] * len(lines)
    if hinted:
        requests = merge.prepare(lines, config, tokenizer)
        places = {request.submit.request_id: place for place, request in enumerate(requests)}
        found = merge.hint_sources(requests, config)
        hints = [None if source is None else places[source] for source in found]
    clusters = Clusters(kinds, [line.tenant for line in lines], hints)
    return encode(tokenizer, [line.messages for line in lines]), clusters


def _asked(lines: Sequence[merge.Line], limit: int | None) -> list[merge.Line]:
    """Cluster by cluster, the base first."""
    chosen = []
    bases = [line for line in lines if line.variant == merge.BASE]
    for base in bases[:limit]:
        chosen.append(base)
        chosen += [
            line
            for line in lines
            if line.cluster == base.cluster
            and line.tenant == base.tenant
            and line.variant != merge.BASE
            and line.kind in merge.HINTED
        ]
    return chosen
