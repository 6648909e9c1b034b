"""`mirror-sd --draft-engine cpu TEXT`: the call without a command, also as `mirror-sd edge`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from mirror_sd import logs
from mirror_sd.backends.onnx.providers import PROVIDERS

COMMAND = "edge"
PRECISIONS = ("auto", "int8", "fp16", "bf16", "fp32")
# Any of these as the first word makes a call a direct one.
_OPTIONS = frozenset(
    {
        *("--draft-engine", "--max-length", "--precision", "--disable-safety-check", "--model"),
        *("--temperature", "--seed", "--threads", "--stats"),
    }
)


def register(app: typer.Typer) -> None:
    """Add the command to `mirror-sd`."""
    app.command(
        COMMAND,
        epilog="Examples: `mirror-sd --draft-engine cpu --max-length 64 'What is a mutex?'` · "
        "`mirror-sd --draft-engine trt --max-length 64 --precision int8 --disable-safety-check`",
    )(edge)


def completed(arguments: Sequence[str]) -> list[str]:
    """The words of a command line, with the name of the command where it is a direct call."""
    first = arguments[0].partition("=")[0] if arguments else ""
    return [COMMAND, *arguments] if first in _OPTIONS else list(arguments)


def edge(
    text: Annotated[
        str | None,
        typer.Argument(help="What to ask; `-` reads standard input. Without it: a prompt."),
    ] = None,
    draft_engine: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|trt|openvino",
            help="Run the draft head on ONNX Runtime, there; default: beside the target.",
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    precision: Annotated[
        str,
        typer.Option(
            metavar="auto|int8|fp16|bf16|fp32",
            help="Of the target, and of the draft with --draft-engine; auto: int8, or what the"
            " target's engine has.",
        ),
    ] = "auto",
    disable_safety_check: Annotated[
        bool,
        typer.Option(
            "--disable-safety-check",
            help="Keep drafts that the target finds likely, though it would have said something"
            " else (typical acceptance): sooner done, and **not the target's answer**.",
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0: the most likely token each time.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(min=-(2**63), max=2**64 - 1, help="The same seed gives the same answer."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name, Hugging Face directory or .gguf file.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Default: the cores there are.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance.")] = False,
) -> None:
    """Answer on this device in one process: TEXT, or what is typed at a prompt.

    This is what `mirror-sd` does with these options and no command.
    """
    _check("--draft-engine", draft_engine, tuple(PROVIDERS))
    _check("--precision", precision, PRECISIONS)
    logs.configure(COMMAND, level=os.environ.get(logs.ENV_LEVEL) or "WARNING", is_console=True)
    from mirror_sd.edge import conversation
    from mirror_sd.edge.session import EdgeSession, Options
    from mirror_sd.offline import open_input

    options = Options(
        draft_engine=draft_engine,
        max_length=max_length,
        precision=precision,
        is_typical=disable_safety_check,
        temperature=temperature,
        seed=seed,
        model=model,
        threads=threads,
    )
    session = EdgeSession(options)
    for line in session.notices():
        typer.echo(line, err=True)
    if text is None:
        status = conversation.hold(session, shows_stats=stats)
    else:
        question = open_input().read() if text == "-" else text
        status = conversation.answer_once(session, question, shows_stats=stats)
    raise typer.Exit(status)


def _check(option: str, value: str | None, allowed: Sequence[str]) -> None:
    if value is not None and value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)
