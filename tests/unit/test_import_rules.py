"""Who may import whom, as docs/architecture.md says it.

Read from the syntax tree of every module, imports inside functions included, so that a rule cannot
be passed by importing late.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FOUNDATIONS = (
    "errors",
    "config",
    "config_drafters",
    "config_section",
    "config_source",
    "config_speculation",
    "run_dir",
    "telemetry",
    "messages",
    "philox",
)
FOUNDATIONS = frozenset(f"mirror_sd.{name}" for name in _FOUNDATIONS)


@dataclass(frozen=True)
class Rule:
    """`package` must not import `forbidden`, save `excepted`; `ours`, where given, lists all that
    it may import of this project (itself is always allowed)."""

    package: str
    forbidden: frozenset[str] = frozenset()
    excepted: frozenset[str] = frozenset()
    ours: frozenset[str] | None = None


_DEVICE = frozenset({"torch", "transformers", "mirror_sd.engine", "mirror_sd.backends", "workers"})
_INTEGERS_ONLY = frozenset(
    {"torch", "zmq", "mirror_sd.scheduler", "mirror_sd.memory", "mirror_sd.uir"}
)
RULES = (
    *(Rule(name, ours=FOUNDATIONS) for name in sorted(FOUNDATIONS)),
    *(
        Rule(name, forbidden=_INTEGERS_ONLY - {name})
        for name in ("mirror_sd.scheduler", "mirror_sd.memory", "mirror_sd.uir")
    ),
    Rule(
        "mirror_sd.backends",
        ours=FOUNDATIONS | {"mirror_sd.uir", "mirror_sd.model_store", "mirror_sd._native"},
    ),
    Rule(
        "mirror_sd.speculative",
        forbidden=frozenset({"mirror_sd.backends", "mirror_sd.engine", "zmq"}),
        excepted=frozenset({"mirror_sd.backends.protocol"}),
    ),
    Rule("mirror_sd.serving", forbidden=_DEVICE),
    Rule("mirror_sd.api", forbidden=_DEVICE | {"mirror_sd.serving", "zmq"}),
    Rule(
        "mirror_sd.engine", forbidden=frozenset({"mirror_sd.serving", "mirror_sd.api", "workers"})
    ),
    Rule("workers", forbidden=frozenset({"mirror_sd.serving", "mirror_sd.api"})),
    Rule(
        "ops",
        forbidden=frozenset({"zmq", "torch", "mirror_sd.messages", "workers"}),
        ours=FOUNDATIONS | {"mirror_sd.logs", "mirror_sd.scheduler", "ops"},
    ),
)
# The extension is optional: only what can do without it, or measures it, may import it.
USERS_OF_NATIVE = (
    "mirror_sd.backends.native",
    "mirror_sd.bench",
    "mirror_sd.speculative.sampler",
)


@dataclass(frozen=True)
class Import:
    """`target` is what is imported; `names` are the `from target import ...` parts joined to it,
    each of which may be a module or a name in one."""

    line: int
    target: str
    names: tuple[str, ...]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield Import(node.lineno, alias.name, ())
            case ast.ImportFrom(module=target, names=aliases, level=level):
                base = _absolute(target, level, module, is_package)
                yield Import(node.lineno, base, tuple(f"{base}.{alias.name}" for alias in aliases))
            case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]):
                name = function.attr if isinstance(function, ast.Attribute) else ""
                name = function.id if isinstance(function, ast.Name) else name
                if name in ("import_module", "__import__"):
                    yield Import(node.lineno, target, ())


def _absolute(target: str | None, level: int, module: str, is_package: bool) -> str:
    if level == 0:
        return target or ""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    parts = parts[: len(parts) - (level - 1)]
    return ".".join([*parts, target] if target else parts)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for each import that breaks a rule."""
    found = []
    for rule in RULES:
        if not within(module, rule.package):
            continue
        for item in imports_of(source, module, is_package):
            # `from package import module` is judged by the parts, `import package.module` whole.
            for name in item.names or (item.target,):
                if _breaks(rule, name):
                    found.append(f"{module}:{item.line} imports {name}")
    if not any(within(module, user) for user in USERS_OF_NATIVE):
        for item in imports_of(source, module, is_package):
            for name in item.names or (item.target,):
                if within(name, "mirror_sd._native"):
                    found.append(f"{module}:{item.line} imports {name}")
    return found


def _breaks(rule: Rule, name: str) -> bool:
    if within(name, rule.package) or any(within(name, allowed) for allowed in rule.excepted):
        return False
    if any(within(name, banned) for banned in rule.forbidden):
        return True
    if rule.ours is None or not (within(name, "mirror_sd") or within(name, "workers")):
        return False
    return not any(within(name, allowed) for allowed in rule.ours | {"mirror_sd.__version__"})


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("mirror_sd", "workers", "ops"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_no_module_imports_what_its_layer_must_not_see() -> None:
    checked = list(modules())
    assert len(checked) > 20
    found = [
        text
        for module, path in checked
        for text in violations(path.read_text(), module, path.name == "__init__.py")
    ]
    assert found == []


def test_every_rule_is_about_a_module_that_exists() -> None:
    present = {module for module, _ in modules()}
    assert [rule.package for rule in RULES if rule.package not in present] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mirror_sd.serving.gateway", "import torch"),
        ("mirror_sd.serving.gateway", "def late():\n    from torch.nn import Linear"),
        ("mirror_sd.serving.broker", "from mirror_sd import engine"),
        ("mirror_sd.api.schema", "import importlib\nimportlib.import_module('transformers')"),
        ("mirror_sd.api.schema", "from ..backends.protocol import Backend"),
        ("mirror_sd.scheduler.batcher", "import zmq.asyncio"),
        ("mirror_sd.scheduler.batcher", "from mirror_sd.memory.block_pool import BlockPool"),
        ("mirror_sd.uir.weights", "import numpy, torch"),
        ("mirror_sd.backends.torch_cpu", "from mirror_sd.speculative import verifier"),
        ("mirror_sd.backends.torch_cpu", "from mirror_sd.engine import Engine"),
        ("mirror_sd.speculative.verifier", "from mirror_sd.backends import registry"),
        ("mirror_sd.speculative.drafters.lookup", "from ... import backends"),
        ("mirror_sd.errors", "from mirror_sd.model_store import resolve"),
        ("workers.worker", "from mirror_sd.serving.broker import Broker"),
        ("ops.probe", "from mirror_sd.messages import StatsRequest"),
        ("ops.readers.workers", "import zmq"),
        ("ops.probe", "from mirror_sd.child import Waker"),
        ("mirror_sd.speculative.verifier", "from mirror_sd import _native"),
        ("mirror_sd.backends.torch_cpu", "import mirror_sd._native"),
    ],
)
def test_the_checker_catches_a_violation(module: str, source: str) -> None:
    assert violations(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "mirror_sd.serving.gateway",
            "import zmq, torchlike\nfrom mirror_sd.errors import NotFound",
        ),
        ("mirror_sd.speculative.verifier", "from mirror_sd.backends.protocol import RaggedBatch"),
        ("mirror_sd.speculative.verifier", "from mirror_sd.backends import protocol"),
        ("mirror_sd.backends.torch_cpu", "import torch\nfrom mirror_sd.uir.spec import ModelSpec"),
        ("mirror_sd.uir.weights", "from . import spec\nimport numpy"),
        ("mirror_sd.engine", "import torch\nfrom mirror_sd.backends import registry"),
        ("ops.probe", "from mirror_sd import config, logs\nfrom ops.readers import host"),
        ("mirror_sd.backends.native.packing", "from mirror_sd import _native"),
    ],
)
def test_the_checker_lets_a_lawful_import_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


_PROBE = """
import json, resource, sys
import mirror_sd.serving.{module}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{
    "heavy": sorted({{"torch", "transformers"}} & set(sys.modules)),
    "cpu_s": usage.ru_utime + usage.ru_stime,
}}))
"""


@pytest.mark.parametrize("module", ["gateway", "broker"])
def test_a_serving_process_imports_neither_torch_nor_transformers_and_starts_fast(
    module: str,
) -> None:
    # The first import after a checkout writes bytecode; the second is what a restart pays.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _PROBE.format(module=module)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            timeout=60,
        )
    report = json.loads(done.stdout)
    assert report["heavy"] == []
    assert report["cpu_s"] < 1.0, f"importing it takes {report['cpu_s']:.2f} s of CPU time"
