"""A model's tokenizer, chat template and facts as three files that the gateways read.

    tokenizer.json        for the `tokenizers` library
    chat_template.jinja   absent if the model has none
    model.json            name, max_context, vocab_size, bos_token_id, eos_token_ids, add_bos

The tokenizer of a GGUF file is rebuilt once and then copied from the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles, cache_dir
from mirror_sd.uir import program
from mirror_sd.uir.gguf_file import GgufFile
from mirror_sd.uir.hf_model import number, read_json

log = logging.getLogger(__name__)

TOKENIZER, TEMPLATE, FACTS = "tokenizer.json", "chat_template.jinja", "model.json"
# Raised when the files made from the same GGUF change, so that older caches are not used.
CACHE_VERSION = 1
# Tokens that end an answer wherever a model has them as control tokens, stated or not; as in
# llama.cpp's `special_eog_ids`.
END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
)
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")


def export(files: ModelFiles, target: Path) -> None:
    """Write the three files into the directory `target`, making it if need be.

    Raises `ModelError` naming the file at fault.
    """
    target.mkdir(parents=True, exist_ok=True)
    if files.format == "gguf":
        _export_gguf(files, target)
    else:
        _export_directory(files, target)


def _export_gguf(files: ModelFiles, target: Path) -> None:
    cached = _cached(files.path)
    if not (cached / FACTS).is_file():
        _fill_cache(files, cached, target)
    if (cached / FACTS).is_file():
        for source in cached.iterdir():
            shutil.copyfile(source, target / source.name)
        facts = read_json(target / FACTS)
        _write_facts(target, {**facts, "name": files.name})


def _cached(path: Path) -> Path:
    status = path.stat()
    key = f"{CACHE_VERSION} {path.absolute()} {status.st_size} {status.st_mtime_ns}"
    return cache_dir() / "tokenizers" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _fill_cache(files: ModelFiles, cached: Path, target: Path) -> None:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=cached.parent) as scratch:
            fresh = Path(scratch) / "files"
            fresh.mkdir()
            _build_gguf(files, fresh)
            # Another process may have been first; its result is the same.
            if not cached.exists():
                fresh.rename(cached)
    except OSError as error:
        log.warning("the tokenizer of %s is not cached: %s", files.name, error)
        _build_gguf(files, target)


def _build_gguf(files: ModelFiles, target: Path) -> None:
    from mirror_sd.uir import gguf_tokenizer

    metadata = GgufFile(files.path).metadata
    spec = program.read_spec(files)
    tokenizer = gguf_tokenizer.build(files.path, metadata)
    if tokenizer.get_vocab_size() > spec.vocab_size:
        raise ModelError(
            f"{files.path}: {tokenizer.get_vocab_size()} tokens for {spec.vocab_size} embeddings"
        )
    tokenizer.save(str(target / TOKENIZER))
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (target / TEMPLATE).write_text(template, encoding="utf-8")
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    facts = {
        "name": files.name,
        "max_context": spec.max_context,
        "vocab_size": spec.vocab_size,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _end_ids(stated, target / TOKENIZER),
        "add_bos": gguf_tokenizer.adds_bos(metadata),
    }
    _write_facts(target, facts)


def _export_directory(files: ModelFiles, target: Path) -> None:
    from tokenizers import Tokenizer

    settings = _optional_json(files.path / "tokenizer_config.json")
    config = read_json(files.path / "config.json")
    generation = _optional_json(files.path / "generation_config.json")
    source = files.path / TOKENIZER
    read_json(source)  # a clear error for a file that is missing or cut short
    shutil.copyfile(source, target / TOKENIZER)
    template = _directory_template(files.path, settings)
    if template is not None:
        (target / TEMPLATE).write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(target / TOKENIZER))
    named = {key: _token_text(settings.get(f"{key}_token")) for key in ("bos", "eos")}
    bos = tokenizer.token_to_id(named["bos"]) if named["bos"] else config.get("bos_token_id")
    stated = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    if named["eos"]:
        stated.append(tokenizer.token_to_id(named["eos"]))
    max_context, vocab_size = _directory_sizes(files, config)
    facts = {
        "name": files.name,
        "max_context": max_context,
        "vocab_size": vocab_size,
        "bos_token_id": bos,
        "eos_token_ids": _end_ids(stated, target / TOKENIZER),
        "add_bos": bos is not None and tokenizer.encode("a").ids[:1] == [bos],
    }
    _write_facts(target, facts)


def _directory_sizes(files: ModelFiles, config: dict[str, Any]) -> tuple[int, int]:
    """(context, vocabulary); also of models that only the transformers fallback can run."""
    try:
        spec = program.read_spec(files)
    except UnsupportedModel:
        path = files.path / "config.json"
        key = next((key for key in CONTEXT_KEYS if key in config), CONTEXT_KEYS[0])
        return int(number(path, config, key)), int(number(path, config, "vocab_size"))
    return spec.max_context, spec.vocab_size


def _directory_template(directory: Path, settings: dict[str, Any]) -> str | None:
    if (directory / TEMPLATE).is_file():
        return (directory / TEMPLATE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _end_ids(stated: Iterable[Any], tokenizer_json: Path) -> list[int]:
    """The stated ids and those of the control tokens that end an answer in any model."""
    added = read_json(tokenizer_json).get("added_tokens") or []
    known = [token["id"] for token in added if token["content"] in END_TOKENS and token["special"]]
    return sorted({token for token in (*stated, *known) if isinstance(token, int)})


def _write_facts(target: Path, facts: dict[str, Any]) -> None:
    (target / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
