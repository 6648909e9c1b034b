"""Questions and answers at a terminal; Ctrl-C ends an answer, at the prompt the conversation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mirror_sd.edge.session import EdgeSession, Message
from mirror_sd.errors import RequestError
from mirror_sd.offline import open_input, to_terminal

PROMPT = "> "
_INTERRUPTED = 130


def answer_once(session: EdgeSession, question: str, *, shows_stats: bool) -> int:
    """The exit status."""
    with _ending_on_interrupt(session):
        session.answer([("user", question)], to_terminal)
    to_terminal("\n")
    if shows_stats:
        _say(session.describe_answer())
    return _INTERRUPTED if session.is_stopped else 0


def hold(session: EdgeSession, *, shows_stats: bool) -> int:
    """Answer line after line of standard input until it ends. The exit status: 1 where lines came
    from a file or a pipe and one could not be answered."""
    _edit_lines()
    _say(f"{session.describe()}; Ctrl-C ends an answer, Ctrl-D the conversation")
    messages: list[Message] = []
    has_failed = False
    try:
        while (line := _read()) is not None:
            if not line.strip():
                continue
            asked: list[Message] = [*messages, ("user", line.strip())]
            messages, is_answered = _reply(session, asked, shows_stats=shows_stats)
            has_failed = has_failed or not is_answered
    except KeyboardInterrupt:
        _say("")
        return _INTERRUPTED
    return int(has_failed and not open_input().isatty())


def _reply(
    session: EdgeSession, messages: list[Message], *, shows_stats: bool
) -> tuple[list[Message], bool]:
    """The messages and the answer, True; without the last, False, where it cannot be answered."""
    try:
        kept = session.fitting(messages)
        if forgotten := len(messages) - len(kept):
            _say(f"mirror-sd: the context is full: the oldest {forgotten} messages are forgotten")
        messages = kept
        with _ending_on_interrupt(session):
            answer = session.answer(messages, to_terminal)
    except RequestError as error:
        _say(f"mirror-sd: {error.message}")
        return messages[:-1], False
    to_terminal("\n")
    if shows_stats:
        _say(session.describe_answer())
    return [*messages, ("assistant", answer)], True


@contextmanager
def _ending_on_interrupt(session: EdgeSession) -> Iterator[None]:
    """The first Ctrl-C ends the answer where it is sound to, a second one the process."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        session.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _read() -> str | None:
    """A line of standard input, None at its end."""
    stdin = open_input()
    if not stdin.isatty():
        return stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        _say("")
        return None


def _edit_lines() -> None:
    """Cursor keys at the prompt, where Python was built with them: importing is all it takes."""
    with suppress(ImportError):
        import readline  # noqa: F401


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
