"""What the commands of `mirror-sd bench` have in common: options, prompts as ids, the report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from mirror_sd import drawing
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench.prompts import Messages
from mirror_sd.config import Config
from mirror_sd.config_section import Precision
from mirror_sd.errors import ConfigError

Dataset = Annotated[
    Path | None,
    typer.Option(help="JSONL with `messages` in each line, or ShareGPT's JSON; default: built in."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N conversations.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Configuration, as `pools.cpu.threads=2`.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Turns; more than one is A B A B.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of each engine; default: the cores available.")
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw a picture, a PNG.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def authorization() -> dict[str, str]:
    """The header for a stack that asks for keys, from `MIRROR_SD_API_KEY`."""
    key = os.environ.get("MIRROR_SD_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def thread_count(asked: int | None) -> int:
    """The threads that an engine is given."""
    return asked or len(os.sched_getaffinity(0))


def one_of(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """The words of a comma list. Raises `typer.BadParameter` naming what is allowed."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not set(words) <= set(allowed):
        raise typer.BadParameter(f"takes a comma list of {', '.join(allowed)}", param_hint=option)
    return list(dict.fromkeys(words))


def precisions(text: str) -> list[str]:
    """The precisions of a comma list, which may be empty. Raises `typer.BadParameter`."""
    return one_of(text, get_args(Precision), "--precision") if text.strip() else []


def numbers(text: str, option: str) -> list[int]:
    """The positive numbers of a comma list. Raises `typer.BadParameter`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"{text!r} is not a comma list of positive numbers", param_hint=option
        )
    return sorted({int(word) for word in words})


def check_plot(out: Path | None) -> None:
    """Whether a picture can be drawn there, before what it shows is measured. Raises `SetupError`
    without matplotlib, `typer.BadParameter` where there is no such folder."""
    if out is None:
        return
    drawing.pyplot()
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--plot")


def encode(tokenizer: Tokenizer, chats: list[Messages]) -> list[tuple[int, ...]]:
    """The prompt ids of each conversation, by the model's chat template."""
    return [
        tuple(tokenizer.encode_chat([(m["role"], m["content"]) for m in chat])) for chat in chats
    ]


def fitting(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, config: Config, tokenizer: Tokenizer
) -> list[int]:
    """The places of the prompts after which the context has room for so many tokens of answer.

    Raises `ConfigError` where none has.
    """
    context = min(tokenizer.facts.max_context, config.model.max_context or sys.maxsize)
    kept = [place for place, ids in enumerate(prompts) if len(ids) + max_tokens <= context]
    if not kept:
        raise ConfigError(
            f"no prompt has at most {context - max_tokens} tokens, which the context of {context}"
            f" leaves with --max-tokens {max_tokens}"
        )
    return kept


def show(report: dict[str, Any], as_json: bool) -> None:
    """Print a report: one JSON object, or lines for a person."""
    if as_json:
        typer.echo(json.dumps(report))
        return
    for key, value in report.items():
        if isinstance(value, list):
            typer.echo(f"{key}: {len(value)}")
            for row in value:
                typer.echo("  " + "  ".join(f"{name}={item}" for name, item in row.items()))
        elif isinstance(value, dict):
            typer.echo(f"{key}:")
            for name, item in value.items():
                typer.echo(f"  {name}: {item}")
        else:
            typer.echo(f"{key}: {value}")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """The columns of the rows, aligned, for a person; `-` for None."""
    cells = [list(columns)]
    for row in rows:
        cells.append(["-" if row.get(name) is None else str(row[name]) for name in columns])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.rjust, line, widths)).rstrip() for line in cells)
    return "\n".join(lines)
