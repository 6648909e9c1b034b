"""The benchmarks' own arithmetic and complaints, over a stand-in target (see `hash_target`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mirror_sd.bench import exactness, prompts
from mirror_sd.bench.cli import app
from mirror_sd.bench.decode import greedy, run_engine
from mirror_sd.bench.http import _stream_first
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, SetupError
from tests.unit.speculative.hash_target import HashTarget

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_on(target: HashTarget, min_tokens: int = 0) -> Engine:
    return Engine(
        target,
        EngineConfig(block_size=4, kv_cache_mb=512, prefill_chunk=16),
        SpeculationConfig(ngram_min=1, min_tokens=min_tokens),
        model_name="m",
        device_class="cpu",
        slots=16,
    )


class FickleTarget(HashTarget):
    """Gives other logits when it has company: what bit-stability rules out."""

    def forward(self, batch):
        logits = super().forward(batch)
        if len(batch.block_tables) > 1:
            logits = logits[:, ::-1].copy()
        return logits


def test_an_exact_engine_shows_no_flip():
    report = exactness.compare(engine_on(HashTarget(memory=1)), PROMPTS, max_tokens=30, stop=())
    assert report == {"prompts": 3, "tokens": 90, "flips": []}


def test_a_flip_is_reported_with_its_place_and_margin():
    report = exactness.compare(engine_on(FickleTarget()), PROMPTS, max_tokens=5, stop=())
    flip = report["flips"][0]
    assert flip["run"] == "plain, 16 at once" and flip["prompt"] == 0 and flip["token"] == 0
    assert flip["margin"] > 0
    assert {entry["run"] for entry in report["flips"]} == {
        "plain, 16 at once",
        "speculative, 16 at once",
    }


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_every_token_is_counted_once_whatever_runs_beside_it(concurrency):
    run = run_engine(
        engine_on(HashTarget()),
        PROMPTS,
        greedy(10, (), speculation=True),
        concurrency=concurrency,
    )
    assert [len(tokens) for tokens in run.tokens] == [10, 10, 10]
    assert len(run.usages) == 3 and all(first > 0 for first in run.first_s)
    assert run.rates().tokens == 30 and run.accepted_per_verify() >= 1


def test_the_built_in_prompts_can_be_limited():
    assert len(prompts.load(None)) == 16
    assert prompts.load(None, 2)[1][0]["role"] == "user"


BAD_LINES = [
    ("{", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"a": 1}', "neither `messages` nor `conversations`"),
    ("[1]", "a conversation is not an object"),
    ('{"messages": null}', "is a list of turns"),
    ('{"messages": "hi"}', "is a list of turns"),
    ('{"messages": []}', "is a list of turns"),
    ('{"messages": ["hi"]}', "a turn is not an object"),
    ('{"messages": [{"role": "user"}]}', "the text of a user turn is not text"),
    ('{"messages": [{"content": "hi"}]}', "the role None of a turn is not one of"),
    ('{"messages": [{"role": "user", "content": null}]}', "the text of a user turn is not text"),
    ('{"messages": [{"role": "user", "content": ["hi"]}]}', "the text of a user turn is not"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "the text of a user turn is not"),
    ('{"messages": [{"role": "assistant", "content": "hi"}]}', "nothing but answers"),
]


@pytest.mark.parametrize(("line", "says"), BAD_LINES)
def test_a_bad_data_set_is_named_with_its_line(tmp_path, line, says):
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n\n' + line)
    with pytest.raises(ConfigError, match=f"data.jsonl, line 3: .*{says}"):
        prompts.load(path)


def test_a_data_set_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"data.jsonl is not UTF-8"):
        prompts.load(path)


@pytest.mark.parametrize("text", ["", "\n \r\n"])
def test_a_data_set_without_a_line_is_named(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no conversation"):
        prompts.load(path)


def test_only_a_newline_ends_a_line_of_a_data_set(tmp_path):
    """JSON may hold the other ends of lines of Unicode as they are; editors add a mark."""
    text = "one\u2028two\x85three"
    line = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)
    path = tmp_path / "data.jsonl"
    path.write_bytes(f"\ufeff{line}\r\n{line}\r\n".encode())
    assert prompts.load(path) == [[{"role": "user", "content": text}]] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "1,256", "--contexts", "128,2048"], "256 new tokens are more than a context"),
        (["--contexts", "9000"], "context is 8192 tokens, 9000 are asked"),
        (["--contexts", "99999999999999"], "context is 8192 tokens, 99999999999999 are asked"),
        (["--threads", "1025"], "1025 threads; the native engine takes at most 1024"),
    ],
)
def test_a_forward_that_cannot_be_is_refused_in_a_sentence(default_model, arguments, says):
    result = CliRunner().invoke(app, ["forward", "--json", "--precision", "int8", *arguments])
    assert isinstance(result.exception, ConfigError) and says in result.exception.message
    assert result.stdout == ""


@pytest.mark.parametrize("wrong", ["of", "off,of", ","])
def test_an_unknown_drafter_is_refused(wrong):
    result = CliRunner().invoke(app, ["decode", "--drafters", wrong])
    assert result.exit_code == 2


def test_without_the_extension_a_forward_is_refused_in_a_sentence():
    code = """
import sys
sys.modules["mirror_sd._native"] = None  # an import of it fails
from mirror_sd import cli
sys.argv = ["mirror-sd", "bench", "forward", "--json"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the native engine, which is not built" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_without_a_stack_is_named(unused_tcp_port):
    with pytest.raises(SetupError, match=f"no stack answers on port {unused_tcp_port}"):
        _stream_first(unused_tcp_port, "m", [])


def test_a_missing_data_set_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the data"):
        prompts.load(tmp_path / "none.jsonl")
