"""`mirror-sd bench decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd.bench import decode_plot, drafts, machine, near_duplicates, prompts
from mirror_sd.bench.draft_figures import AUTO, OFF
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    Limit,
    MaxTokens,
    Overrides,
    PlotFile,
    Rounds,
    Threads,
    check_plot,
    encode,
    fitting,
    numbers,
    one_of,
    precisions,
    show,
    table,
    thread_count,
)
from mirror_sd.errors import ConfigError
from mirror_sd.offline import load_tokenizer

_SHOWN = (
    "precision",
    "drafter",
    "tok_s",
    "speedup",
    "decode_tok_s",
    "decode_speedup",
    "accepted_per_verify",
    "acceptance",
    "draft_ms",
    "verify_ms",
    "identical_to_plain",
)


Concurrency = Annotated[
    int, typer.Option(min=1, help="Prompts at once; a next one starts when one ends.")
]
Drafters = Annotated[
    str,
    typer.Option(
        help=f"Comma list of {', '.join(drafts.DRAFTERS)}; default: off,auto, with --sweep all."
    ),
]
Precisions = Annotated[
    str, typer.Option(help="Comma list of precisions; default: the configured one.")
]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")]
NearDuplicates = Annotated[
    bool,
    typer.Option(
        "--near-duplicates",
        help="The data set has clusters: the first of each teaches, later ones count.",
    ),
]
Hints = Annotated[
    bool, typer.Option("--hints", help="Near-duplicates get the hints of the merger too.")
]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Also each source of --drafters at fixed lengths.")
]
Lengths = Annotated[str, typer.Option(help="Comma list: draft lengths of --sweep.")]
Warm = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Prompts that each drafter answers before it is measured; default: one a stream.",
    ),
]


def command(
    dataset: Dataset = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    concurrency: Concurrency = 1,
    drafters: Drafters = "",
    precision: Precisions = "",
    temperature: Temperature = 0.0,
    near_duplicate: NearDuplicates = False,
    hints: Hints = False,
    sweep: Sweep = False,
    lengths: Lengths = "1,2,4,8,16",
    warm: Warm = None,
    plot: PlotFile = None,
    rounds: Rounds = 2,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Decoding speed of the engine without HTTP, by source of drafts.

    A run's `tok_s` counts the tokens of all streams from the moment at which each of the first
    `--concurrency` prompts has its first token, while at least one answer is being written. So
    with one stream reading prompts is left out; with several, prompts that are read while others
    decode are in. `ms_per_token` is a stream's own pace. A stop token counts as a token.
    docs/benchmarks.md explains every key.
    """
    unnamed = drafts.DRAFTERS if sweep else (OFF, AUTO)
    wanted = one_of(drafters or ",".join(unnamed), drafts.DRAFTERS, "--drafters")
    if sweep and not set(wanted) & set(drafts.SOURCES):
        raise typer.BadParameter(
            f"needs one of {', '.join(drafts.SOURCES)} in --drafters", param_hint="--sweep"
        )
    check_plot(plot)
    if near_duplicate and (dataset is None or concurrency > 1):
        raise typer.BadParameter(
            "takes a --dataset of clusters, one prompt at a time", param_hint="--near-duplicates"
        )
    config = configuration.load(overrides=overrides or ())
    fixed = _fixed_lengths(lengths, overrides or ()) if sweep else ()
    tokenizer = load_tokenizer(config)
    if near_duplicate and dataset is not None:
        ids, clusters = near_duplicates.load(dataset, limit, config, tokenizer, hinted=hints)
    else:
        read, clusters = encode(tokenizer, prompts.load(dataset, limit)), None
        ids = [read[place] for place in fitting(read, max_tokens, config, tokenizer)]
        if len(ids) < len(read):
            typer.echo(f"{len(read) - len(ids)} prompts left out: no room in the context", err=True)
    pool, settings = next(iter(config.pools.items()))
    task = drafts.Task(
        prompts=ids,
        stop=tokenizer.facts.eos_token_ids,
        pool=pool,
        overrides=overrides or (),
        precisions=precisions(precision) or [settings.precision],
        drafters=wanted,
        max_tokens=max_tokens,
        concurrency=concurrency,
        rounds=rounds,
        threads=thread_count(threads or settings.threads),
        temperature=temperature,
        warm=warm or concurrency,
        lengths=fixed,
        clusters=clusters,
    )
    report = {"machine": machine.describe(), **task.facts()}
    report |= drafts.measure(task, lambda line: typer.echo(line, err=True))
    _show(report, as_json)
    if plot is not None:
        decode_plot.draw(report, plot)


def _fixed_lengths(text: str, overrides: Sequence[str]) -> list[int]:
    """Of the sweep. Raises `typer.BadParameter` for one that no engine can be set to."""
    lengths = numbers(text, "--lengths")
    for length in lengths:
        try:
            configuration.load(overrides=[*overrides, *drafts.fixed(drafts.SOURCES[0], length)])
        except ConfigError as error:
            raise typer.BadParameter(error.message, param_hint="--lengths") from error
    return lengths


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show(report, as_json)
        return
    shown = ("runs", "drafters", "sweep", "unavailable")
    show({key: value for key, value in report.items() if key not in shown}, as_json)
    typer.echo("\n" + table(report["drafters"], _SHOWN))
    for row in report["drafters"]:
        kinds = [{"kind": kind, **figures} for kind, figures in row.get("kinds", {}).items()]
        if kinds:
            typer.echo(f"\n{row['precision']} {row['drafter']}")
            typer.echo(table(kinds, ("kind", *_SHOWN[2:-1])))
    for sweep in report.get("sweep", ()):
        best = sweep["best"]
        typer.echo("\n" + table(sweep["grid"], ("source", "length", *_SHOWN[2:-1])))
        typer.echo(
            f"{sweep['precision']}: the best is {best['source']} {best['length']};"
            f" auto runs at {sweep['auto_over_best']} of its speed"
        )
    for absent in report["unavailable"]:
        typer.echo(f"{absent['precision']} {absent['drafter']}: unavailable, {absent['reason']}")
