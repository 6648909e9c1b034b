"""The file of API keys and the command that keeps it."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mirror_sd import key_cli
from mirror_sd.errors import SetupError
from mirror_sd.keys import KeyFile, Limits


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "new" / "keys.json")


def test_file_that_is_not_there_holds_no_keys(keys: KeyFile) -> None:
    assert keys.read() == []
    assert not keys.path.parent.exists()


def test_key_is_kept_as_its_digest_only_and_for_its_owner_alone(keys: KeyFile) -> None:
    key, text = keys.add("acme", "vip", Limits(concurrency=4, tokens_per_minute=1000))
    assert re.fullmatch(r"msd-[a-z2-7]{32}", text)
    stored = keys.path.read_text()
    assert text not in stored and text.removeprefix("msd-") not in stored
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    document = json.loads(stored)
    assert document["version"] == 1
    assert document["keys"] == [
        {
            "id": key.id,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tenant": "acme",
            "tier": "vip",
            "concurrency": 4,
            "requests_per_minute": None,
            "tokens_per_minute": 1000,
            "created": key.created,
            "revoked": False,
        }
    ]
    assert keys.read() == [key]


def test_revoked_key_stays_in_the_file(keys: KeyFile) -> None:
    first, _ = keys.add("acme", "vip")
    second, _ = keys.add("acme", "standard")
    keys.revoke(first.id)
    assert [(key.id, key.revoked) for key in keys.read()] == [(first.id, True), (second.id, False)]
    with pytest.raises(SetupError, match="no key 'k_none'"):
        keys.revoke("k_none")


def test_commands_at_once_lose_no_key(keys: KeyFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: keys.add(f"tenant-{n}", "standard")[0], range(24)))
    assert {key.id for key in keys.read()} == {key.id for key in made}
    left = [path.name for path in keys.path.parent.iterdir()]
    assert sorted(left) == ["keys.json", "keys.json.lock"]


@pytest.mark.parametrize(
    "tenant", ["", "two words", "x" * 65, "a\r\nX-Mirror-Tier: vip", "ä", ".a"]
)
def test_tenant_that_a_header_cannot_hold_is_refused(keys: KeyFile, tenant: str) -> None:
    with pytest.raises(SetupError, match="tenant"):
        keys.add(tenant, "standard")
    assert not keys.path.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a file of API keys"),
        ('{"version": 2, "keys": []}', "version 2"),
        ('{"version": 1}', "keys"),
        ('{"version": 1, "keys": [{"id": "k", "tenant": "a", "tier": "vip"}]}', "sha256"),
        (
            '{"version": 1, "keys": [{"id": "k", "sha256": "x", "tenant": "a", "tier": "vip"}]}',
            "64 hexadecimal",
        ),
        ('{"version": 1, "keys": [{"id": "k", "tenant": "a", "tier": "gold"}]}', "gold"),
    ],
)
def test_damaged_file_is_refused_and_left_as_it_is(keys: KeyFile, text: str, words: str) -> None:
    keys.path.parent.mkdir()
    keys.path.write_text(text)
    for attempt in (keys.read, lambda: keys.add("acme", "vip"), lambda: keys.revoke("k")):
        with pytest.raises(SetupError, match=words):
            attempt()
    assert keys.path.read_text() == text


def test_command_adds_lists_and_revokes(keys: KeyFile) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(key_cli.app, [*arguments, "--file", str(keys.path)])
        assert done.exit_code == 0, done.output
        return done.stdout

    text = run("add", "--tenant", "acme", "--tier", "vip", "--requests-per-minute", "60").strip()
    key = keys.read()[0]
    assert hashlib.sha256(text.encode()).hexdigest() == key.sha256
    listed = run("list")
    assert key.id in listed and "acme" in listed and "60 requests/min" in listed
    assert text not in listed and key.sha256 not in listed
    run("revoke", key.id)
    entries = json.loads(run("list", "--json"))
    assert entries[0]["revoked"] is True and "sha256" not in entries[0]
    assert "revoked" in run("list")


@pytest.mark.parametrize("limit", [0, -1, 2**53 + 1])
def test_limit_that_the_edge_would_refuse_is_not_written(keys: KeyFile, limit: int) -> None:
    with pytest.raises(SetupError, match="requests_per_minute"):
        keys.add("acme", "standard", Limits(requests_per_minute=limit))
    assert not keys.path.exists()


def test_unknown_tier_is_wrong_usage(keys: KeyFile) -> None:
    arguments = ["add", "--tenant", "a", "--tier", "gold", "--file", str(keys.path)]
    assert CliRunner().invoke(key_cli.app, arguments).exit_code == 2
