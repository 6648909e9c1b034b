"""`mirror-sd plan`: who takes which part of the work, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mirror_sd.admin_cli import DEFAULT_PORT, AsJson, ConfigFile, Overrides, Port


def register(app: typer.Typer) -> None:
    """Add the command to `mirror-sd`."""
    app.command(
        epilog="Examples: `mirror-sd plan` · `mirror-sd plan --qps 20 --json` · "
        "`mirror-sd plan --policy > policy.json`, then `mirror-sd policy put policy.json`",
    )(plan)


def plan(
    qps: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Requests a second; default: as measured now."),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e9, help="Mean prompt; default: as measured, or 200."),
    ] = None,
    answer_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e9, help="Mean answer; default: as measured, or 128."),
    ] = None,
    port: Port = DEFAULT_PORT,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    as_policy: Annotated[
        bool, typer.Option("--policy", help="Print the routing policy with the plan's shares.")
    ] = False,
) -> None:
    """Shares of the classes, drafters for verifiers, draft lengths, and the reasons.

    Goes by what the workers of the stack on the port have measured; where none runs, by what is
    expected of the configured devices.
    """
    from mirror_sd import planning
    from mirror_sd.admin_client import AdminClient
    from mirror_sd.errors import SetupError

    if as_json and as_policy:
        raise typer.BadParameter("not with --json", param_hint="--policy")
    named = {
        "requests_per_s": qps,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
    }
    wish = {key: value for key, value in named.items() if value is not None}
    report = planning.explain(wish, port, config, overrides or ())
    if as_policy:
        if not report.is_live:
            raise SetupError("--policy changes the policy of a running stack; none was asked")
        policy = AdminClient.of_stack(port).get("/admin/policy")
        typer.echo(json.dumps(report.policy(policy), indent=2))
    elif as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        for line in planning.in_words(report):
            typer.echo(line)
