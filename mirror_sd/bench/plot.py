"""The picture for the README: speed against the peers, and a forward against the memory floor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import typer

from mirror_sd import drawing
from mirror_sd.drawing import OTHER_COLOUR, OURS_COLOUR
from mirror_sd.errors import ConfigError

Report = Mapping[str, Any]


class _Row(TypedDict):
    precision: str
    tokens: int
    context: int
    ms: float
    floor_ms: float


class _Machine(TypedDict):
    cpu: str
    at: str


_KINDS: Mapping[str, Any] = {
    "speeds": dict[str, dict[str, float]],
    "ratios": dict[str, dict[str, Any]],
    "machine": _Machine,
    "rows": list[_Row],
}
LINE_COLOURS = {"int8": "#c8553d", "bf16": "#2a6f97", "fp32": "#588157"}
_DRAFTERS = ("lookup", "history", "head", "auto")
NAMES = {
    "mirror-sd": "Mirror-SD",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
}


def draw(peers: Report, forward: Report, out: Path) -> None:
    """Write the picture, a PNG, from the reports of `bench peers` and `bench forward`.

    Raises `SetupError` where matplotlib is missing, `ConfigError` where a report lacks a part or
    the picture cannot be written.
    """
    pyplot = drawing.pyplot()
    about_peers = "the report of bench peers"
    speeds = _part(peers, "speeds", about_peers)
    described = _part(peers, "machine", about_peers)
    ratios = _part(peers, "ratios", about_peers) if peers.get("ratios") else {}
    rows = _part(forward, "rows", "the report of bench forward")
    panels = _panels(speeds, peers)
    figure, axes = pyplot.subplots(
        1, len(panels) + 1, figsize=(4.6 * (len(panels) + 1), 4.8), layout="constrained"
    )
    own = sorted({name for metric in ratios.values() for name in metric})
    for axis, (title, values) in zip(axes, panels, strict=False):
        _bars(axis, title, values, own)
    _floor(axes[-1], rows)
    figure.suptitle(
        f"{peers.get('model')}, greedy: {described['cpu']}, {peers.get('threads')} threads,"
        f" {described['at'][:10]}"
    )
    drawing.save(pyplot, figure, out)


def _panels(
    speeds: Mapping[str, Mapping[str, float]], peers: Report
) -> list[tuple[str, Mapping[str, float]]]:
    titles = {"one_stream": "One stream", "streams": f"{peers.get('streams')} streams"}
    panels = [(title, speeds[metric]) for metric, title in titles.items() if speeds.get(metric)]
    if not panels:
        raise ConfigError("the report of bench peers has neither one stream nor several")
    return panels


def _part(report: Report, key: str, what: str) -> Any:
    if not report.get(key):
        raise ConfigError(f"{what} has no {key!r}")
    try:
        return msgspec.convert(report[key], _KINDS[key])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} is damaged: {key!r}: {error}") from error


def label(engine: str) -> str:
    """An engine's name as a person writes it: `llamacpp-q8_0-lookup` is llama.cpp Q8_0, lookup."""
    family = next((known for known in NAMES if engine.startswith(known)), engine)
    kind, drafter = engine.removeprefix(family).strip("-"), ""
    if kind.rpartition("-")[2] in _DRAFTERS:
        kind, _, drafter = kind.rpartition("-")
    kind = kind.upper() if family == "llamacpp" else kind
    text = " ".join(word for word in (NAMES.get(family, family), kind) if word)
    return f"{text}, {drafter}" if drafter else text


def _bars(axis: Any, title: str, values: Mapping[str, float], own: Sequence[str]) -> None:
    ordered = sorted(values, key=lambda name: values[name])
    drawing.bars(
        axis,
        [label(name) for name in ordered],
        [values[name] for name in ordered],
        colours=[OURS_COLOUR if name in own else OTHER_COLOUR for name in ordered],
    )
    axis.set_title(title)
    axis.set_xlabel("tokens per second")


def _floor(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Forward time over the tokens that it verifies, at the shortest context of the report."""
    context = min(row["context"] for row in rows)
    for precision in sorted({row["precision"] for row in rows}):
        line = sorted(
            (row["tokens"], row["ms"], row["floor_ms"])
            for row in rows
            if row["precision"] == precision and row["context"] == context
        )
        tokens, ms, floor = zip(*line, strict=True)
        colour = LINE_COLOURS.get(precision)
        (drawn,) = axis.plot(tokens, ms, marker="o", color=colour, label=precision)
        axis.plot(tokens, floor, "--", color=drawn.get_color(), label=f"{precision}, floor")
    counts = sorted({row["tokens"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(f"One forward, context {context}")
    axis.set_xlabel("tokens verified in one forward")
    axis.set_ylabel("milliseconds")
    axis.legend(
        frameon=False, title="floor: weights and cache read once", alignment="left", ncols=2
    )
    drawing.tidy(axis)


def read(path: Path) -> Report:
    """A report that a bench printed with `--json`. Raises `ConfigError`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not the JSON of a report: {error}") from error
    if not isinstance(report, dict):
        raise ConfigError(f"{path} is not the JSON of a report")
    return report


def command(
    peers: Annotated[Path, typer.Option(help="What `bench peers --json` printed.")],
    forward: Annotated[Path, typer.Option(help="What `bench forward --json` printed.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("docs/benchmark.png"),
) -> None:
    """Draw two reports as one picture: speed against peers, forward time against the floor."""
    draw(read(peers), read(forward), out)
    typer.echo(f"wrote {out}", err=True)
