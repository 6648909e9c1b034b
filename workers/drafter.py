"""One drafter process: a model that drafts for the verifiers of other device classes.

    worker --Hello, Update--> drafter --Ready, Refused, Proposals--> worker

Started by the supervisor as `python -m workers.drafter --class cpu --index 0` for each worker of
`drafters.cpu`. Nobody depends on it: where it is gone, verifiers draft by themselves.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from mirror_sd import logs, openmp
from mirror_sd.child import CANNOT_START, die_with_parent
from mirror_sd.config import Config
from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.drafting import addresses
from mirror_sd.drafting.server import DraftServer
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir, from_run_dir
from workers.pool import chosen_cores, share_of_cores

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's entry; the configuration comes from the run directory."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.drafter", description="A drafter; the supervisor starts it."
    )
    parser.add_argument("--class", dest="device_class", required=True, metavar="CLASS")
    parser.add_argument("--index", type=int, default=0, help="place among those of its class")
    options = parser.parse_args(arguments)
    name = f"drafter-{options.device_class}-{options.index}"
    try:
        logs.configure(name)
        die_with_parent(signal.SIGKILL, os.getppid())
        config, run_dir = from_run_dir()
        server = load(config, run_dir, options.device_class, options.index)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        server.run(run_dir.drafter_ready(options.device_class, options.index))
    except SetupError as error:
        _log.error("%s cannot start: %s", name, error.message)
        return CANNOT_START
    return 0


def load(config: Config, run_dir: RunDir, device_class: str, index: int) -> DraftServer:
    """Pins the process and loads the model; raises `ConfigError` or `ModelError`."""
    settings = config.drafter(device_class)
    threads = _pin(settings, device_class, index)
    begin = time.monotonic()
    from mirror_sd.drafting import loading

    engine, tokenizer = loading.load(config, device_class, threads)
    abilities = engine.capabilities
    _log.info(
        "drafting on %s %s (%s), loaded in %.1f s",
        abilities.name,
        abilities.precision,
        abilities.device,
        time.monotonic() - begin,
    )
    return DraftServer(
        engine,
        addresses.endpoint(config, run_dir, device_class, index),
        tokenizer=tokenizer,
        device_class=device_class,
    )


def _pin(settings: DrafterConfig, device_class: str, index: int) -> int:
    """Pin this process; the threads of its forwards."""
    cores = chosen_cores(settings.cores, f"drafters.{device_class}.cores")
    share = share_of_cores(cores, settings.workers, index)
    if settings.cores is not None:
        os.sched_setaffinity(0, share)
    threads = settings.threads or len(share)
    for name, value in openmp.environment(threads).items():
        os.environ.setdefault(name, value)
    return threads


if __name__ == "__main__":
    sys.exit(main())
