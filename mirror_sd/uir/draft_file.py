"""The file of a draft head: what it was trained for, and its weights.

A safetensors file. Metadata: `mirror_sd_draft` (format version), `spec` (the JSON of `DraftSpec`),
`tensors` (a digest of names, formats, shapes and bytes: damaged weights would still draft).
Tensors, with h the hidden size and V the draft's own reduced vocabulary:

    token_ids       [V] int32, ascending: the target's id of each token the draft can propose
    fuse_features   [h, F] from the target's tapped features, F = taps * h
    fuse_input      [h, 2h] from embedding and feature, each normed
    embedding_norm, feature_norm, final_norm [h]
    attention_norm, mlp_norm [h], q, k, v, o, gate, up, down: one layer, as in `model_spec`
    head            [V, h]

A draft of the token after position p: g = fuse_features @ features(p - 1), or the layer's output at
p - 1 where p - 1 is itself drafted; x = fuse_input @ [norm(embedding(token p)), norm(g)]; a = the
layer at position p on x; logits = head @ final_norm(a). This is EAGLE's head (Li et al., EAGLE-3,
arXiv 2503.01840) with the shift put on the feature, so that a token's key and value depend on what
lies before it alone and blocks of a prefix can be shared as the target's are.

In precision int8 a matrix is `NAME.codes` int8 [outputs, inputs] and `NAME.scales` fp16
[outputs, ceil(inputs / 32)]: weight = code * scale of its 32 inputs. Norms are fp32 always.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.uir import bfloat16, safetensors_writer, stored_format

FORMAT_VERSION = "2"
GROUP = 32
Precision = Literal["int8", "fp16", "bf16", "fp32"]
Float32 = NDArray[np.float32]
VECTORS = ("embedding_norm", "feature_norm", "attention_norm", "mlp_norm", "final_norm")
MATRICES = ("fuse_features", "fuse_input", "q", "k", "v", "o", "gate", "up", "down", "head")
_STORED: dict[str, type[Any]] = {"int8": np.int8, "fp16": np.float16, "fp32": np.float32}
_FORMATS = (*_STORED.values(), np.int32, np.uint16)


class DraftMismatch(ModelError):
    """A sound draft file, made for another target."""

    code = "draft_mismatch"


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Dimensions in elements. `tokenizer`: `tokenizer_digest` of the target's; `taps`: layers of
    the target, 1..num_layers; `target`: the target's name, for messages."""

    target: str
    tokenizer: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    taps: tuple[int, ...]
    draft_vocab_size: int
    precision: Precision

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight; matrices are [outputs, inputs]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = {
            "fuse_features": (hidden, len(self.taps) * hidden),
            "fuse_input": (hidden, 2 * hidden),
            "q": (query, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, query),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "head": (self.draft_vocab_size, hidden),
        }
        return {**dict.fromkeys(VECTORS, (hidden,)), **matrices}


@dataclass(frozen=True, slots=True)
class DraftProgram:
    """One draft head, ready to be lowered. `weights`: float32 by the names of `DraftSpec.shapes`,
    of int8 the values that the codes stand for; `token_ids` [V] int32."""

    spec: DraftSpec
    token_ids: NDArray[np.int32]
    weights: Mapping[str, Float32]


def tokenizer_digest(tokenizer_json: Path) -> str:
    """SHA-256 of the tokens by id, those added included: what a draft and its target must share.

    Raises `ModelError`.
    """
    try:
        document = json.loads(tokenizer_json.read_bytes())
        model = document["model"]["vocab"]
        pairs = (
            model.items() if isinstance(model, dict) else ((t, i) for i, (t, _) in enumerate(model))
        )
        by_id = {int(index): str(token) for token, index in pairs}
        by_id |= {int(t["id"]): str(t["content"]) for t in document.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the vocabulary of {tokenizer_json}: {error!r}") from error
    listed = json.dumps(sorted(by_id.items()), ensure_ascii=True, separators=(",", ":"))
    return sha256(listed.encode()).hexdigest()


def quantise(matrix: Float32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """(codes, scales) of a matrix [outputs, inputs], as the file holds them."""
    return stored_format.quantise(matrix, GROUP, np.float16)


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> Float32:
    return stored_format.dequantise(codes, scales, GROUP)


def write(path: Path, program: DraftProgram) -> None:
    """Write the file whole or not at all, in the precision that the spec names."""
    from safetensors.numpy import save

    tensors: dict[str, NDArray[Any]] = {"token_ids": program.token_ids.astype(np.int32)}
    for name, values in program.weights.items():
        if name in VECTORS:
            tensors[name] = values.astype(np.float32)
        elif program.spec.precision == "int8":
            tensors[f"{name}.codes"], tensors[f"{name}.scales"] = quantise(values)
        elif program.spec.precision == "bf16":
            tensors[f"{name}.bf16"] = bfloat16.bits(values)
        else:
            tensors[name] = values.astype(_STORED[program.spec.precision])
    tensors = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    metadata = {
        "mirror_sd_draft": FORMAT_VERSION,
        "spec": json.dumps(asdict(program.spec)),
        "tensors": _digest(tensors),
    }
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(_in_order(save(tensors, metadata)))
    partial.replace(path)


def _digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    made = sha256()
    for name, values in sorted(tensors.items()):
        made.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        made.update(np.ascontiguousarray(values).data)
    return made.hexdigest()


def _in_order(content: bytes) -> bytes:
    """The same file with its metadata sorted: safetensors writes it in another order each time,
    and equal drafts are to be equal files."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return safetensors_writer.framed(header) + content[end:]


def read(path: Path) -> DraftProgram:
    """Raises `ModelError` saying what is wrong with the file."""
    metadata, tensors = _contents(path, has_tensors=True)
    spec = _spec(path, metadata)
    if metadata.get("tensors") != _digest(tensors):
        raise ModelError(
            f"the draft {path} is damaged: its tensors are not those that were written"
        )
    weights = {name: _weight(path, tensors, name, shape) for name, shape in spec.shapes().items()}
    return DraftProgram(spec, _token_ids(path, tensors, spec), weights)


def read_spec(path: Path) -> DraftSpec:
    """The header alone. Raises `ModelError`."""
    return _spec(path, _contents(path, has_tensors=False)[0])


def _contents(
    path: Path, *, has_tensors: bool
) -> tuple[Mapping[str, str], Mapping[str, NDArray[Any]]]:
    from safetensors import SafetensorError, safe_open

    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is not a regular file")
        with safe_open(path, framework="numpy") as file:
            names = file.keys() if has_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot read the draft {path}: {error}") from error
    except (AttributeError, TypeError) as error:
        # So it is told of formats of numbers that numpy has not: bfloat16, float8.
        raise ModelError(f"cannot read the numbers of the draft {path}: {error}") from error
    for name, values in tensors.items():
        # It has them all in a process that imported JAX.
        if values.dtype not in _FORMATS:
            raise ModelError(
                f"cannot read the numbers of the draft {path}: {name} is {values.dtype}"
            )
    return metadata, tensors


def check_target(
    path: Path,
    spec: DraftSpec,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    tokenizer: str,
) -> None:
    """Raises `DraftMismatch` naming the reason if the draft was made for another target."""
    reasons = [
        f"{what} is {theirs}, the target's is {ours}"
        for what, theirs, ours in (
            ("its vocabulary", spec.vocab_size, vocab_size),
            ("its hidden size", spec.hidden_size, hidden_size),
        )
        if theirs != ours
    ]
    if spec.tokenizer != tokenizer:
        reasons.append("its tokenizer is another one than the target's")
    if max(spec.taps) > num_layers:
        reasons.append(f"it wants layer {max(spec.taps)} of a target that has {num_layers}")
    if reasons:
        raise DraftMismatch(
            f"the draft {path}, made for {spec.target[:200]!r}, does not fit: " + "; ".join(reasons)
        )


def _spec(path: Path, metadata: Mapping[str, str]) -> DraftSpec:
    version = metadata.get("mirror_sd_draft")
    if version != FORMAT_VERSION:
        raise ModelError(f"{path} is no draft of format {FORMAT_VERSION}: it says {version!r}")
    try:
        stated = json.loads(metadata["spec"])
        wanted = {field.name for field in fields(DraftSpec)}
        if set(stated) != wanted:
            raise ValueError(f"its fields are not {', '.join(sorted(wanted))}")
        spec = DraftSpec(**{**stated, "taps": tuple(stated["taps"])})
        sizes = (
            spec.vocab_size,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.draft_vocab_size,
            *spec.taps,
        )
        if not all(type(size) is int and 0 < size < 2**24 for size in sizes) or not spec.taps:
            raise ValueError("a size is not a positive whole number")
        if list(spec.taps) != sorted(set(spec.taps)) or spec.precision not in get_args(Precision):
            raise ValueError("its taps or its precision are not valid")
        if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
            raise ValueError("its attention heads do not divide")
        if not (1 <= spec.rope_theta <= 1e12 and 0 < spec.rms_eps < 1):
            raise ValueError("rope_theta must be from 1 to 1e12, rms_eps between 0 and 1")
        if not isinstance(spec.target, str) or not isinstance(spec.tokenizer, str):
            raise ValueError("its target and its tokenizer must be text")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"the draft {path} has a bad spec: {error}") from error
    return spec


def _weight(
    path: Path, tensors: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]
) -> Float32:
    if f"{name}.codes" in tensors:
        codes, scales = tensors[f"{name}.codes"], tensors.get(f"{name}.scales")
        groups = -(-shape[-1] // GROUP)
        if codes.shape != shape or scales is None or scales.shape != (shape[0], groups):
            raise ModelError(f"the draft {path}: {name} has the wrong shape")
        values = dequantise(codes, scales)
    elif f"{name}.bf16" in tensors:
        values = bfloat16.widened(tensors[f"{name}.bf16"])
    elif name in tensors:
        values = tensors[name].astype(np.float32)
    else:
        raise ModelError(f"the draft {path}: {name} is missing")
    if values.shape != shape:
        raise ModelError(
            f"the draft {path}: {name} has shape {list(values.shape)}, not {list(shape)}"
        )
    if not np.isfinite(values).all():
        raise ModelError(f"the draft {path}: {name} holds values that are not finite")
    return values


def _token_ids(
    path: Path, tensors: Mapping[str, NDArray[Any]], spec: DraftSpec
) -> NDArray[np.int32]:
    ids = tensors.get("token_ids")
    if ids is None or ids.dtype != np.int32 or ids.shape != (spec.draft_vocab_size,):
        raise ModelError(f"the draft {path}: token_ids is missing or has the wrong shape")
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= spec.vocab_size:
        raise ModelError(f"the draft {path}: token_ids must ascend within the vocabulary")
    return ids
