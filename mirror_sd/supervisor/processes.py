"""The commands of a stack's processes and the environment they are given."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

from mirror_sd.child import ChildSpec
from mirror_sd.config import Config
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import run_directory
from mirror_sd.supervisor.edge import Nginx, source_root

# -P: what lies in the caller's directory is not imported.
_PYTHON = (sys.executable, "-P", "-m")
# nginx gives idle connections up after 1 s, so the gateway is never the first to close one.
_KEEP_ALIVE_S = 75
_SILENT_WORKER_S = 60


def nginx_spec(run: RunDir, nginx: Nginx) -> ChildSpec:
    log = run_directory.logs(run) / "nginx.log"
    argv = [str(nginx.binary), "-p", f"{run.nginx}/", "-c", str(run.nginx / "nginx.conf")]
    return ChildSpec(
        name="nginx",
        argv=[*argv, "-e", str(log)],
        env=_environment(run, "nginx"),
        log=log,
        cwd=run.nginx,
        # QUIT lets running answers finish; TERM, which its workers obey as well, does not.
        stop_signal=signal.SIGQUIT,
        orphan_signal=signal.SIGTERM,
    )


def gateway_spec(config: Config, run: RunDir, index: int) -> ChildSpec:
    argv = [*_PYTHON, "gunicorn", "-k", "asgi", "--workers=1", "--no-control-socket"]
    argv += [f"--bind=unix:{run.gateway_socket(index)}", f"--keep-alive={_KEEP_ALIVE_S}"]
    argv += [f"--graceful-timeout={max(math.ceil(config.server.drain_s), 1)}"]
    argv += [f"--timeout={_SILENT_WORKER_S}", "--worker-connections=4096"]
    argv += [f"--worker-tmp-dir={run.path}"]
    argv += ["--logger-class=mirror_sd.supervisor.gunicorn_log.GunicornLog"]
    argv += ["mirror_sd.serving.gateway:create_app()"]
    return ChildSpec(
        name=f"gateway-{index}",
        argv=argv,
        env=_environment(run, "gateway", MIRROR_SD_GATEWAY_INDEX=str(index), GUNICORN_CMD_ARGS=""),
        log=run_directory.logs(run) / f"gateway-{index}.log",
        # gunicorn reads a gunicorn.conf.py where it is started.
        cwd=run.path,
        orphan_signal=signal.SIGQUIT,
    )


def broker_spec(run: RunDir) -> ChildSpec:
    return ChildSpec(
        name="broker",
        argv=[*_PYTHON, "mirror_sd.serving.broker"],
        env=_environment(run, "broker"),
        log=run_directory.logs(run) / "broker.log",
    )


def pool_spec(run: RunDir, device_class: str) -> ChildSpec:
    return ChildSpec(
        name=f"pool-{device_class}",
        argv=[*_PYTHON, "workers.pool", "--class", device_class],
        env=_environment(run, "pool", MIRROR_SD_CLASS=device_class),
        log=run_directory.logs(run) / f"pool-{device_class}.log",
    )


def drafter_spec(run: RunDir, device_class: str, index: int) -> ChildSpec:
    name = f"drafter-{device_class}-{index}"
    return ChildSpec(
        name=name,
        argv=[*_PYTHON, "workers.drafter", "--class", device_class, "--index", str(index)],
        env=_environment(run, "drafter", MIRROR_SD_CLASS=device_class),
        log=run_directory.logs(run) / f"{name}.log",
    )


def probe_spec(run: RunDir) -> ChildSpec:
    return ChildSpec(
        name="probe",
        argv=[*_PYTHON, "ops.probe"],
        env=_environment(run, "probe"),
        log=run_directory.logs(run) / "probe.log",
    )


def import_path() -> str:
    """PYTHONPATH for our children: this very source tree first, installed or not."""
    inherited = os.environ.get("PYTHONPATH")
    root = str(source_root())
    return f"{root}{os.pathsep}{inherited}" if inherited else root


def _environment(run: RunDir, role: str, **extra: str) -> dict[str, str]:
    return {
        "MIRROR_SD_CONFIG_JSON": str(run.config_json),
        "PROMETHEUS_MULTIPROC_DIR": str(run.metrics),
        "MIRROR_SD_ROLE": role,
        "PYTHONPATH": import_path(),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def log_of(spec: ChildSpec) -> Path:
    """The log file of a stack's child; each has one."""
    if spec.log is None:
        raise ValueError(f"{spec.name} has no log file")
    return spec.log
