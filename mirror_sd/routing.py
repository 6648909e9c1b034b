"""What `mirror-sd route` tells: the edge's own decision, by the running stack or a bare nginx."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mirror_sd import config as configuration
from mirror_sd.admin_client import AdminClient, is_listening, stack_on
from mirror_sd.child import Child
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir

_START_S = 10.0
_POLL_S = 0.05


def explain(
    wish: Mapping[str, str | int | float], port: int, file: Path | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """The decision on `wish` (prompt_tokens, tier, tenant, perhaps qps), `{"class", "shares",
    "reasons"}`, and whether it is the stack's on `port`, which is asked unless a configuration is
    named. Raises `SetupError`."""
    if file is None and not overrides and _runs(port):
        return AdminClient.of_stack(port).get("/admin/route", wish), True
    with bare_edge(configuration.load(file, overrides)) as client:
        return client.get("/admin/route", wish), False


def in_words(decision: Mapping[str, Any], is_live: bool) -> Iterator[str]:
    """The lines for a person."""
    yield f"goes to {decision['class']}" + ("" if is_live else " (no stack runs: without any load)")
    shares = sorted(decision["shares"].items(), key=lambda item: -item[1])
    yield "shares: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)
    for reason in decision["reasons"]:
        yield f"- {reason}"


@contextmanager
def bare_edge(config: Config) -> Iterator[AdminClient]:
    """nginx with the configured classes and policy and nothing behind it."""
    # The supervisor's parts import psutil; a stack that runs is asked without them.
    from mirror_sd.supervisor import edge, processes, run_directory

    with tempfile.TemporaryDirectory(prefix="mirror-sd-") as directory:
        run = RunDir(Path(directory))
        settings = _on_free_ports(config)
        for path in (run.nginx, run_directory.logs(run)):
            path.mkdir()
        run_directory.write_admin_token(run)
        nginx = edge.find_nginx()
        child = Child(processes.nginx_spec(run, nginx))
        log = processes.log_of(child.spec)
        text = edge.render(settings, run, nginx, log)
        (run.nginx / "nginx.conf").write_text(text, encoding="utf-8")
        token = run.admin_token.read_text(encoding="ascii").strip()
        client = AdminClient(settings.server.effective_admin_port, token)
        try:
            child.start()
            _wait_until_it_answers(client, child, log)
            yield client
        finally:
            child.kill()


def _runs(port: int) -> bool:
    try:
        config, _ = stack_on(port)
    except SetupError:
        return False
    return is_listening(config)


def _on_free_ports(config: Config) -> Config:
    from mirror_sd.supervisor.preflight import free_ports

    public, admin = free_ports(2)
    changes = {"host": "127.0.0.1", "port": public, "admin_port": admin}
    return config.model_copy(update={"server": config.server.model_copy(update=changes)})


def _wait_until_it_answers(client: AdminClient, child: Child, log: Path) -> None:
    from mirror_sd.supervisor import edge

    deadline = time.monotonic() + _START_S
    while True:
        if child.reap() is not None:
            raise SetupError(f"nginx does not start: {edge.reason_in(log)}")
        try:
            client.get("/admin/policy")
        except SetupError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return
