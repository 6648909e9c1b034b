"""`mirror-sd bench merge`: what the merger makes of requests that are nearly the same.

A data set has clusters: a base request and variants of known kinds. Each variant meets its base
three times, through the gateway's profiles and the broker's merger: while the base is generated,
after it has finished, and while it is generated for a tenant that shares answers. Then all lines go
through one merger, in order, each finished before the next, to see whose answers are hinted.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mirror_sd import config as configuration
from mirror_sd import model_store
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench.options import AsJson, Overrides, show
from mirror_sd.config import Config
from mirror_sd.errors import ConfigError
from mirror_sd.messages import Chunk, SamplingParams, Submit, encode_output
from mirror_sd.offline import load_tokenizer
from mirror_sd.scheduler.minhash_merger import Answer, Match, MinHashMerger, rules_of
from mirror_sd.serving.merge_profiler import MergeProfiler

BASE = "base"
# What must come of a variant beside its base, and what may, for a tenant that shares answers.
COALESCED = ("exact",)
HINTED = ("whitespace_case", "paraphrase_small", "digit_change")
MAY_SHARE = ("exact", "whitespace_case", "paraphrase_small")
_MAX_TOKENS = 64


class Line(msgspec.Struct, frozen=True):
    """A line of the data set; `messages` hold at least role and content."""

    cluster: int | str
    variant: str
    kind: str
    tenant: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    line: Line
    submit: Submit


def command(
    dataset: Annotated[
        Path, typer.Option(help="JSONL: cluster, variant, kind, tenant and messages in each line.")
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Recall and precision of merging, by kind of near-duplicate. Ends with status 1 if an answer
    would be shared that must not be.

    Keys of each kind; its variants are asked beside their base, in three ways:

    - in_flight_...: while the base is generated
    - finished_...: after that
    - sharing_...: while it is generated, tenant in merge.share_answers
    - ..._joined: the variant got the base's answer
    - ..._hinted: it was generated, with drafts from that answer
    - ..._alone: neither
    - recall: share of pairs that came to what they must in flight:
      joined (exact), hinted (whitespace_case, paraphrase_small,
      digit_change), not joined (all others)
    - precision: of what was joined or hinted, the share that may be

    `coalesce` and `hint` are both over all kinds that must be joined, or hinted. `violations` are
    answers shared that must not be.
    """
    config = configuration.load(overrides=overrides or ())
    requests = prepare(read(dataset), config, load_tokenizer(config))
    report = measure(requests, config)
    show({"dataset": str(dataset), **report}, as_json)
    if report["violations"]:
        raise typer.Exit(1)


def read(dataset: Path) -> list[Line]:
    """Raises `ConfigError` naming the line at fault, or a cluster without a base."""
    try:
        rows = dataset.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the data set {dataset}: {error.strerror}") from error
    lines = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            lines.append(msgspec.json.decode(row, type=Line))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"{dataset}:{number}: {error}") from error
    if not lines:
        raise ConfigError(f"{dataset} has no line")
    bases = {line.cluster for line in lines if line.variant == BASE}
    for line in lines:
        if line.cluster not in bases:
            raise ConfigError(
                f"{dataset}: cluster {line.cluster} has no variant {json.dumps(BASE)}"
            )
    return lines


def prepare(lines: Sequence[Line], config: Config, tokenizer: Tokenizer) -> list[Request]:
    """The submits that a gateway makes of greedy requests."""
    model = config.model.served_name or model_store.resolve(config.model.path).name
    profiler = MergeProfiler(model, config.merge)
    profiler.prepare()
    params = SamplingParams(max_tokens=_MAX_TOKENS, seed=0, temperature=0.0)
    requests = []
    for number, line in enumerate(lines):
        messages = [(str(m["role"]), str(m["content"])) for m in line.messages]
        prompt = tuple(tokenizer.encode_chat(messages))
        profile = profiler.profile(
            line.tenant, prompt, params, messages=messages, is_seed_chosen=False
        )
        submit = Submit(
            request_id=f"r{number}",
            model=model,
            prompt=prompt,
            params=params,
            tenant=line.tenant,
            merge=profile,
        )
        requests.append(Request(line, submit))
    return requests


def measure(requests: Sequence[Request], config: Config) -> dict[str, Any]:
    """Counts, recall and precision by kind; `violations` are answers that must not be shared."""
    kinds: dict[str, dict[str, int]] = {}
    violations: list[dict[str, Any]] = []
    for base, variant in _pairs(requests):
        kind = variant.line.kind
        row = kinds.setdefault(kind, dict.fromkeys(_COLUMNS, 0))
        row["pairs"] += 1
        for mode, match in _meetings(base, variant, config):
            outcome = _outcome(match)
            row[f"{mode}_{outcome}"] += 1
            if outcome == "joined" and not _may_join(base, variant, mode):
                line = variant.line
                where = {"cluster": line.cluster, "variant": line.variant, "kind": kind}
                violations.append(where | {"mode": mode})
    sources = _hints_among_all(requests, config)
    wrong = Counter(violation["kind"] for violation in violations)
    rates = {kind: _rates(kind, row, wrong[kind], sources) for kind, row in kinds.items()}
    return {
        "lines": len(requests),
        "share_similarity": config.scheduler.similarity_threshold,
        "hint_similarity": rules_of(config).hint_similarity,
        "kinds": {kind: kinds[kind] | rates[kind] for kind in sorted(kinds)},
        "coalesce": _coalescing(kinds),
        "hint": _hinting(kinds, sources),
        "violations": violations,
    }


_MODES = ("in_flight", "finished", "sharing")
_COLUMNS = (
    "pairs",
    *(f"{mode}_{outcome}" for mode in _MODES for outcome in ("joined", "hinted", "alone")),
)


def _pairs(requests: Sequence[Request]) -> Iterator[tuple[Request, Request]]:
    bases = {r.line.cluster: r for r in requests if r.line.variant == BASE}
    for request in requests:
        if request.line.variant != BASE:
            yield bases[request.line.cluster], request


def _meetings(base: Request, variant: Request, config: Config) -> Iterator[tuple[str, Match]]:
    for mode in _MODES:
        tenants = {base.line.tenant, variant.line.tenant} if mode == "sharing" else ()
        merger = _merger(config, tenants)
        answer = _begin(merger, base)
        if mode == "finished":
            merger.finish(answer)
        yield mode, merger.match(variant.submit)


def _may_join(base: Request, variant: Request, mode: str) -> bool:
    kind, is_same = variant.line.kind, base.line.tenant == variant.line.tenant
    allowed = {"in_flight": COALESCED, "finished": (), "sharing": MAY_SHARE}[mode]
    return is_same and kind in allowed


def hint_sources(requests: Sequence[Request], config: Config) -> list[str | None]:
    """Of each the request before it whose finished answer it would draft from, by its id."""
    merger = _merger(config, ())
    found = []
    for request in requests:
        source = merger.match(request.submit).source
        found.append(None if source is None else source.name)
        merger.finish(_begin(merger, request))
    return found


def _hints_among_all(
    requests: Sequence[Request], config: Config
) -> list[tuple[Request, Request | None]]:
    """Each line and the one whose finished answer it would draft from."""
    by_name = {request.submit.request_id: request for request in requests}
    names = hint_sources(requests, config)
    return [
        (request, None if name is None else by_name[name])
        for request, name in zip(requests, names, strict=True)
    ]


def _merger(config: Config, sharing: Sequence[str] | set[str] | tuple[()]) -> MinHashMerger:
    return MinHashMerger(rules_of(config, share_answers=tuple(sharing)), lambda: 0.0)


def _begin(merger: MinHashMerger, request: Request) -> Answer:
    """A generation that has made a token."""
    answer = merger.begin(request.submit.request_id, request.submit)
    if answer is None:
        raise ConfigError("nothing is compared: merge.enabled is off, or the requests are short")
    chunk = Chunk(request_id=answer.name, index=0, tokens=(1,))
    answer.log.append(bytes(memoryview(encode_output(chunk))))
    return answer


def _outcome(match: Match) -> str:
    if match.join is not None:
        return "joined"
    return "alone" if match.source is None else "hinted"


def _rates(
    kind: str,
    row: dict[str, int],
    wrong_joins: int,
    sources: Sequence[tuple[Request, Request | None]],
) -> dict[str, float]:
    """`recall`: of the pairs, those that got what they must while the base was in flight: the
    same generation, a hint, or no shared answer. `precision`: of all that was merged, shared
    answers that may be and hints from the same cluster and tenant; 1 where nothing was."""
    right = row["pairs"] - row["in_flight_joined"]
    if kind in (*COALESCED, *HINTED):
        right = row["in_flight_joined" if kind in COALESCED else "in_flight_hinted"]
    joins = sum(row[f"{mode}_joined"] for mode in _MODES)
    hints = [
        _is_right(request, source)
        for request, source in sources
        if source is not None and request.line.kind == kind and request.line.variant != BASE
    ]
    merged = joins + len(hints)
    precision = (joins - wrong_joins + sum(hints)) / merged if merged else 1.0
    return {"recall": right / row["pairs"], "precision": precision}


def _is_right(request: Request, source: Request) -> bool:
    mine, other = request.line, source.line
    return (mine.cluster, mine.tenant) == (other.cluster, other.tenant)


def _coalescing(kinds: dict[str, dict[str, int]]) -> dict[str, float | None]:
    pairs = sum(row["pairs"] for kind, row in kinds.items() if kind in COALESCED)
    right = sum(row["in_flight_joined"] for kind, row in kinds.items() if kind in COALESCED)
    joins = sum(row["in_flight_joined"] for row in kinds.values())
    return {"recall": _ratio(right, pairs), "precision": _ratio(right, joins)}


def _hinting(
    kinds: dict[str, dict[str, int]], sources: Sequence[tuple[Request, Request | None]]
) -> dict[str, Any]:
    pairs = sum(row["pairs"] for kind, row in kinds.items() if kind in HINTED)
    given = sum(row["in_flight_hinted"] for kind, row in kinds.items() if kind in HINTED)
    hinted = [(request, source) for request, source in sources if source is not None]
    right = sum(_is_right(request, source) for request, source in hinted)
    crossed = sum(r.line.tenant != s.line.tenant for r, s in hinted)
    return {
        "recall": _ratio(given, pairs),
        "precision": _ratio(right, len(hinted)),
        "across_tenants": crossed,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
