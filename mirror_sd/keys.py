"""API keys: who may ask, as which tenant and tier, and how much.

The file holds SHA-256 digests only. A key is 160 random bits, so a plain digest cannot be guessed
back, and the edge can look it up for each request. The key itself is shown once, when it is made.
The edge reads the file again when it has changed, so a running stack follows `add` and `revoke`.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mirror_sd.errors import SetupError
from mirror_sd.scheduler.ticket import TIERS

VERSION = 1
Tier = Literal["vip", "standard"]
_PREFIX = "msd-"
_SECRET_BYTES = 20
# It goes into a header and into labels of metrics.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# The edge counts in doubles.
_LIMIT_MAX = 2**53


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit. Minutes slide; tokens are prompt and completion together."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def check(self) -> None:
        """Raises `SetupError` naming the limit that no request could meet."""
        for name in ("concurrency", "requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or not 1 <= limit <= _LIMIT_MAX):
                raise SetupError(
                    f"{name} is {limit!r}; a limit is a whole number from 1 to {_LIMIT_MAX}"
                )


@dataclass(frozen=True, slots=True)
class Key:
    """What the file says of one key; `sha256` is the hex digest of the key's text."""

    id: str
    sha256: str
    tenant: str
    tier: Tier
    limits: Limits
    created: str
    revoked: bool = False

    def to_json(self) -> dict[str, Any]:
        """Its entry in the file."""
        return {
            "id": self.id,
            "sha256": self.sha256,
            "tenant": self.tenant,
            "tier": self.tier,
            "concurrency": self.limits.concurrency,
            "requests_per_minute": self.limits.requests_per_minute,
            "tokens_per_minute": self.limits.tokens_per_minute,
            "created": self.created,
            "revoked": self.revoked,
        }


class KeyFile:
    """The keys of one server. A file that is not there holds none.

    Every method raises `SetupError` where the file is damaged, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Key]:
        """All keys, the revoked ones too, oldest first."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"cannot read the API keys in {self.path}: {error}") from error
        try:
            document = json.loads(text)
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']!r} is not {VERSION}")
            return [_key_of(entry) for entry in document["keys"]]
        except (ValueError, KeyError, TypeError, RecursionError, SetupError) as error:
            raise SetupError(f"{self.path} is not a file of API keys: {error}") from error

    def add(self, tenant: str, tier: Tier, limits: Limits | None = None) -> tuple[Key, str]:
        """A new key and its text, which is kept nowhere."""
        limits = limits or Limits()
        _check(tenant, tier)
        limits.check()
        text = _PREFIX + base64.b32encode(secrets.token_bytes(_SECRET_BYTES)).decode().lower()
        digest = hashlib.sha256(text.encode()).hexdigest()
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._locked():
            keys = self.read()
            key = Key(_free_id(keys), digest, tenant, tier, limits, created)
            self._write([*keys, key])
        return key, text

    def revoke(self, key_id: str) -> Key:
        """Refuse a key from now on. A revoked key stays in the file, so revoking the last one does
        not open the server."""
        with self._locked():
            keys = self.read()
            found = next((key for key in keys if key.id == key_id), None)
            if found is None:
                raise SetupError(f"{self.path} has no key {key_id!r}; see `mirror-sd key list`")
            revoked = _key_of({**found.to_json(), "revoked": True})
            self._write([revoked if key.id == key_id else key for key in keys])
        return revoked

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two commands at once must not lose each other's change. The lock is a file beside it:
        the file itself is replaced."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"cannot write {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, keys: list[Key]) -> None:
        text = json.dumps({"version": VERSION, "keys": [key.to_json() for key in keys]}, indent=2)
        temporary = None
        try:
            # mkstemp makes it 0600.
            number, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".keys-")
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    Path(temporary).unlink()
            raise SetupError(f"cannot write {self.path}: {error.strerror}") from error


def _free_id(keys: list[Key]) -> str:
    taken = {key.id for key in keys}
    while (name := f"k_{secrets.token_hex(4)}") in taken:
        pass
    return name


def _check(tenant: object, tier: object) -> None:
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise SetupError(
            f"tenant {tenant!r}: a name has 1 to 64 letters, digits, dots, dashes or underscores, "
            "a letter or digit first"
        )
    if tier not in TIERS:
        raise SetupError(f"tier {tier!r}: it is one of {', '.join(TIERS)}")


def _key_of(entry: dict[str, Any]) -> Key:
    """Raises `SetupError`, `KeyError` or `TypeError` where the entry is not one of a key."""
    _check(entry["tenant"], entry["tier"])
    limits = Limits(
        entry.get("concurrency"), entry.get("requests_per_minute"), entry.get("tokens_per_minute")
    )
    limits.check()
    key = Key(
        id=entry["id"],
        sha256=entry["sha256"],
        tenant=entry["tenant"],
        tier=entry["tier"],
        limits=limits,
        created=entry.get("created", ""),
        revoked=entry.get("revoked", False),
    )
    if not isinstance(key.sha256, str) or not _DIGEST.fullmatch(key.sha256):
        raise SetupError(f"the sha256 of key {key.id!r} is not 64 hexadecimal digits")
    if not isinstance(key.id, str) or not isinstance(key.revoked, bool):
        raise SetupError(f"the id or `revoked` of key {key.id!r} is of the wrong type")
    return key
