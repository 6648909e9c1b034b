"""`mirror-sd route|policy|weights|emulate`: look into a stack's control plane, and turn it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Port = Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port of the stack.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML configuration, if no stack runs."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, if no stack runs."),
]
DEFAULT_PORT = 8080

policy_app = typer.Typer(no_args_is_help=True, help="The routing policy of a running stack.")


def register(app: typer.Typer) -> None:
    """Add the commands to `mirror-sd`."""
    app.command(
        epilog="Example: `mirror-sd route --prompt-tokens 30 --qps 10 --tier vip`",
    )(route)
    app.command(epilog="Example: `mirror-sd weights --port 8081`")(weights)
    app.command(
        epilog="Examples: `mirror-sd emulate --class gpu --temperature 86` · "
        "`mirror-sd emulate --class gpu --reset`",
    )(emulate)
    app.add_typer(policy_app, name="policy")


def route(
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Estimated length of the prompt.")],
    qps: Annotated[
        float | None, typer.Option(min=0, help="Requests a second; default: as measured now.")
    ] = None,
    tier: Annotated[str, typer.Option(metavar="vip|standard")] = "standard",
    tenant: Annotated[str, typer.Option(help="Whose request it is.")] = "default",
    port: Port = DEFAULT_PORT,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Explain to which device class such a request goes, and why.

    Asks the stack on the port; where none runs, the configured policy and classes without any load.
    """
    from mirror_sd import routing
    from mirror_sd.scheduler.ticket import TIERS

    if tier not in TIERS:
        raise typer.BadParameter("write vip or standard", param_hint="--tier")
    wish: dict[str, str | int | float] = {
        "prompt_tokens": prompt_tokens,
        "tier": tier,
        "tenant": tenant,
    }
    if qps is not None:
        wish["qps"] = qps
    decision, is_live = routing.explain(wish, port, config, overrides or ())
    if as_json:
        typer.echo(json.dumps(decision))
        return
    for line in routing.in_words(decision, is_live):
        typer.echo(line)


def weights(port: Port = DEFAULT_PORT) -> None:
    """Show the weight document that the probe posted last, as the edge has it."""
    typer.echo(json.dumps(_get(port, "/admin/weights"), indent=2))


@policy_app.command("show", epilog="Example: `mirror-sd policy show > policy.json`")
def show_policy(port: Port = DEFAULT_PORT) -> None:
    """Print the policy in force, as JSON that `policy put` takes."""
    typer.echo(json.dumps(_get(port, "/admin/policy"), indent=2))


@policy_app.command("put", epilog="Example: `mirror-sd policy put policy.json`")
def put_policy(
    file: Annotated[Path, typer.Argument(help="JSON, or a Lua table as *.lua; `-`: JSON, stdin.")],
    port: Port = DEFAULT_PORT,
) -> None:
    """Put a policy in force without a restart; a bad one is refused and the old one stays."""
    from mirror_sd.admin_client import JSON, LUA, AdminClient
    from mirror_sd.errors import SetupError

    try:
        text = (Path("/dev/stdin") if str(file) == "-" else file).read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror}") from error
    kind = LUA if file.suffix == ".lua" else JSON
    AdminClient.of_stack(port).put("/admin/policy", text, kind)
    typer.echo("the policy is in force")


def emulate(
    device_class: Annotated[str, typer.Option("--class", metavar="cpu|gpu|tpu")],
    temperature: Annotated[float | None, typer.Option(help="Degrees Celsius.")] = None,
    utilisation: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    memory_pressure: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    latency_factor: Annotated[
        float | None,
        typer.Option(min=0, max=1e4, help="Stretches each step; 1 is the profile's own."),
    ] = None,
    fault: Annotated[str | None, typer.Option(metavar="hang|crash|slow_start|none")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was set before.")] = False,
    port: Port = DEFAULT_PORT,
) -> None:
    """Set what an emulated device class of a running stack reports and suffers.

    What is not named stays as it was set before. `crash` ends the class's workers at each start
    until it is taken back.
    """
    from mirror_sd import emulation

    if fault not in (None, "none", *emulation.FAULTS):
        raise typer.BadParameter("write hang, crash, slow_start or none", param_hint="--fault")
    named: dict[str, Any] = {
        "temperature_c": temperature,
        "utilisation": utilisation,
        "memory_pressure": memory_pressure,
        "latency_factor": latency_factor,
        "fault": fault,
    }
    changes = {key: value for key, value in named.items() if value is not None}
    if fault == "none":
        changes["fault"] = None
    control = emulation.change(port, device_class, changes, is_reset=reset)
    typer.echo(f"{device_class}: {json.dumps(control)}")


def _get(port: int, path: str) -> Any:
    from mirror_sd.admin_client import AdminClient

    return AdminClient.of_stack(port).get(path)
