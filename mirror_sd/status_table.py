"""`mirror-sd status` in a terminal: tables of the classes and the processes, once or live."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_EVERY_S = 1.0
_UNKNOWN = "-"
# At these a value is shown in yellow, and in red.
_WARM_C, _HOT_C = 75.0, 85.0
_BUSY, _FULL = 0.8, 0.95


def show(document: dict[str, Any]) -> None:
    """Print it once."""
    Console().print(render(document))


def watch(read: Callable[[], dict[str, Any]], console: Console | None = None) -> None:
    """Show what `read` gives each second until Ctrl-C: in place on a terminal, else one block after
    the other. `read` may raise `SetupError`."""
    console = console or Console()
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            _watch_in_place(read, console)
        _watch_in_blocks(read, console)


def _watch_in_place(read: Callable[[], dict[str, Any]], console: Console) -> NoReturn:
    with Live(render(read()), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(render(read()), refresh=True)


def _watch_in_blocks(read: Callable[[], dict[str, Any]], console: Console) -> NoReturn:
    while True:
        console.print(render(read()))
        console.print()
        time.sleep(_EVERY_S)


def render(document: dict[str, Any]) -> RenderableType:
    """The document of `supervisor.stack_status.status` as tables."""
    classes = document["classes"]
    parts: list[RenderableType] = [_summary(document), _classes(classes), _processes(document)]
    if any(item["weight"] for item in classes):
        parts.insert(2, Text("last columns: shares of standard requests by prompt", style="dim"))
    return Group(*parts)


def _summary(document: dict[str, Any]) -> Text:
    counts = (document["kv_blocks_used"], document["kv_blocks_free"])
    blocks = _UNKNOWN if None in counts else f"{counts[0]} of {sum(counts)}"
    level, age_s = document["degrade_level"], document["weights_age_s"]
    parts = [
        Text(f"running {_or_unknown(document['running'])}"),
        Text(f"waiting {_or_unknown(document['waiting'])}"),
        Text(f"KV blocks {blocks}"),
        Text(f"degradation {_or_unknown(level)}", style="bold red" if level else ""),
    ]
    if document["weights_stale"]:
        parts.append(Text("weights stale", style="yellow"))
    elif age_s is not None:
        parts.append(Text(f"weights {age_s:.1f} s old"))
    if document["draining"]:
        parts.append(Text("draining", style="yellow"))
    return Text(" · ").join(parts)


def _classes(classes: Sequence[dict[str, Any]]) -> Table:
    table = _table("class", "live", "in flight", "vip\nwait", "std.\nwait", "oldest")
    bands: list[dict[str, Any]] = next((item["weight"] for item in classes if item["weight"]), [])
    for heading in ("temp.", "busy", "mem.", "factor", *_headings(bands)):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in classes:
        name = Text(item["class"])
        if item["emulated"]:
            name.append(" emulated", style="magenta")
        shares = [_percent(band["share"]) for band in item["weight"]]
        table.add_row(
            name,
            _alive(item["workers"]),
            f"{_or_unknown(item['in_flight'])}/{_or_unknown(item['slots'])}",
            _or_unknown(item["queued"].get("vip")),
            _or_unknown(item["queued"].get("standard")),
            _seconds(item["oldest_wait_s"]),
            _marked(item["temperature_c"], "{:.0f} C", _WARM_C, _HOT_C),
            _marked(item["utilisation"], "{:.0%}", _BUSY, _FULL),
            _marked(item["memory_pressure"], "{:.0%}", _BUSY, _FULL),
            _or_unknown(item["factor"], "{:.2f}"),
            *(shares or [_UNKNOWN] * len(bands)),
        )
    return table


def _headings(bands: Sequence[dict[str, Any]]) -> list[str]:
    """`< 50 tok` on two lines and, for the last, which has no bound, `more`."""
    return [f"<{band['below']}\ntok" if band["below"] else "more" for band in bands]


def _processes(document: dict[str, Any]) -> Table:
    table = _table("process", "pid", "MB", "peak", "malloc")
    for process in document["processes"]:
        name = f"{process['role']} {process.get('class', '')}".strip()
        table.add_row(
            name,
            str(process["pid"]),
            f"{process['rss_mb']:.1f}",
            _or_unknown(process["peak_mb"], "{:.1f}") if "peak_mb" in process else "",
            _or_unknown(process["allocator"]) if "allocator" in process else "",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _or_unknown(value: Any, form: str = "{}") -> str:
    return _UNKNOWN if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return _or_unknown(value, "{:.0%}")


def _seconds(value: float | None) -> str:
    return _UNKNOWN if not value else f"{value:.1f} s"


def _alive(workers: int | None) -> Text:
    return Text(_or_unknown(workers), style="bold red" if workers == 0 else "")


def _marked(value: float | None, form: str, warn: float, alarm: float) -> Text:
    if value is None:
        return Text(_UNKNOWN)
    style = "red" if value >= alarm else "yellow" if value >= warn else ""
    return Text(form.format(value), style=style)
