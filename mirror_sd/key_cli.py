"""`mirror-sd key add|list|revoke`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mirror_sd.keys import Key, KeyFile

app = typer.Typer(
    no_args_is_help=True,
    help="API keys: tenants, tiers and limits. A running stack follows within a second.",
)

File = Annotated[
    Path | None, typer.Option("--file", help="File of the keys; default: server.keys_file.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML configuration.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: `mirror-sd key add --tenant acme --tier vip --concurrency 8`")
def add(
    tenant: Annotated[str, typer.Option(help="Whose it is; requests of a tenant share limits.")],
    tier: Annotated[str, typer.Option(metavar="vip|standard")] = "standard",
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and completion together.")
    ] = None,
    file: File = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only its digest is kept."""
    from mirror_sd.keys import Limits
    from mirror_sd.scheduler.ticket import TIERS

    if tier not in TIERS:
        raise typer.BadParameter("write vip or standard", param_hint="--tier")
    keys = _key_file(file, config)
    limits = Limits(concurrency, requests_per_minute, tokens_per_minute)
    key, text = keys.add(tenant, "vip" if tier == "vip" else "standard", limits)
    if as_json:
        typer.echo(json.dumps({"key": text, **_shown(key)}))
        return
    typer.echo(text)
    typer.echo(
        f"{key.id}: {tier} key of {tenant} in {keys.path}; it is shown only this once", err=True
    )


@app.command("list", epilog="Example: `mirror-sd key list --json`")
def list_keys(file: File = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the keys with their tenants and limits, without the keys themselves."""
    keys = _key_file(file, config)
    found = keys.read()
    if as_json:
        typer.echo(json.dumps([_shown(key) for key in found], indent=2))
        return
    if not found:
        typer.echo(f"{keys.path} holds no keys: the server is open, on the loopback address only")
    for key in found:
        limits = (
            (key.limits.concurrency, "at once"),
            (key.limits.requests_per_minute, "requests/min"),
            (key.limits.tokens_per_minute, "tokens/min"),
        )
        words = [f"{limit} {name}" for limit, name in limits if limit is not None]
        state = "revoked" if key.revoked else ", ".join(words) or "no limits"
        typer.echo(f"{key.id}  {key.tier:8}  {key.tenant:20}  {key.created}  {state}")


@app.command(epilog="Example: `mirror-sd key revoke k_1f2e3d4c`")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `key list` shows it.")],
    file: File = None,
    config: ConfigFile = None,
) -> None:
    """Refuse a key from now on."""
    key = _key_file(file, config).revoke(key_id)
    typer.echo(f"revoked {key.id} of {key.tenant}")


def _key_file(file: Path | None, config: Path | None) -> KeyFile:
    from mirror_sd import config as configuration
    from mirror_sd.keys import KeyFile

    return KeyFile(file or configuration.load(config).server.effective_keys_file)


def _shown(key: Key) -> dict[str, object]:
    return {name: value for name, value in key.to_json().items() if name != "sha256"}
