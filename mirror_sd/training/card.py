"""The card of a draft: how it was trained and what it reaches, as Markdown, from a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]


def text(report: Report, command: str) -> str:
    """`command`: what was run, on one line."""
    data, plan, seconds = report["data"], report["plan"], report["seconds"]
    lines = [
        f"# Draft head for {report['model']}",
        "",
        "One layer on the hidden states of the target, trained on the target's own answers"
        " (`mirror_sd/uir/draft_file.py`, docs/decisions/0013).",
        "",
        "```sh",
        command,
        "```",
        "",
        "| what | value |",
        "|---|---|",
        f"| seed | {plan['seed']} |",
        f"| trained on | {data['conversations']:,} answers, {data['answer_tokens']:,} tokens |",
        f"| held out | {data['held_out_conversations']} answers to prompts of other origins,"
        f" greedy, {data['held_out_answer_tokens']:,} tokens |",
        f"| features | layers {', '.join(map(str, data['taps']))} |",
        f"| draft vocabulary | {data['draft_vocab']:,} tokens, {100 * data['coverage']:.1f} % of"
        " the held-out tokens |",
        f"| duration | {_durations(seconds)} |",
        "",
        f"Held out, a chain of {plan['chain']} tokens for each verify:",
        "",
        "| draft | bytes | tokens per verify | acceptance | by depth | points lost to fp32 |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for name, row in ({"fp32 parent": report["parent"]} | report["exports"]).items():
        depths = " ".join(f"{share:.2f}" for share in row["by_depth"])
        size = f"{row['bytes']:,}" if "bytes" in row else ""
        lost = f"{row['points_lost']:.1f}" if "points_lost" in row else ""
        lines.append(
            f"| {name} | {size} | {row['tokens_per_verify']:.2f} | {row['acceptance']:.3f} |"
            f" {depths} | {lost} |"
        )
    lines += ["", "| language | tokens per verify | acceptance |", "|---|---:|---:|"]
    row = next(iter(report["exports"].values()), report["parent"])
    for language, part in row["languages"].items():
        lines.append(f"| {language} | {part['tokens_per_verify']:.2f} | {part['acceptance']:.3f} |")
    return "\n".join([*lines, ""])


def _durations(seconds: Mapping[str, float]) -> str:
    """Of the stages of the run, and of all of it."""
    stages = [f"{name} {spent / 60:.0f} min" for name, spent in seconds.items() if name != "all"]
    return f"{seconds['all'] / 60:.0f} min in all: {', '.join(stages)}"
