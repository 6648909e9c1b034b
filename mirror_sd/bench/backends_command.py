"""`mirror-sd bench backends`: the reference table of docs/backends.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd.bench import machine, prompts
from mirror_sd.bench.backends import LINEUP, Entry
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    MaxTokens,
    Overrides,
    Threads,
    encode,
    one_of,
    show,
    thread_count,
)
from mirror_sd.bench.peer_process import PeerFailed, PeerProcess
from mirror_sd.offline import load_tokenizer

ENGINES = tuple(dict.fromkeys(entry.engine for entry in LINEUP))
_COMMAND = [sys.executable, "-m", "mirror_sd.bench.backends"]
# An engine may compile for minutes.
_TIMEOUT_S = 1800.0
# The built-in prompts are 16; these make them 32.
MORE = (
    "Why was my card declined although there is money on it?",
    "Write three sentences about the sea for a travel brochure.",
    "What is a mutex, and when does one need it?",
    "Translate into French: 'Your parcel will arrive tomorrow morning.'",
    "def median(values: list[float]) -> float:\n    # complete this function",
    "Give me a recipe for tomato soup with four ingredients.",
    "How many days are there from the 3rd of March to the 1st of April?",
    "Explain photosynthesis to a ten year old.",
    "请用两句话介绍一下北京。",
    "Turn this into a list: apples, two loaves of bread, a litre of milk and some rice.",
    "Which is larger, 3/7 or 4/9? Explain in one sentence.",
    "Cancel my order 77120 and tell me when I get the money back.",
    "What does the HTTP status 429 mean?",
    "Name the planets in the order of their distance from the sun.",
    "Ist das Museum am Montag geöffnet? Antworte auf Deutsch.",
    "Write a polite refusal to a request for a discount.",
)


def command(
    engines: Annotated[str, typer.Option(help="Comma list of engines.")] = ",".join(ENGINES),
    dataset: Dataset = None,
    count: Annotated[int, typer.Option("--prompts", min=1, help="How many prompts.")] = 32,
    max_tokens: MaxTokens = 32,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Error and greedy agreement of each back end and number format, against the fp32 reference.

    Prints the table of docs/backends.md; what is not installed, or has no device here, is listed
    as such.
    """
    chosen = [e for e in LINEUP if e.engine in one_of(engines, ENGINES, "--engines")]
    cores = thread_count(threads)
    settings = list(overrides or ())
    tokenizer = load_tokenizer(configuration.load(overrides=settings))
    chats = prompts.load(dataset)
    if dataset is None:
        chats += [[{"role": "user", "content": text}] for text in MORE]
    given = encode(tokenizer, chats[:count])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mirror-sd-backends-") as folder:
        positions = _child(
            cores,
            "reference",
            folder=folder,
            prompts=given,
            stop=tokenizer.facts.eos_token_ids,
            max_tokens=max_tokens,
            threads=cores,
            overrides=settings,
        )
        typer.echo(f"the reference has answered: {positions} positions", err=True)
        for entry in chosen:
            rows.append(_row(entry, folder, cores, settings))
            typer.echo(" ".join(map(str, rows[-1].values())), err=True)
    facts = {"machine": machine.describe(), "threads": cores}
    if as_json:
        show(facts | {"positions": positions, "rows": rows}, as_json)
    else:
        typer.echo(markdown(rows))


def _row(entry: Entry, folder: str, threads: int, settings: Sequence[str]) -> dict[str, Any]:
    named = {"engine": entry.engine, "device": entry.device, "precision": entry.precision}
    try:
        found: dict[str, Any] = _child(
            threads, "measure", folder=folder, threads=threads, overrides=settings, **named
        )
    except PeerFailed as error:
        found = {"kind": "failed", "reason": error.message}
    return named | found


def _child(cores: int, call: str, **arguments: Any) -> Any:
    with PeerProcess(_COMMAND, cores) as process:
        return process.call(call, timeout_s=_TIMEOUT_S, **arguments)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table of what was measured, then a list of what was not."""
    lines = [
        "| engine | device | numbers | largest logit error | mean KL (nats) | best token equal"
        " | answers equal | with drafts as without | drafts, 8 at once, as without | same bits in"
        " any batch |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    absent = []
    for row in rows:
        name = f"{row['engine']} | {row['device']} | {row['precision']}"
        if "reason" in row:
            absent.append(f"- {name.replace(' |', ',')}: {row['kind']}: {row['reason']}")
            continue
        of = row["prompts"]
        lines.append(
            f"| {name} | {row['max_logit_error']:.2g} | {row['mean_kl']:.1e}"
            f" | {100 * row['top1']:.1f} % | {row['equal']} of {of}"
            f" | {row['speculative_equal']} of {of} | {row['company_equal']} of {of}"
            f" | {'yes' if row['bit_stable'] else 'no'} |"
        )
    return "\n".join([*lines, "", *absent])
