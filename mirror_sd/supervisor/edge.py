"""nginx: which binary, whether it has Lua, and its configuration from the template."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import mirror_sd
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor.preflight import is_loopback

_CANDIDATES = (
    "/usr/sbin/nginx",
    "/usr/local/sbin/nginx",
    "/usr/local/openresty/nginx/sbin/nginx",
    "/usr/local/openresty/bin/openresty",
)
_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
_PLAIN_NAME = re.compile(r"[\w.:/+@-]+")
_GATEWAY_GRACE_S = 10
_BODY_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Nginx:
    """An nginx that can run Lua; `modules` are to be loaded, empty where Lua is built in."""

    binary: Path
    modules: tuple[Path, ...]


def find_nginx(environ: Mapping[str, str] | None = None) -> Nginx:
    """`$MIRROR_SD_NGINX`, else nginx or openresty where they are usually installed.

    Raises `SetupError` where there is none, or none with Lua.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("MIRROR_SD_NGINX")
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise SetupError(f"MIRROR_SD_NGINX: {named} cannot be executed")
        return _with_lua(Path(found))
    candidates = (shutil.which("openresty"), shutil.which("nginx"), *_CANDIDATES)
    binary = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    if binary is None:
        raise SetupError("nginx is not installed: run ops/up, or install nginx with its Lua module")
    return _with_lua(Path(binary))


def _with_lua(binary: Path) -> Nginx:
    try:
        answer = subprocess.run(
            [binary, "-V"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"{binary} -V does not work: {error}") from error
    described = answer.stderr + answer.stdout
    if "openresty" in described or re.search(
        r"--add-module=\S*(ngx_lua|lua-nginx-module)", described
    ):
        return Nginx(binary, ())
    named = re.search(r"--modules-path=(\S+)", described)
    directories = [named[1]] if named else []
    for directory in map(
        Path, (*directories, "/usr/lib/nginx/modules", "/usr/share/nginx/modules")
    ):
        modules = tuple(directory / name for name in _MODULES)
        if all(module.is_file() for module in modules):
            return Nginx(binary, modules)
    raise SetupError(
        f"{binary} has no Lua module: run ops/up, or install libnginx-mod-http-lua "
        "(on Debian) or OpenResty"
    )


def source_root() -> Path:
    """Where `openresty/` and `workers/` lie: the clone of the project."""
    return Path(mirror_sd.__file__).resolve().parent.parent


def policy_file(config: Config) -> Path:
    """The routing policy: `server.policy_file`, else the one that comes with the project."""
    named = config.server.policy_file
    if named is None:
        return source_root() / "openresty" / "lua" / "mirror" / "policy.lua"
    return Path(named).expanduser().absolute()


def render(config: Config, run: RunDir, nginx: Nginx, error_log: Path, model: str = "") -> str:
    """The text of nginx.conf; `model` is the name that is served. Raises `SetupError` where the
    template cannot be used."""
    openresty = source_root() / "openresty"
    gateways = [f"unix:{run.gateway_socket(index)}" for index in range(config.server.gateways)]
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    values = {
        "load_modules": "\n".join(f'load_module "{module}";' for module in nginx.modules),
        # As root nginx would give its workers to `nobody`, who may not open the sockets.
        "user_line": "user root;" if os.getuid() == 0 else "",
        "run_dir": str(run.path),
        "error_log": f'"{error_log}" warn',
        "access_log": "off",
        "lua_path": f"{openresty}/lua/?.lua;;",
        "lua_cpath": ";;",
        "html_dir": str(openresty / "html"),
        "listen": f"{host}:{config.server.port}",
        "admin_listen": f"127.0.0.1:{config.server.effective_admin_port}",
        "admin_token_file": str(run.admin_token),
        "policy_file": str(policy_file(config)),
        "keys_file": str(config.server.effective_keys_file.absolute()),
        "may_be_open": "true" if is_loopback(config.server.host) else "false",
        "gateway_servers": ",".join(gateways),
        "classes": ",".join(config.pools),
        # A name that the file cannot hold shares its rates with bodies that name no model.
        "models": model if _PLAIN_NAME.fullmatch(model) else "",
        "max_body_bytes": str(config.server.max_body_bytes),
        "body_timeout_s": str(_BODY_TIMEOUT_S),
        # The gateway ends an overdue request itself, with the right error; nginx must not be first.
        "request_timeout_s": str(math.ceil(config.server.request_timeout_s) + _GATEWAY_GRACE_S),
    }
    path = openresty / "nginx.conf.template"
    try:
        return Template(path.read_text(encoding="utf-8")).substitute(values)
    except OSError as error:
        raise SetupError(
            f"cannot read {path} ({error.strerror}): run from a clone of the project"
        ) from error
    except (KeyError, ValueError) as error:
        raise SetupError(f"{path} has a placeholder that nothing fills: {error}") from error


def reason_in(log: Path) -> str:
    """Why nginx ended: the first error in its log, without its time and the trace of the stack."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((line for line in lines if "error: " in line or "[emerg]" in line), "")
    told = found.rpartition("error: ")[2] or found
    return re.sub(r"^\S+\.lua:\d+: ", "", told).strip() or "it says nothing"
