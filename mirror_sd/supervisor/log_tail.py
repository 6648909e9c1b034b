"""Follows the logs of a stack: errors are echoed, files kept to a size."""

from __future__ import annotations

import re
from pathlib import Path

# Our own plain and JSON lines, gunicorn's and nginx's.
_ERROR = re.compile(
    rb"^\S+ \S+ (ERROR|CRITICAL) |\"level\": \"(ERROR|CRITICAL)\"|\[(ERROR|CRITICAL)\]"
    rb"|\[(emerg|alert|crit)\]|^Traceback |^\w+(\.\w+)*Error: "
)
_LARGEST_BYTES = 32 * 2**20
_READ_BYTES = 1 << 20
_SHOWN_PER_READ = 20


class LogTail:
    """`new_errors` reads what was added to each `*.log` since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new_errors(self) -> list[tuple[str, str]]:
        """(process, line) of the new lines that report an error; at most 20 a file and call."""
        found: list[tuple[str, str]] = []
        for path in sorted(self._directory.glob("*.log")):
            lines = [line for line in self._added(path) if _ERROR.search(line)]
            shown = [line.decode(errors="replace") for line in lines[:_SHOWN_PER_READ]]
            if len(lines) > len(shown):
                shown.append(f"... and {len(lines) - len(shown)} more lines, see {path}")
            found.extend((path.stem, line) for line in shown)
        return found

    def _added(self, path: Path) -> list[bytes]:
        begin = self._read.get(path, 0)
        size = path.stat().st_size
        if size <= begin:
            self._read[path] = size
            return []
        with path.open("rb") as log:
            log.seek(begin)
            text = log.read(_READ_BYTES)
        end = text.rfind(b"\n") + 1
        if end == 0 and len(text) < _READ_BYTES:
            return []
        end = end or len(text)
        self._read[path] = begin + end
        if begin + end > _LARGEST_BYTES:
            self._rotate(path)
        return text[:end].splitlines()

    def _rotate(self, path: Path) -> None:
        # The writers hold the file open to append, so it is emptied, not replaced.
        with path.open("rb+") as log:
            log.seek(_LARGEST_BYTES // 2)
            path.with_suffix(".old").write_bytes(log.read(_LARGEST_BYTES))
            log.truncate(0)
        self._read[path] = 0


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log, empty lines left out; nothing where there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - 16_384, 0))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
