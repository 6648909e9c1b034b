"""docs/benchmarks.md has the keys of the reports as the code makes them, read off its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "mirror_sd" / "bench"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

# By command, the functions that make its report, by module.
MAKERS = {
    "exactness": {"exactness": ["compare"]},
    "forward": {"forward": ["report", "measure"]},
    "http": {"http": ["first_token_overhead"]},
    "memory": {"memory": ["fill"], "kv_growth": ["_row"]},
    "overlap": {"overlap": ["_figures", "command"]},
    "peers": {
        "peers": ["run", "compare", "_over", "_reading", "_try", "_ask"],
        "token_times": ["row"],
    },
    "segments": {"segments": ["pace", "report", "command"]},
    "serve": {
        "serve": ["command", "serve", "decode", "ratios"],
        "serve_stack": ["row"],
        "token_times": ["row"],
    },
}
# Of every report, and of what is sent to a model.
OTHER = {"machine", "role", "content"}


def functions_of(command: str) -> Iterator[ast.AST]:
    for module, names in MAKERS[command].items():
        tree = ast.parse((BENCH / f"{module}.py").read_text(encoding="utf-8"))
        made = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
        assert {function.name for function in made} == set(names)
        yield from made


def keys_of(command: str) -> set[str]:
    """What is between the braces of a dict, or assigned to."""
    found: list[ast.expr | None] = []
    for function in functions_of(command):
        for node in ast.walk(function):
            if isinstance(node, ast.Dict):
                found += node.keys
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found.append(node.slice)
    constants = {node.value for node in found if isinstance(node, ast.Constant)}
    return {key for key in constants if isinstance(key, str)} - OTHER


def documented(command: str) -> set[str]:
    """The words in code of the table of that command."""
    _, head, rest = PAGE.partition(f"| key of `bench {command}` |")
    assert head, f"there is no table of the keys of bench {command}"
    return set(re.findall(r"`(\w+)`", rest.partition("\n\n")[0]))


@pytest.mark.parametrize("command", MAKERS)
def test_every_key_of_a_report_is_documented(command: str) -> None:
    keys = keys_of(command)
    assert len(keys) >= 5
    assert keys - documented(command) == set()
