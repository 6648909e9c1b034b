"""The tokenizer inside a GGUF file, rebuilt in the `tokenizers` library's terms.

`tokenizer.ggml.pre` names the rule that splits text before merging. llama.cpp's
`llama-vocab.cpp` lists them; those of the families we run are here. transformers ignores the field
for the llama architecture and splits as GPT-2 does, which differs where white space meets a digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mirror_sd.errors import ModelError, UnsupportedModel

CONTROL, USER_DEFINED = 3, 4
# Words with at most three digits in a row, or one, as trained: Llama 3 and Qwen2.
SPLIT_BY_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = {
    "llama-bpe": SPLIT_BY_RULE % "{1,3}",
    "llama3": SPLIT_BY_RULE % "{1,3}",
    "llama-v3": SPLIT_BY_RULE % "{1,3}",
    "qwen2": SPLIT_BY_RULE % "",
    "deepseek-r1-qwen": SPLIT_BY_RULE % "",
    "tekken": TEKKEN,
}
SPLIT_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
SPLIT_AS_GPT2 = frozenset({"gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2"})
# Whole words are looked up before merging.
WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def build(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of an open GGUF file. Raises `ModelError` naming the file."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list(path, metadata, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if model == "gpt2":
        tokenizer = _byte_level(path, metadata, vocab)
    elif model == "llama":
        tokenizer = _sentence_piece(path, metadata, vocab)
    else:
        raise UnsupportedModel(f"{path}: the tokenizer model {model!r} is not supported")
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether prompts begin with the bos token; files older than the field follow llama.cpp."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return metadata.get("tokenizer.ggml.pre") in ADDS_BOS


def _list(path: Path, metadata: Mapping[str, Any], key: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values:
        raise ModelError(f"{path} holds no tokenizer: tokenizer.ggml.{key} is missing")
    return values


def _byte_level(path: Path, metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre") or "default"
    merges = [tuple(merge.split(" ", 1)) for merge in _list(path, metadata, "merges")]
    _check_merges(path, merges, vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in WORDS_FIRST))
    tokenizer.decoder = decoders.ByteLevel()
    if pre in REGEXES:
        split = pre_tokenizers.Split(Regex(REGEXES[pre]), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    elif pre in SPLIT_SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif pre in SPLIT_AS_GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        raise UnsupportedModel(f"{path}: the pre-tokenizer {pre!r} is not supported")
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _check_merges(path: Path, merges: list[tuple[str, ...]], vocab: Mapping[str, int]) -> None:
    for merge in merges:
        if len(merge) != 2 or merge[0] + merge[1] not in vocab or not vocab.keys() >= set(merge):
            raise ModelError(f"{path}: the merge {' '.join(merge)!r} does not fit its vocabulary")


def _sentence_piece(path: Path, metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """A byte-fallback BPE whose merges are ranked by the pieces' scores (Llama 2, Mistral 7B)."""
    scores = _list(path, metadata, "scores")
    if len(scores) != len(vocab):
        raise ModelError(f"{path}: {len(scores)} scores for {len(vocab)} tokens")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_ranked_merges(vocab, scores),
            unk_token=next((token for token, index in vocab.items() if index == unknown), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefixed else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _ranked_merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first; ties by the parts' ids."""
    found = []
    for piece, index in vocab.items():
        pairs = []
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                pairs.append((vocab[left], vocab[right], left, right))
        found += [(scores[index], left, right) for _, _, left, right in sorted(pairs)]
    found.sort(key=lambda entry: -entry[0])
    return [(left, right) for _, left, right in found]
