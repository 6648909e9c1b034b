"""`mirror-sd bench ...`: each measurement prints one JSON object with `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd import model_store
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench import decode, exactness, machine, prompts
from mirror_sd.bench import http as http_path
from mirror_sd.engine import Engine
from mirror_sd.offline import load_tokenizer

app = typer.Typer(no_args_is_help=True, help="Measure speed and exactness on this machine.")

Dataset = Annotated[
    Path | None, typer.Option(help="JSONL with `messages` in each line; default: built in.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N conversations.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Configuration, as `pools.cpu.precision=fp32`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _prepare(
    overrides: list[str] | None, dataset: Path | None, limit: int | None
) -> tuple[Engine, Tokenizer, list[prompts.Messages], model_store.ModelFiles]:
    config = configuration.load(overrides=overrides or ())
    chats = prompts.load(dataset, limit)
    files = model_store.resolve(config.model.path)
    engine = engines.build(config, next(iter(config.pools)))
    return engine, load_tokenizer(config), chats, files


def _encode(tokenizer: Tokenizer, chats: list[prompts.Messages]) -> list[decode.Prompt]:
    return [
        tuple(tokenizer.encode_chat([(m["role"], m["content"]) for m in chat])) for chat in chats
    ]


@app.command("decode")
def decode_command(
    dataset: Dataset = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    drafters: Annotated[str, typer.Option(help="Comma list of off, lookup.")] = "off,lookup",
    against: Annotated[
        str, typer.Option(help="Peer in the same run: none, transformers.")
    ] = "none",
    rounds: Annotated[int, typer.Option(min=1, help="Turns; more than one is A B A B.")] = 2,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Greedy decoding speed of the engine without HTTP, and of transformers beside it."""
    wanted = drafters.split(",")
    if not set(wanted) <= {"off", "lookup"} or against not in ("none", "transformers"):
        raise typer.BadParameter("--drafters takes off, lookup; --against none, transformers")
    engine, tokenizer, chats, files = _prepare(overrides, dataset, limit)
    ids, stop = _encode(tokenizer, chats), tokenizer.facts.eos_token_ids
    precision = engine.capabilities.precision
    peer = None
    if against == "transformers":
        import torch

        peer = decode.TransformersPeer.load(files, precision, torch.get_num_threads(), stop)
    decode.run_engine(engine, ids[:1], max_tokens=8, speculation=True, stop=stop, tag="warm")
    if peer is not None:
        peer.run(ids[:1], max_tokens=8)
    report: dict[str, Any] = {"machine": machine.describe(), "runs": []}
    plain: list[list[int]] | None = None
    for turn in range(rounds):
        for drafter in wanted:
            run = decode.run_engine(
                engine,
                ids,
                max_tokens=max_tokens,
                speculation=drafter != "off",
                stop=stop,
                concurrency=concurrency,
                tag=f"{drafter}{turn}",
            )
            plain = run.tokens if plain is None else plain
            report["runs"].append(
                {"engine": "mirror-sd", "drafter": drafter, "precision": precision}
                | run.row()
                | {"identical_to_plain": run.tokens == plain, "peak_rss_mb": decode.peak_rss_mb()}
            )
        if peer is not None:
            run = peer.run(ids, max_tokens=max_tokens)
            report["runs"].append(
                {"engine": "transformers", "drafter": "off", "precision": precision} | run.row()
            )
    report["ratios"] = _ratios(report["runs"])
    _print(report, as_json)


def _ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean speed of each of our drafters over that of transformers (or of `off`)."""
    speeds: dict[str, list[float]] = {}
    for run in runs:
        speeds.setdefault(f"{run['engine']} {run['drafter']}", []).append(run["tok_s"])
    means = {name: sum(values) / len(values) for name, values in speeds.items()}
    base = "transformers off" if "transformers off" in means else "mirror-sd off"
    if base not in means:
        return {}
    return {
        f"{name} / {base}": round(mean / means[base], 3)
        for name, mean in means.items()
        if name != base
    }


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
    ids = _encode(tokenizer, chats)
    report = exactness.compare(
        engine, ids, max_tokens=max_tokens, stop=tokenizer.facts.eos_token_ids
    )
    described = {"machine": machine.describe(), "precision": engine.capabilities.precision}
    _print(described | report, as_json)


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
    _print({"machine": machine.describe()} | report, as_json)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    for key, value in report.items():
        if isinstance(value, list):
            typer.echo(f"{key}: {len(value)}")
            for row in value:
                typer.echo("  " + "  ".join(f"{name}={item}" for name, item in row.items()))
        else:
            typer.echo(f"{key}: {value}")
