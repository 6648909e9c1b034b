"""A draft for another target stops the start; a damaged or a useless one costs no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mirror_sd import model_store
from mirror_sd.uir import draft_file
from tests.random_draft import program_of, spec_for
from tests.system.stack import MODEL, Stack, free_port, started

PROMPTS = (
    "The tides of the harbour: high 06:10, low 12:20, high 18:40, low 00:50; high 06:10, low",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "Write one sentence about a lamp:",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 77},
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        scratch = tmp_path_factory.mktemp("draft")
        spec = spec_for(model_store.resolve(MODEL), scratch / "tokenizer", **changes)
        path = scratch / "random.draft.safetensors"
        draft_file.write(path, program_of(spec, certainty=12.0))
        return path

    return make


def settings(path: Path) -> list[str]:
    return ["speculation.drafter=auto", f"speculation.draft={path}"]


def answer(http: httpx.Client, prompt: str, sampling: dict[str, Any], speculation: Any) -> Any:
    """Tokens with their log-probabilities: equality of these is equality bit for bit."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "logprobs": 1}
    reply = http.post("/v1/completions", json=body | sampling | {"speculation": speculation})
    assert reply.status_code == 200, reply.text
    scored = reply.json()["choices"][0]["logprobs"]
    return scored["tokens"], scored["token_logprobs"]


def assert_no_token_changes(stack: Stack, speculation: Any) -> None:
    with stack.http() as http:
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                plain = answer(http, prompt, sampling, "off")
                assert answer(http, prompt, sampling, speculation) == plain, (prompt, sampling)


def test_draft_for_another_tokenizer_is_refused_at_the_start_with_the_reason(
    draft: Callable[..., Path],
) -> None:
    path = draft(tokenizer="0" * 64, target="another-model")
    one = Stack()
    try:
        chosen = [part for item in settings(path) for part in ("--set", item)]
        done = one.cli("up", "--port", str(free_port()), *chosen)
        assert done.returncode == 1
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, done.stderr
        for words in (str(path), "another-model", "its tokenizer is another one than the target's"):
            assert words in lines[0]
        assert not one.run.exists()
    finally:
        one.destroy()


def test_damaged_draft_is_told_and_the_other_sources_draft_on(draft: Callable[..., Path]) -> None:
    path = draft()
    path.write_bytes(path.read_bytes()[:-5000])
    with started(settings(path)) as stack:
        assert str(path) in stack.log and "lookup and history" in stack.log
        assert stack.total("mirror_worker_draft_head") == 0
        assert "mirror_worker_draft_head{" in stack.metrics_text()
        assert_no_token_changes(stack, "auto")
        assert_no_token_changes(stack, {"source": "lookup", "max_tokens": 4})
        assert stack.total("mirror_worker_accepted_tokens_total") > 0


def test_draft_that_is_certain_and_wrong_changes_no_token(draft: Callable[..., Path]) -> None:
    with started(settings(draft())) as stack:
        assert stack.total("mirror_worker_draft_head") == 1
        assert_no_token_changes(stack, "auto")
        assert_no_token_changes(stack, {"source": "head", "max_tokens": 4})
        drafted = "mirror_worker_source_drafted_tokens_total"
        assert stack.total(drafted, source="head") > 0
        assert stack.total("mirror_worker_draft_head_failures_total") == 0
