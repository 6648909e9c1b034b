"""The command `mirror-sd`. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirror_sd import __version__, admin_cli, key_cli, logs, plan_cli
from mirror_sd.edge import cli as edge_cli
from mirror_sd.errors import MirrorError, SetupError

if TYPE_CHECKING:
    from mirror_sd.config import Config

DEFAULT_PORT = 8080
# What Ctrl-C makes of a command.
_INTERRUPTED = 130

app = typer.Typer(
    name="mirror-sd",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="An LLM server for mixed device classes, with lossless speculative decoding.",
    epilog="Begin with `mirror-sd up`, or without any server: `mirror-sd generate 'Hello'`.",
)
model_app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")
app.add_typer(model_app, name="model")
app.add_typer(key_cli.app, name="key")
admin_cli.register(app)
edge_cli.register(app)
plan_cli.register(app)

Port = Annotated[
    int,
    typer.Option("--port", "-p", min=1, max=65535, help="Port of the stack.", show_default=True),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML configuration (ops/config.yaml)."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one key, as `server.gateways=1`; repeatable."
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Write logs as JSON lines.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"mirror-sd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples: `mirror-sd up` · `mirror-sd up --port 8081 --set server.gateways=4` · "
    "`mirror-sd up --set model.path=/models/my-model --detach`"
)
def up(
    port: Annotated[
        int | None,
        typer.Option(
            "--port", "-p", min=1, max=65535, help="Port to serve on; default: server.port, 8080."
        ),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; the stack runs on.")
    ] = False,
    log_json: LogJson = False,
) -> None:
    """Start nginx, gateways, broker and workers; stop them all by Ctrl-C.

    Prints one line, `ready URL`, on standard output when a generation has passed through all of
    them; progress and errors go to standard error.
    """
    if log_json:
        os.environ[logs.ENV_JSON] = "1"
    logs.configure("supervisor", is_console=True)
    settings = _load_config(config, overrides, port)
    from mirror_sd.supervisor import background, foreground

    if detach and not background.is_detached():
        raise typer.Exit(background.up_detached(settings.server.port, typer.echo))
    raise typer.Exit(foreground.up(settings, typer.echo))


@app.command(epilog="Example: `mirror-sd down --port 8081`")
def down(port: Port = DEFAULT_PORT) -> None:
    """Stop the stack on a port: running answers get a few seconds to finish."""
    from mirror_sd.supervisor import background

    background.down(port)
    typer.echo(f"stopped the stack on port {port}")


@app.command(
    epilog="Examples: `mirror-sd status` · `mirror-sd status --watch` · "
    "`mirror-sd status --port 8081 --json`"
)
def status(
    port: Port = DEFAULT_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again each second, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the classes and processes of a stack, and what runs and waits in it.

    The keys of the JSON object: processes (role, pid, rss_mb, class, of workers also peak_mb and
    allocator), running, waiting, kv_blocks_used, kv_blocks_free, kv_blocks_peak, workers, classes
    (class, emulated, workers, slots, in_flight, queued, oldest_wait_s, temperature_c, utilisation,
    memory_pressure, factor, weight), degrade_level, weights_age_s, weights_stale, draining.
    Null is what nobody tells now.
    """
    from mirror_sd import status_table
    from mirror_sd.supervisor import stack_status

    if as_json and is_watching:
        raise typer.BadParameter("not with --json", param_hint="--watch")
    if is_watching:
        status_table.watch(lambda: stack_status.status(port))
        return
    document = stack_status.status(port)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        status_table.show(document)


@app.command(
    epilog="Examples: `mirror-sd generate 'What is a mutex?' --stats` · "
    "`echo 'Write a haiku.' | mirror-sd generate - --temperature 0.8 --seed 7`"
)
def generate(
    text: Annotated[str, typer.Argument(help="What to ask; `-` reads standard input.")],
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; default: 256.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0: the most likely token each time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from this much probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest; 0: all.")] = 0,
    seed: Annotated[
        int | None,
        typer.Option(min=-(2**63), max=2**64 - 1, help="The same seed gives the same answer."),
    ] = None,
    speculation: Annotated[
        str, typer.Option(metavar="on|off", help="Draft and verify; the answer is the same.")
    ] = "on",
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Name, Hugging Face directory or .gguf file.")
    ] = None,
    precision: Annotated[str | None, typer.Option(metavar="auto|fp32|bf16|fp16|int8")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer TEXT in this one process, without any server, as a stream to the terminal."""
    if speculation not in ("on", "off"):
        raise typer.BadParameter("write on or off", param_hint="--speculation")
    if top_p <= 0:
        raise typer.BadParameter(f"{top_p} is not above 0", param_hint="--top-p")
    logs.configure("generate", level=os.environ.get(logs.ENV_LEVEL) or "WARNING")
    named = {"model.path": model, "pools.cpu.precision": precision}
    more = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    settings = _load_config(config, [*(overrides or []), *more], None)
    from mirror_sd import offline

    request = offline.Request(
        text=offline.open_input().read() if text == "-" else text,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        speculation=speculation == "on",
        is_raw=raw,
    )
    summary = offline.generate(settings, request, offline.to_terminal)
    if stats:
        typer.echo(summary.describe(), err=True)


@model_app.command("pull", epilog="Example: `mirror-sd model pull smollm2-135m-instruct`")
def pull(
    name: Annotated[str | None, typer.Argument(help="Default: the configured model.")] = None,
) -> None:
    """Fetch a registered model into the cache (`$MIRROR_SD_CACHE` or ~/.cache/mirror-sd)."""
    from mirror_sd import model_store

    wanted = name or _load_config(None, None, None).model.path
    model_store.pull(wanted, lambda line: typer.echo(line, err=True))


@model_app.command("list")
def list_models() -> None:
    """List the models that `pull` knows, and where those in the cache are."""
    from mirror_sd import model_store

    for model in model_store.available():
        where = model.path if model.path is not None else "not pulled"
        typer.echo(f"{model.name:28} {model.size_bytes >> 20:6d} MB  {where}")


@app.command(
    "bench",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure speed and exactness; `mirror-sd bench --help` lists the measurements."""
    import importlib.util

    if importlib.util.find_spec("mirror_sd.bench.cli") is None:
        raise SetupError("this installation has no mirror_sd.bench")
    module = importlib.import_module("mirror_sd.bench.cli")
    _run_nested(module.app, context, "mirror-sd bench")


@app.command(
    "distil",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def distil(context: typer.Context) -> None:
    """Train a draft head for a model; `mirror-sd distil --help` lists the options."""
    from mirror_sd.training import cli as training_cli

    _run_nested(training_cli.app, context, "mirror-sd distil")


@app.command(
    "convert",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def convert(context: typer.Context) -> None:
    """Write a model in another number format; `mirror-sd convert --help` lists the options."""
    from mirror_sd.conversion import cli as conversion_cli

    _run_nested(conversion_cli.app, context, "mirror-sd convert")


def _run_nested(nested: Any, context: typer.Context, name: str) -> None:
    """Its status is ours: inside another, an app returns it in place of ending with it."""
    status = nested(args=context.args, prog_name=name, standalone_mode=False)
    if status == _INTERRUPTED:
        typer.echo("mirror-sd: interrupted", err=True)
    if status:
        raise typer.Exit(status)


def _load_config(file: Path | None, overrides: list[str] | None, port: int | None) -> Config:
    from mirror_sd import config

    items = list(overrides or [])
    if port is not None:
        items.append(f"server.port={port}")
    return config.load(file, items)


def main() -> None:
    """The entry point: a `MirrorError` becomes one sentence and status 1, bad usage status 2."""
    try:
        app(args=edge_cli.completed(sys.argv[1:]), prog_name="mirror-sd")
    except MirrorError as error:
        typer.echo(f"mirror-sd: {error.message}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of a pipe has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)


if __name__ == "__main__":
    main()
