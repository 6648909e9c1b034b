"""The call without a command, each a process of its own."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mirror_sd.edge.cli import completed

ROOT = Path(__file__).resolve().parents[3]
# Runs the command line, and at its end says how much memory was resident at most. Not by
# getrusage, whose maximum a child begins with at that of its parent.
MEASURED = """
import atexit, sys
from pathlib import Path
from mirror_sd.cli import main
@atexit.register
def tell():
    status = Path("/proc/self/status").read_text()
    sys.stderr.write(status[status.index("VmHWM:"):].splitlines()[0])
main()
"""


def call(
    *words: str, code: str = "from mirror_sd.cli import main; main()", stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        input=stdin,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--draft-engine", "cpu", "Hello"], ["edge", "--draft-engine", "cpu", "Hello"]),
        (["--max-length=9"], ["edge", "--max-length=9"]),
        (["edge", "--stats"], ["edge", "--stats"]),
        (["--version"], ["--version"]),
        (["--help"], ["--help"]),
        (["generate", "--max-tokens", "9"], ["generate", "--max-tokens", "9"]),
        (["-x"], ["-x"]),
        ([], []),
    ],
)
def test_options_of_its_own_make_a_call_a_direct_one(
    words: Sequence[str], expected: Sequence[str]
) -> None:
    assert completed(words) == expected


def test_help_names_every_option_and_says_what_is_lost() -> None:
    shown = call("--draft-engine", "cpu", "--help").stdout
    for word in ("--max-length", "--precision", "--disable-safety-check", "--temperature", "trt"):
        assert word in shown
    assert "not the target's answer" in shown
    assert "edge" in call("--help").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--draft-engine", "npu", "x"), "'npu' is not one of cpu, cuda, trt, openvino"),
        (("--precision", "int4", "x"), "'int4' is not one of auto, int8, fp16, bf16, fp32"),
        (("--max-length", "0", "x"), "--max-length"),
        (("--draft-engine", "cpu", "x", "y"), "unexpected extra argument"),
        (("--draft-engine", "cpu", "--colour", "x"), "No such option"),
        (("--draft-engine",), "requires an argument"),
    ],
)
def test_bad_usage_ends_with_status_2_and_says_what_is_allowed(
    words: Sequence[str], says: str
) -> None:
    done = call(*words)
    assert done.returncode == 2 and says in " ".join(done.stderr.split()), done.stderr
    assert not done.stdout


def test_an_absent_provider_fails_with_what_to_install() -> None:
    words = ("--draft-engine", "trt", "--max-length", "64", "--precision", "int8")
    done = call(*words, "--disable-safety-check")
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r"mirror-sd: 'trt' needs .*onnxruntime-gpu tensorrt.*\n", done.stderr)


def test_an_unknown_model_fails_with_a_sentence() -> None:
    done = call("--model", "no-such-model", "Hello")
    assert done.returncode == 1 and done.stderr.startswith("mirror-sd: ")
    assert "Traceback" not in done.stderr


def test_the_default_model_answers_in_less_than_700_mb() -> None:
    words = ("--draft-engine", "cpu", "--max-length", "16", "--disable-safety-check", "--stats")
    done = call(*words, "What is a mutex?", code=MEASURED)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5
    assert "the safety check is off" in done.stderr and "may differ" in done.stderr
    assert re.search(r"16 tokens, .* tokens are not the model's own choice", done.stderr)
    peak_kb = int(done.stderr.rpartition("VmHWM:")[2].split()[0])
    assert peak_kb < 700 * 1024


class Terminal:
    """A call that sees a terminal, and what it wrote there."""

    def __init__(self, *words: str) -> None:
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mirror_sd.cli", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        self._screen = ours
        os.set_blocking(ours, False)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, pattern: str, timeout_s: float = 150) -> None:
        """Until what came since the last wait matches."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.shown, re.DOTALL)):
            has_ended = self._process.poll() is not None
            late = has_ended or time.monotonic() > deadline
            self._read()
            assert not late or re.search(pattern, self.shown, re.DOTALL), self.shown
            time.sleep(0.02)
        self.shown = self.shown[match.end() :]

    def _read(self) -> None:
        try:
            self.shown += os.read(self._screen, 65536).decode("utf-8", "replace")
        except BlockingIOError:
            pass
        except OSError:  # the other side is closed
            self._process.wait(10)

    def ended(self, timeout_s: float = 30) -> int:
        return self._process.wait(timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)


def test_at_a_prompt_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation() -> None:
    terminal = Terminal("--max-length", "200", "--stats")
    try:
        terminal.wait_for("draft head: native.*Ctrl-D.*> ")
        terminal.type("Tell me a long story about a lighthouse.\n")
        terminal.wait_for(r"lighthouse\..*\w+ \w+ \w+")
        terminal.interrupt()
        terminal.wait_for(r"prompt tokens, (\d|\d\d|1\d\d) tokens.*> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"Hello.*prompt tokens, \d+ tokens.*> ")
        terminal.type("\x04")
        assert terminal.ended() == 0
    finally:
        terminal.close()


def test_lines_of_a_pipe_are_a_conversation() -> None:
    lines = "My name is Ada.\n\nWhat is my name?\n"
    done = call("--max-length", "24", "--stats", stdin=lines)
    assert done.returncode == 0, done.stderr
    prompts = [int(n) for n in re.findall(r"(\d+) prompt tokens", done.stderr)]
    assert len(prompts) == 2 and prompts[1] > prompts[0] + 10
    assert "Ada" in done.stdout


def test_torch_in_the_native_engines_place_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_SD__POOLS__CPU__ENGINE", "torch")
    done = call("--max-length", "4", "--draft-engine", "cpu", "Name a fruit.")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_messages_that_no_longer_fit_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_SD__MODEL__MAX_CONTEXT", "128")
    lines = f"Count: {'one ' * 40}\nName a fruit.\nAnd a tree.\n"
    done = call("--max-length", "24", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "the context is full: the oldest 2 messages are forgotten" in done.stderr


@pytest.mark.parametrize("locale_errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_refused_and_the_conversation_goes_on(
    locale_errors: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mirror_sd.cli", "--max-length", "8", "--stats"],
        capture_output=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": f"utf-8:{locale_errors}"},
        input=b"caf\xe9\nName a fruit.\n",
    )
    assert done.returncode == 1, "a line was not answered"
    assert b"the text is not UTF-8: there is a stray byte after 3 characters" in done.stderr
    assert done.stderr.count(b"prompt tokens") == 1


@pytest.mark.parametrize("words", [["--max-length", "8"], ["generate"]])
def test_an_argument_that_is_not_utf8_ends_with_a_sentence(words: list[str]) -> None:
    done = call(*words, "caf\udce9")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("mirror-sd: the text is not UTF-8"), done.stderr
