"""What `mirror-sd bench merge` reports, on a small data set of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mirror_sd import config as configuration
from mirror_sd.bench import merge
from mirror_sd.bench.cli import app
from mirror_sd.errors import ConfigError
from mirror_sd.scheduler import merge_profile

DATA = Path(__file__).parents[2] / "data" / "near_duplicates.jsonl"


class CharacterTokenizer:
    """A token for each character, roles included."""

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return [ord(c) for role, content in messages for c in f"<{role}>{content}"]


def report(*overrides: str) -> dict[str, Any]:
    config = configuration.load(overrides=["model.served_name=m", *overrides])
    tokenizer: Any = CharacterTokenizer()
    return merge.measure(merge.prepare(merge.read(DATA), config, tokenizer), config)


def test_identical_requests_coalesce_and_only_they() -> None:
    found = report()
    kinds = found["kinds"]
    assert found["coalesce"] == {"recall": 1.0, "precision": 1.0}
    assert {kind: row["in_flight_joined"] for kind, row in kinds.items() if kind != "exact"} == (
        dict.fromkeys(kinds.keys() - {"exact"}, 0)
    )


def test_nothing_that_differs_in_meaning_shares_an_answer_in_any_mode() -> None:
    found = report()
    assert found["violations"] == []
    for kind in ("digit_change", "negation", "different_tenant", "other_language"):
        row = found["kinds"][kind]
        assert row["in_flight_joined"] == row["finished_joined"] == row["sharing_joined"] == 0
    assert found["kinds"]["whitespace_case"]["sharing_joined"] == 5, "with the tenant's choice"


def test_what_is_alike_drafts_within_its_tenant_and_from_its_own_cluster() -> None:
    found = report()
    for kind in ("whitespace_case", "paraphrase_small", "digit_change"):
        row = found["kinds"][kind]
        assert row["in_flight_hinted"] == row["finished_hinted"] == row["pairs"]
        assert (row["recall"], row["precision"]) == (1.0, 1.0)
    assert found["hint"] == {"recall": 1.0, "precision": 1.0, "across_tenants": 0}
    assert found["kinds"]["different_tenant"]["finished_hinted"] == 0


def test_a_higher_threshold_finds_fewer() -> None:
    strict = report("merge.hint_similarity=0.99", "scheduler.similarity_threshold=0.99")
    assert strict["hint"]["recall"] < 1.0
    assert strict["kinds"]["paraphrase_small"]["in_flight_hinted"] == 0


def test_an_answer_shared_wrongly_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_profile, "partition_terms", lambda text: ())
    found = report()
    kinds = {violation["kind"] for violation in found["violations"]}
    assert kinds >= {"digit_change", "negation"}
    assert found["kinds"]["digit_change"]["precision"] < 1.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no line"),
        ("{}", "near.jsonl:1"),
        ('{"cluster": 1, "variant": "v1", "kind": "exact", "tenant": "a", "messages": []}', "base"),
    ],
)
def test_a_bad_data_set_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "near.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        merge.read(path)


def test_the_command_prints_one_object(default_model: Any) -> None:
    done = CliRunner().invoke(app, ["merge", "--dataset", str(DATA), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["violations"] == [] and found["lines"] == 39
