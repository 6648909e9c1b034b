"""`mirror-sd distil`: train a draft head for a model on its own answers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from mirror_sd import config as configuration
from mirror_sd import openmp
from mirror_sd.errors import ConfigError, SetupError
from mirror_sd.training import card
from mirror_sd.training import plan as plans
from mirror_sd.training.plan import Plan
from mirror_sd.training.progress import Reporter
from mirror_sd.uir.draft_file import Precision

# The target answers so many at once; beyond, a forward takes longer by as much as it gives.
_STREAMS = 32
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    epilog="Examples: `mirror-sd distil --out my-draft` · `mirror-sd distil --out mine --data"
    " chats.jsonl --model /models/mine --precision int8,fp16` · `mirror-sd distil --out x --smoke`"
)
def distil(
    out: Annotated[Path, typer.Option(help="Directory for data, checkpoints, drafts, report.")],
    data: Annotated[
        Path | None,
        typer.Option(help="ShareGPT JSON, or JSONL of `messages`; default: bundled prompts."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name, Hugging Face directory or .gguf file.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(metavar="int8|fp16|bf16|fp32", help="Of the export; repeatable."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of prompts, answers, weights, batches.")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A run of a minute or two that shows that it works.")
    ] = False,
    snapshot: Annotated[
        bool,
        typer.Option("--snapshot", help="Only export what the checkpoint in --out has learnt."),
    ] = False,
    answers: Annotated[int | None, typer.Option(min=8, help="Answers to train on.")] = None,
    self_asked: Annotated[
        int | None, typer.Option(min=0, help="Of these, how many the target asks itself.")
    ] = None,
    held_out: Annotated[int | None, typer.Option(min=2, help="Answers to evaluate on.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=8, help="Longest answer.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; longer ones are left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates in fp32.")] = None,
    mixed_steps: Annotated[
        int | None, typer.Option(min=0, help="Updates in each precision after that.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=64, help="Tokens of an update.")] = None,
    unroll: Annotated[
        int | None, typer.Option(min=1, max=8, help="Steps on the head's own states.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=64, max=65535, help="Tokens the draft can propose.")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(metavar="10,20,30", help="Layers whose states it reads.")
    ] = None,
    chain: Annotated[
        int | None, typer.Option(min=1, max=16, help="Drafted tokens in the evaluation.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Default: the cores.")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device of the training.")] = "cpu",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Configuration.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train a draft head on the model's own answers, evaluate it, and export it.

    Writes to --out: the drafts `MODEL.PRECISION.draft.safetensors`, their card `MODEL.md`,
    `report.json`, `report.png`.
    """
    plan = plans.resized(
        plans.SMOKE if smoke else Plan(),
        seed=seed,
        precisions=_precisions(precision),
        taps=_layers(taps),
        **_given(locals()),
    )
    _check_directory(out, may_hold_a_run=resume or snapshot)
    count = threads or len(os.sched_getaffinity(0))
    # Before torch is imported, which reads them then.
    for name, value in openmp.environment(count).items():
        os.environ.setdefault(name, value)
    settings = _settings(overrides, model, count)
    from mirror_sd.backends import torch_device
    from mirror_sd.training import distillation

    distillation.prepare_threads(count)
    torch_device.check(device, f"--device {device}")
    reporter = Reporter()
    run = distillation.Distillation(settings, plan, out, data, device, reporter)
    with _disk_failures_told(out):
        if snapshot:
            _show(run.snapshot(), as_json)
            return
        report = run.run()
        distillation.write(report, out)
        (out / f"{report['model']}.md").write_text(card.text(report, _command()), encoding="utf-8")
        _plot(report, out, reporter)
        _show(report, as_json)


@contextmanager
def _disk_failures_told(out: Path) -> Iterator[None]:
    """Raises `SetupError` for what the system says of files: no room, no permission."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or out
        raise SetupError(
            f"the run stopped at {place}: {error.strerror or error}; with that put right,"
            " --resume goes on with it"
        ) from error


def _given(values: dict[str, Any]) -> dict[str, Any]:
    names = (
        "answers",
        "self_asked",
        "held_out",
        "answer_tokens",
        "prompt_tokens",
        "steps",
        "mixed_steps",
        "batch_tokens",
        "unroll",
        "draft_vocab",
        "chain",
    )
    return {name: values[name] for name in names}


def _precisions(asked: list[str] | None) -> tuple[Precision, ...] | None:
    """Raises `typer.BadParameter`."""
    if not asked:
        return None
    known = get_args(Precision)
    words = [word.strip() for text in asked for word in text.split(",")]
    wrong = [word for word in words if word not in known]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not one of {', '.join(known)}", param_hint="--precision"
        )
    return tuple(known[known.index(word)] for word in dict.fromkeys(words))


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{text!r} is not a comma list of layers", param_hint="--taps")
    return tuple(sorted({int(word) for word in words}))


def _check_directory(out: Path, *, may_hold_a_run: bool) -> None:
    """Raises `ConfigError` where a run would overwrite another one, or has nowhere to write."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; a directory is wanted")
    if not may_hold_a_run and (out / "answers.jsonl").exists():
        raise ConfigError(f"{out} holds a run already; --resume goes on with it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {out}: {error.strerror}") from error


def _settings(overrides: list[str] | None, model: str | None, threads: int) -> Any:
    named = {"model.path": model} if model is not None else {}
    settings = configuration.load(
        overrides=[*(overrides or ()), *(f"{k}={json.dumps(v)}" for k, v in named.items())]
    )
    pool = next(iter(settings.pools))
    return configuration.load(
        overrides=[
            f"scheduler.max_batch_size.{pool.upper()}={_STREAMS}",
            "speculation.enabled=false",
            f"pools.{pool}.threads={threads}",
            *(overrides or ()),
            *(f"{k}={json.dumps(v)}" for k, v in named.items()),
        ]
    )


def _command() -> str:
    """What was typed, for the card."""
    return shlex.join(["mirror-sd", *sys.argv[1:]])


def _plot(report: dict[str, Any], out: Path, reporter: Reporter) -> None:
    from mirror_sd.training import report as pictures

    try:
        pictures.draw(report, out / "report.png")
    except SetupError as error:
        reporter.say(f"no plot: {error.message}")


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    rows = {"fp32 parent": report["parent"]} | report["exports"]
    for name, row in rows.items():
        depths = " ".join(f"{share:.2f}" for share in row["by_depth"])
        typer.echo(
            f"{row.get('file', name)}: {row['tokens_per_verify']:.2f} tokens per verify,"
            f" acceptance {row['acceptance']:.3f}, by depth {depths}"
        )
