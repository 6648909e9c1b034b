"""Writes a model as a Hugging Face directory that `model_store.resolve` and the loader take."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import hf_config, hf_model, safetensors_writer, tokenizer_files
from mirror_sd.uir.model_spec import Shape, expected_shapes
from mirror_sd.uir.program import Program
from mirror_sd.uir.stored_format import Part, StoredFormat

WEIGHTS = "model.safetensors"
# Of transformers' `dtype`, in which the numbers that are no codes lie.
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "float32"}
Report = Callable[[str], None]


def format_of(shape: Shape, chosen: StoredFormat) -> StoredFormat:
    """Norms and biases stay fp32 in every conversion."""
    return chosen if len(shape) == 2 else StoredFormat("fp32")


def write(
    program: Program, files: ModelFiles, target: Path, chosen: StoredFormat, report: Report
) -> Path:
    """Write the directory whole or not at all; it must not be there yet. Its absolute path.

    files: where the tokenizer and the settings come from. Raises `ModelError`.
    """
    target = target.expanduser().absolute()
    if target.exists():
        raise ModelError(f"{target} is there already")
    parts = _parts(program, chosen)
    try:
        with _scratch_beside(target) as scratch:
            _check_space(parts, target.parent)
            fresh = scratch / target.name
            fresh.mkdir()
            _write_settings(program, files, fresh, chosen)
            arrays = _arrays(program, chosen, report)
            safetensors_writer.write(fresh / WEIGHTS, parts, arrays)
            fresh.rename(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    return target


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """A directory to write in, in the file system of `target`. The folders that had to be made
    above it stay only if `target` came to be there."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
            yield Path(scratch)
    finally:
        with suppress(OSError):  # from the first that holds something on, they stay
            for folder in missing:
                folder.rmdir()


def _parts(program: Program, chosen: StoredFormat) -> list[Part]:
    """The tensors of the file, in its order."""
    names = hf_model.stored_names(program.spec.num_layers)
    return [
        part
        for name, shape in expected_shapes(program.spec).items()
        for part in format_of(shape, chosen).parts(names[name], shape)
    ]


def _check_space(parts: list[Part], parent: Path) -> None:
    needed = sum(part.nbytes for part in parts)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ModelError(f"the weights need {needed >> 20} MB, {parent} has {free >> 20} MB free")


def _arrays(program: Program, chosen: StoredFormat, report: Report) -> Iterator[NDArray[Any]]:
    """What `_parts` names."""
    shapes = expected_shapes(program.spec)
    for place, (name, shape) in enumerate(shapes.items()):
        if place % max(len(shapes) // 10, 1) == 0:
            report(f"converted {100 * place // len(shapes)} %")
        values = np.asarray(program.weights.load(name), np.float32)
        yield from format_of(shape, chosen).encode(name, values)


def _write_settings(program: Program, files: ModelFiles, fresh: Path, chosen: StoredFormat) -> None:
    """The tokenizer and config.json, of a directory as they are, of a GGUF made from it."""
    if files.format == "safetensors":
        for source in files.path.iterdir():
            if source.is_file() and source.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(source, fresh / source.name)
        (fresh / hf_model.INDEX).unlink(missing_ok=True)
        config = hf_model.read_json(files.path / "config.json")
        config.pop("torch_dtype", None)
    else:
        tokenizer_files.export(files, fresh)
        facts = hf_model.read_json(fresh / tokenizer_files.FACTS)
        (fresh / tokenizer_files.FACTS).unlink()
        tokens = {"bos_token_id": facts["bos_token_id"], "eos_token_id": facts["eos_token_ids"]}
        config = hf_config.config_of(program.spec) | tokens
    config["dtype"] = _TORCH_NAMES[chosen.dtype]
    config.pop("quantization_config", None)
    if chosen.dtype == "int8":
        config["quantization_config"] = {
            "quant_method": hf_model.OUR_METHOD,
            "bits": 8,
            "group_size": chosen.group,
        }
    text = json.dumps(config, indent=2) + "\n"
    (fresh / "config.json").write_text(text, encoding="utf-8")
