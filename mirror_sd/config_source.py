"""Settings as they are written: a YAML file, texts for single keys, and what is told of errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mirror_sd.errors import ConfigError


def read(file: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises `ConfigError`."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of sections, got {type(tree).__name__}")
    return tree


def assign(tree: dict[str, Any], path: Sequence[str], text: str, origin: str) -> None:
    """Put the YAML value `text`, which came from `origin`, at `path`. Raises `ConfigError`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}={text!r} is not a YAML value") from error
    # The scheduler's class names are upper case in the file, and environment names are folded.
    if path[:2] == ["scheduler", "max_batch_size"] and len(path) == 3:
        path = [*path[:2], path[2].upper()]
    node = tree
    for key in path[:-1]:
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {key!r} holds a value, not a section")
        node = child
    node[path[-1]] = value


def describe(error: ValidationError) -> str:
    """Every key at fault, with its value and what is allowed, in one sentence."""
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"] if part != "[key]")
        if item["type"] == "extra_forbidden":
            parts.append(f"{key}: no such key")
        else:
            value = item["input"]
            shown = f" (got {value!r})" if not isinstance(value, dict) else ""
            parts.append(f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}{shown}")
    return "configuration: " + "; ".join(parts)
