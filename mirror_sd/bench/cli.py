"""`mirror-sd bench ...`: each measurement prints one JSON object with `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd import model_store
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench import (
    backends_command,
    decode_command,
    edge,
    exactness,
    machine,
    memory,
    merge,
    overlap,
    peers_command,
    plot,
    prompts,
    quality_command,
    routing,
    segments,
    serve,
)
from mirror_sd.bench import http as http_path
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    Limit,
    MaxTokens,
    Overrides,
    Rounds,
    Threads,
    encode,
    numbers,
    one_of,
    show,
    thread_count,
)
from mirror_sd.engine import Engine
from mirror_sd.errors import SetupError
from mirror_sd.offline import load_tokenizer

app = typer.Typer(no_args_is_help=True, help="Measure speed and exactness on this machine.")
app.command("decode")(decode_command.command)
app.command("backends")(backends_command.command)
app.command("quality")(quality_command.command)
app.command("peers")(peers_command.peers)
app.command("plot")(plot.command)
app.command("memory")(memory.command)
app.command("segments")(segments.command)
app.command("overlap")(overlap.command)
app.command("serve")(serve.command)
app.command("merge")(merge.command)
app.command("edge")(edge.command)
app.command("routing")(routing.command)


def _prepare(
    overrides: list[str] | None, dataset: Path | None, limit: int | None
) -> tuple[Engine, Tokenizer, list[prompts.Messages], model_store.ModelFiles]:
    config = configuration.load(overrides=overrides or ())
    chats = prompts.load(dataset, limit)
    files = model_store.resolve(config.model.path)
    engine = engines.build(config, next(iter(config.pools)))
    return engine, load_tokenizer(config), chats, files


@app.command("forward")
def forward_command(
    precision: Annotated[str, typer.Option(help="Comma list of precisions.")] = "int8,bf16",
    tokens: Annotated[str, typer.Option(help="Comma list: new tokens.")] = "1,2,4,8,16,32",
    contexts: Annotated[str, typer.Option(help="Comma list: length of the context.")] = "128,2048",
    rounds: Rounds = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Forwards in a round.")] = 15,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Milliseconds of one forward against the time of reading weights and cache once."""
    try:
        from mirror_sd.bench import forward
    except ImportError as error:
        raise SetupError(
            f"bench forward measures the native engine, which is not built ({error}): install a"
            " C++ compiler and install mirror-sd again"
        ) from error

    config = configuration.load(overrides=overrides or ())
    report = forward.measure(
        config,
        one_of(precision, ("int8", "bf16", "fp32"), "--precision"),
        tokens=numbers(tokens, "--tokens"),
        contexts=numbers(contexts, "--contexts"),
        threads=thread_count(threads or next(iter(config.pools.values())).threads),
        rounds=rounds,
        repeats=repeats,
    )
    show({"machine": machine.describe()} | report, as_json)


@app.command("exactness")
def exactness_command(
    dataset: Dataset = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Greedy tokens with and without speculation and company; each difference with its margin."""
    engine, tokenizer, chats, _ = _prepare(overrides, dataset, limit)
    ids = encode(tokenizer, chats)
    report = exactness.compare(
        engine, ids, max_tokens=max_tokens, stop=tokenizer.facts.eos_token_ids
    )
    described = {"machine": machine.describe(), "precision": engine.capabilities.precision}
    show(described | report, as_json)


@app.command("http")
def http_command(
    port: Annotated[int, typer.Option(help="Port of a running stack.")] = 8080,
    dataset: Dataset = None,
    limit: Limit = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token through the running stack against the engine alone."""
    engine, tokenizer, chats, _ = _prepare(overrides, dataset, limit)
    report = http_path.first_token_overhead(
        engine, tokenizer, chats, port=port, model=engine.model_name
    )
    show({"machine": machine.describe()} | report, as_json)
