"""`mirror-sd up`: check, start, say `ready`, watch, stop; every exit leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from mirror_sd import draft_store, logs, model_store
from mirror_sd.child import Waker
from mirror_sd.config import Config, PoolConfig
from mirror_sd.errors import ModelError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import edge, preflight, run_directory
from mirror_sd.supervisor.background import is_detached
from mirror_sd.supervisor.run_directory import Claim
from mirror_sd.supervisor.stack import Stack
from mirror_sd.uir import stand_in_tokenizer, tokenizer_files

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Shell convention: 128 + SIGINT. Stopping a ready stack is a success, breaking its start is not.
INTERRUPTED = 130


def up(config: Config, announce: Callable[[str], None]) -> int:
    """Run a stack until a signal; `announce` is given the one line `ready URL`.

    Returns the exit status. Raises `SetupError` where it cannot start; then nothing is left.
    """
    claim = Claim(RunDir.of_port(config.server.port))
    try:
        _catch(_interrupt)
        return _run(config, claim, announce)
    except KeyboardInterrupt:
        _log.info("interrupted before anything was started")
        return INTERRUPTED
    finally:
        claim.release()


def _run(config: Config, claim: Claim, announce: Callable[[str], None]) -> int:
    run = claim.run
    nginx = edge.find_nginx()
    is_guarded = preflight.check_exposure(config)
    claim.acquire()
    preflight.check_ports(config.server)
    preflight.check_drafters(config)
    preflight.check_disk(run.path)
    found = lay_out_tokenizer(config, run)
    name = config.model.served_name or found
    run.config_json.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    run_directory.write_admin_token(run)
    error_log = run_directory.logs(run) / "nginx.log"
    text = edge.render(config, run, nginx, error_log, name)
    (run.nginx / "nginx.conf").write_text(text, encoding="utf-8")
    waker = Waker()
    waker.install()
    stack = Stack(config, run, nginx, wait=waker.wait)
    _catch(lambda *_: stack.stop())
    if not is_guarded:
        _log.info(
            "open: there are no API keys, so whoever is on this machine may use the server; "
            "`mirror-sd key add --tenant NAME` closes it"
        )
    return _serve(stack, config, name, announce)


def lay_out_tokenizer(config: Config, run: RunDir) -> str:
    """The tokenizer's files for the gateways, fetching the model where its weights are needed;
    returns the model's name."""
    if any(pool.engine != "emulated" for pool in config.pools.values()):
        files = preflight.find_model(config, _log.info)
    else:
        try:
            files = model_store.resolve(config.model.path)
        except ModelError as error:
            _log.warning("%s; all is emulated, so a small tokenizer stands in", error.message)
            return stand_in_tokenizer.export(config.model.path, run.tokenizer)
    tokenizer_files.export(files, run.tokenizer)
    draft_store.check(config, files, run.tokenizer / tokenizer_files.TOKENIZER)
    return files.name


def _serve(stack: Stack, config: Config, model: str, announce: Callable[[str], None]) -> int:
    was_ready = False
    try:
        _log.info("starting %s", _described(config))
        stack.start()
        stack.wait_until_ready(model)
        if not stack.is_stopping:
            was_ready = True
            announce(f"ready {url(config)}")
            if is_detached():
                leave_terminal(RunDir.of_port(config.server.port))
            stack.watch()
        _log.info("stopping; again to stop at once")
    finally:
        stack.end(at_once=not was_ready)
    _log.info("stopped")
    return 0 if was_ready else INTERRUPTED


def _described(config: Config) -> str:
    parts = ["nginx", _count(config.server.gateways, "gateway"), "the broker"]
    parts += [_count(pool.workers, _worker_noun(name, pool)) for name, pool in config.pools.items()]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _worker_noun(device_class: str, pool: PoolConfig) -> str:
    return f"{'emulated ' if pool.engine == 'emulated' else ''}{device_class} worker"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def url(config: Config) -> str:
    """Where a client on this machine reaches the stack."""
    host = config.server.reachable_host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def leave_terminal(run: RunDir) -> None:
    """Send all further output to the stack's own log, so that the caller's streams can close."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(
        run_directory.logs(run) / "supervisor.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logs.configure("supervisor")


def _catch(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
