"""What can be known to fail before anything is started, each as one sentence."""

from __future__ import annotations

import errno
import ipaddress
import logging
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

from mirror_sd import model_store
from mirror_sd.config import Config, ServerConfig
from mirror_sd.errors import ConfigError, ModelError, SetupError
from mirror_sd.keys import KeyFile
from mirror_sd.model_store import ModelFiles

_log = logging.getLogger(__name__)

# Sockets, logs, metrics and the tokenizer; a full disk would kill the metrics' memory maps.
NEEDED_MB = 64


def check_ports(server: ServerConfig) -> None:
    """Raises `SetupError` where the public or the admin port cannot be listened on."""
    admin = server.effective_admin_port
    if admin == server.port:
        raise ConfigError(f"server.admin_port: {admin} is server.port itself; name another")
    check_port(server.host, server.port)
    check_port("127.0.0.1", admin, "server.admin_port")


def check_drafters(config: Config) -> None:
    """Raises `SetupError` where a drafter cannot listen at its address or would draft for nobody.

    Where the configuration turns drafters off, that is only logged: none is started.
    """
    if not config.drafters:
        return
    if not config.speculation.asks_drafters:
        _log.warning(
            "no drafter is started: speculation.enabled is %s, speculation.drafter %s",
            str(config.speculation.enabled).lower(),
            config.speculation.drafter,
        )
        return
    from mirror_sd import planning
    from mirror_sd.drafting import addresses

    server = config.server
    plan = planning.splitter(config).plan()
    taken = {server.port: "server.port", server.effective_admin_port: "server.admin_port"}
    for name, drafter in config.drafters.items():
        if not addresses.verifiers_of(config, name, plan):
            raise ConfigError(
                f"drafters.{name} would draft for nobody: the pools are {', '.join(config.pools)};"
                f" name one of them in drafters.{name}.serves"
            )
        if drafter.address is None:
            continue
        setting = f"drafters.{name}.address"
        host, _, port = drafter.address.removeprefix("tcp://").rpartition(":")
        for number in range(int(port), int(port) + drafter.workers):
            if number in taken:
                raise ConfigError(f"{setting}: port {number} is that of {taken[number]}")
            taken[number] = setting
            check_port(host, number, setting, host_setting=setting)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on at this moment."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def check_port(
    host: str, port: int, setting: str = "--port", *, host_setting: str = "server.host"
) -> None:
    """Raises `SetupError` naming the holder of the port where it can be found."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host_setting}: {host!r} is not an address of this machine") from error
    with socket.socket(family, kind, protocol) as probe:
        # As nginx does, so that connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise SetupError(_why_not(error, host, port, setting)) from error


def _why_not(error: OSError, host: str, port: int, setting: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken{_holder(port)}; free it, or choose another by {setting}"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for root; choose one from 1024 on by {setting}"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr
        if listens and listens.port == port and connection.pid is not None:
            try:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f" by pid {connection.pid}"
    return ""


def check_exposure(config: Config) -> bool:
    """Whether clients need a key. Raises `SetupError` where anyone on the network could ask
    without one, and where the file of keys is damaged."""
    server = config.server
    keys = KeyFile(server.effective_keys_file).read()
    is_usable = any(not key.revoked for key in keys)
    if not is_usable and not is_loopback(server.host):
        raise SetupError(
            f"server.host is {server.host!r} but {server.effective_keys_file} has no key that is "
            "valid: anyone could use the server; make one by `mirror-sd key add --tenant NAME`, "
            "or listen on 127.0.0.1"
        )
    return bool(keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in found]
    # Of an empty name getaddrinfo makes the address that any other machine can reach.
    return bool(host) and all(address.is_loopback for address in addresses)


def check_disk(directory: Path) -> None:
    """Raises `SetupError` where the file system of `directory` is nearly full."""
    free_mb = shutil.disk_usage(directory).free >> 20
    if free_mb < NEEDED_MB:
        raise SetupError(
            f"{directory} has {free_mb} MB free; {NEEDED_MB} MB are needed "
            "(MIRROR_SD_RUN_DIR names another place)"
        )


def find_model(config: Config, report: Callable[[str], None]) -> ModelFiles:
    """The model's files; a registered one is pulled where it is missing or damaged.

    Raises `ModelError`.
    """
    ref = config.model.path
    if ref not in model_store.REGISTERED:
        return model_store.resolve(ref)
    try:
        return model_store.verify(ref)
    except ModelError:
        return model_store.pull(ref, report)
