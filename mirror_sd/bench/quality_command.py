"""`mirror-sd bench quality`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd import model_store
from mirror_sd.bench import (
    answer_quality,
    drafts,
    machine,
    prompts,
    quality,
    quality_plot,
    rouge,
)
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    Limit,
    MaxTokens,
    Overrides,
    PlotFile,
    Threads,
    check_plot,
    encode,
    fitting,
    one_of,
    precisions,
    show,
    table,
    thread_count,
)
from mirror_sd.offline import load_tokenizer

PARTS = ("distributions", "rouge")
_SHOWN = (
    "run",
    "rouge_l",
    "difference",
    "difference_error",
    "relative_difference",
    "identical_to_fp32",
    "identical_to_plain",
    "tok_s",
    "ms_per_token",
    "accepted_per_verify",
)


def command(
    dataset: Dataset = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    text_tokens: Annotated[
        int, typer.Option(min=2, help="Most tokens read of each conversation's own text.")
    ] = 512,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Precisions, a comma list or repeated; default: the configured one."),
    ] = None,
    parts: Annotated[
        str,
        typer.Option(
            help=f"Comma list of {', '.join(PARTS)}; default: both, rouge where there are answers."
        ),
    ] = "",
    drafters: Annotated[
        str, typer.Option(help=f"Of rouge: comma list of {', '.join(drafts.DRAFTERS)}.")
    ] = "off,auto",
    plot: PlotFile = None,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What a precision costs, against fp32. Ends with status 1 if drafts change a token.

    distributions: teacher-forced on the fp32 engine's own answers (`answers`) and on the
    conversations' text (`text`); KL is of the reference from the run, in nats, and perplexity
    ratios are run / reference. rouge: ROUGE-L of greedy answers against those in the data set, by
    transformers in fp32, by ours plain and speculative, with their speeds. docs/benchmarks.md
    explains every key.
    """
    wanted = precisions(",".join(precision or ()))
    sources = one_of(drafters, drafts.DRAFTERS, "--drafters")
    chats = prompts.conversations(dataset, limit)
    exchanges = prompts.exchanges(chats)
    chosen = one_of(parts, PARTS, "--parts") if parts else PARTS[: 2 if exchanges else 1]
    if not exchanges and ("rouge" in chosen or plot is not None):
        raise typer.BadParameter(
            "rouge needs answers in the data set to compare with", param_hint="--parts"
        )
    check_plot(plot)
    report: dict[str, Any] = {"machine": machine.describe()}
    if "rouge" in chosen:
        report |= _rouge(
            exchanges, wanted, sources, max_tokens=max_tokens, threads=threads, overrides=overrides
        )
    if "distributions" in chosen:
        report |= quality.report(
            overrides or (), wanted, chats, max_tokens=max_tokens, text_tokens=text_tokens
        )
    _show(report, as_json)
    if plot is not None and "rouge" in report:
        quality_plot.draw(report, plot)
    if "rouge" in report and report["rouge"]["speculative_equals_plain"] is False:
        typer.echo("drafts have changed a token", err=True)
        raise typer.Exit(1)


def _rouge(
    exchanges: list[prompts.Exchange],
    wanted: Sequence[str],
    drafters: Sequence[str],
    *,
    max_tokens: int,
    threads: int | None,
    overrides: Sequence[str] | None,
) -> dict[str, Any]:
    rouge.scorer()
    config = configuration.load(overrides=overrides or ())
    tokenizer = load_tokenizer(config)
    pool, settings = next(iter(config.pools.items()))
    files = model_store.resolve(config.model.path)
    ids = encode(tokenizer, [exchange.messages for exchange in exchanges])
    kept = fitting(ids, max_tokens, config, tokenizer)
    task = answer_quality.Task(
        files=files,
        prompts=[ids[place] for place in kept],
        references=[exchanges[place].reference for place in kept],
        stop=tokenizer.facts.eos_token_ids,
        pool=pool,
        overrides=overrides or (),
        precisions=wanted or [settings.precision],
        drafters=drafters,
        max_tokens=max_tokens,
        threads=thread_count(threads or settings.threads),
    )
    found = answer_quality.measure(task, tokenizer, lambda line: typer.echo(line, err=True))
    return {
        "model": files.name,
        "threads": task.threads,
        "max_tokens": max_tokens,
        "rouge": {"left_out": len(ids) - len(kept), **found},
    }


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json or "rouge" not in report:
        show(report, as_json)
        return
    show({key: value for key, value in report.items() if key != "rouge"}, as_json)
    found = report["rouge"]
    left_out = (
        f", {found['left_out']} left out: longer than the context" if found["left_out"] else ""
    )
    typer.echo(f"\n{found['references']} references{left_out}\n{table(found['runs'], _SHOWN)}")
    said = found["speculative_equals_plain"]
    typer.echo(f"speculative = plain: {'nothing was drafted' if said is None else said}")
    for absent in found["unavailable"]:
        typer.echo(f"{absent['precision']} {absent['drafter']}: unavailable, {absent['reason']}")
