"""`mirror-sd bench peers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from mirror_sd import config as configuration
from mirror_sd import model_store
from mirror_sd.bench import drafts, peer_lineup, prompts
from mirror_sd.bench import peers as peers_bench
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    Limit,
    MaxTokens,
    Overrides,
    Rounds,
    Threads,
    encode,
    one_of,
    show,
    thread_count,
)
from mirror_sd.config_section import Precision
from mirror_sd.offline import load_tokenizer


def peers(
    peers_python: Annotated[
        Path, typer.Option(help="Interpreter of an environment with the peers; default: this one.")
    ] = Path(sys.executable),
    only: Annotated[str, typer.Option("--peers", help="Comma list of peers; default: all.")] = "",
    precision: Annotated[str, typer.Option(help="Comma list of our precisions.")] = "int8,bf16",
    drafters: Annotated[str, typer.Option(help="Comma list, as in `bench decode`.")] = "off,auto",
    concurrency: Annotated[
        int, typer.Option(min=0, help="Streams of the second measurement; 0 leaves it out.")
    ] = 16,
    prefill: Annotated[
        int, typer.Option(min=0, help="Tokens of the long prompts; 0 leaves them out.")
    ] = 512,
    single: Annotated[bool, typer.Option(help="Measure one stream and long prompts.")] = True,
    dataset: Dataset = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    rounds: Rounds = 2,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Our engine beside transformers, llama.cpp and OpenVINO GenAI on the same prompts.

    One stream, `--concurrency` streams and the reading of long prompts; in turn, each engine in
    its own process with the same number of threads. `ratios` are ours over theirs.
    """
    config = configuration.load(overrides=overrides or ())
    chats, tokenizer = prompts.load(dataset, limit), load_tokenizer(config)
    pool, settings = next(iter(config.pools.items()))
    task = peers_bench.Task(
        prompts=encode(tokenizer, chats),
        stop=tokenizer.facts.eos_token_ids,
        max_tokens=max_tokens,
        streams=concurrency,
        prefill=prefill,
        rounds=rounds,
        threads=thread_count(threads or settings.threads),
    )
    own = peer_lineup.ours(
        one_of(precision, get_args(Precision), "--precision"),
        one_of(drafters, drafts.DRAFTERS, "--drafters"),
        pool,
        overrides or (),
    )
    show(
        peers_bench.run(
            task,
            own,
            model_store.resolve(config.model.path),
            python=peers_python,
            wanted=[word for word in only.split(",") if word],
            is_single=single,
            report=lambda line: typer.echo(line, err=True),
        ),
        as_json,
    )
