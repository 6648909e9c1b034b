"""The child's end of a session: a line of JSON in, a line of JSON out, until the input ends.

    {"call": NAME, ...arguments}  ->  {"value": ...} or {"error": "one line"}

What a library prints on standard output goes to standard error instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# (start, moments of the tokens): seconds of time.perf_counter, one pair for each prompt.
Timeline = tuple[float, list[float]]

DRIVERS = {
    "transformers": ("transformers_peer", "TransformersPeer"),
    "llamacpp": ("llamacpp_peer", "llamacpp_peer"),
    "openvino": ("openvino_peer", "openvino_peer"),
}
MODULES = {
    "transformers": ("torch", "transformers"),
    "llamacpp": ("numpy", "llama_cpp"),
    "openvino": ("numpy", "openvino", "openvino_genai"),
}
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python", "openvino_genai": "openvino-genai"}


class Driver(Protocol):
    """A loaded engine. Greedy; an answer ends at a stop token, which counts, or at the limit."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        """Answer all prompts, as many at once as the driver was loaded for."""
        ...


class Session:
    """Holds the one engine of this process."""

    def __init__(self, load: Callable[..., Driver]) -> None:
        self._load = load
        self._driver: Driver | None = None

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "load": self.load,
            "generate": self.generate,
            "tokens": self.tokens,
            "peak_rss_mb": peak_rss_mb,
        }

    def load(self, **options: Any) -> None:
        self._driver = self._load(**options)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        if self._driver is None:
            raise RuntimeError("nothing is loaded")
        return self._driver.generate(prompts, max_tokens)

    def tokens(self) -> list[list[int]]:
        """The last answers, of a driver that keeps them."""
        driver: Any = self._driver
        found: list[list[int]] = driver.tokens
        return found


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"value": handlers[request.pop("call")](**request)}
        except Exception as error:  # noqa: BLE001 - told to the caller, who decides
            traceback.print_exc()
            said = (str(error).strip() or "no message").splitlines()[0][:500]
            kind = type(error)
            # Our own are sentences for a person; told by the name, as nothing of ours is imported.
            is_ours = kind.__module__ == "mirror_sd.errors"
            reply = {"error": said if is_ours else f"{kind.__name__}: {said}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def peak_rss_mb() -> int:
    """The most memory this process had resident since it was started.

    Not `ru_maxrss`: a child inherits its parent's.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def versions(family: str) -> str:
    """Import what a family of peers needs; its versions. Raises `ImportError`."""
    found = []
    for name in MODULES[family]:
        module = importlib.import_module(name)
        if name != "numpy":
            distribution = DISTRIBUTIONS.get(name, name)
            version = getattr(module, "__version__", None)
            found.append(f"{distribution} {version or importlib.metadata.version(distribution)}")
    return ", ".join(found)


def load_peer(family: str, **options: Any) -> Driver:
    """Load an engine; options are those of its class."""
    module, name = DRIVERS[family]
    driver: Driver = getattr(importlib.import_module(f"{__package__}.{module}"), name)(**options)
    return driver


def prepare(kind: str, **options: str) -> None:
    """Write one form of a model; see `preparation`."""
    preparation = importlib.import_module(f"{__package__}.preparation")
    preparation.FORMS[kind](**options)


def main() -> None:
    handlers = Session(load_peer).handlers()
    serve({**handlers, "versions": versions, "prepare": prepare})
