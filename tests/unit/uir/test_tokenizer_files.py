"""The exported tokenizer against transformers', and the facts beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import tokenizer_files

TEXTS = [
    "Hello world, it's 12345 and 3.14! I'd've said $1,000 by 10:45.",
    "你好，世界！我的订单号是 40733，什么时候发货？",
    "🎉👩‍👩‍👧‍👦 emoji 🇨🇳 and naïve café e\u0301",
    "def f(x):\n    return x**2 + 10\n\n\nclass A:\n\tpass  # done\n",
    "  leading and trailing   spaces  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "\x00\x7f\r\n\u200b\ufffd",
    "1. one\n2. two\n10. ten",
]


@pytest.fixture(scope="module")
def exported(default_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export")
    tokenizer_files.export(default_model, target)
    return target


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: Path) -> Iterator[Path]:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def test_tokens_equal_those_of_transformers(exported: Path, default_model: ModelFiles) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(default_model.path.parent), gguf_file=default_model.path.name
    )
    ours = Tokenizer.from_file(str(exported / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_white_space_before_a_digit_is_split_as_in_training(exported: Path) -> None:
    # The rule "smollm" splits digits off before anything else, so white space in front of one is
    # merged by itself; transformers reads GGUF files without that rule and gives two line feeds.
    ours = Tokenizer.from_file(str(exported / "tokenizer.json"))
    assert ours.encode("x\n\n1").tokens == ["x", "ĊĊ", "1"]
    assert ours.encode("x\n\ny").tokens == ["x", "Ċ", "Ċ", "y"]


def test_the_facts_of_the_default_model(exported: Path) -> None:
    assert json.loads((exported / "model.json").read_text()) == {
        "name": "smollm2-135m-instruct",
        "max_context": 8192,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_ids": [0, 2],
        "add_bos": False,
    }
    assert "<|im_start|>" in (exported / "chat_template.jinja").read_text()


def test_a_second_export_comes_from_the_cache(
    default_model: ModelFiles, tmp_path: Path, own_cache: Path
) -> None:
    tokenizer_files.export(default_model, tmp_path / "one")
    (cached,) = (own_cache / "tokenizers").iterdir()
    (cached / "chat_template.jinja").write_text("marked")
    renamed = ModelFiles("other", default_model.path, "gguf")
    tokenizer_files.export(renamed, tmp_path / "two")
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "marked"
    assert json.loads((tmp_path / "two" / "model.json").read_text())["name"] == "other"


def test_a_cache_that_cannot_be_written_is_no_error(
    default_model: ModelFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "file"))
    tokenizer_files.export(default_model, tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("hi").ids
    assert any("not cached" in line for line in caplog.messages)


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str, **fields: Any) -> Any:
    """Metadata of a byte-level tokenizer: all bytes, a few words, two control tokens."""
    tokens = [*BYTES, "12", "123", "Ġ1", "ab", "<|end|>", "<|im_end|>"]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(fields.get("tokens", tokens))
        writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
        writer.add_token_merges(fields.get("merges", ["1 2", "12 3", "Ġ 1", "a b"]))
        writer.add_eos_token_id(len(tokens) - 2)

    return add


def exported_tiny(tiny_gguf: Any, directory: Path, tokenizer: Any, vocabulary: int) -> Path:
    import numpy as np

    tiny = tiny_gguf()
    tiny.tensors["token_embd.weight"] = np.zeros((vocabulary, 64), np.float32)
    tiny.tokenizer = tokenizer
    path = tiny.write(directory / "tiny.gguf")
    tokenizer_files.export(ModelFiles("tiny", path, "gguf"), directory / "out")
    return directory / "out"


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("llama-bpe", ["123", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("gpt-2", ["123", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
    ],
)
def test_digits_are_split_by_the_files_own_rule(
    tiny_gguf: Any, tmp_path: Path, pre: str, digits: list[str]
) -> None:
    out = exported_tiny(tiny_gguf, tmp_path, byte_level(pre), 262)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("12345").tokens == digits
    facts = json.loads((out / "model.json").read_text())
    assert facts["eos_token_ids"] == [260, 261]  # the stated one and <|im_end|>
    assert facts["add_bos"] is (pre in ("llama-bpe", "tekken"))


def test_bad_tokenizers_are_named(tiny_gguf: Any, tmp_path: Path) -> None:
    cases = [
        (byte_level("klingon"), 262, UnsupportedModel, "pre-tokenizer 'klingon'"),
        (byte_level("qwen2", merges=["x y"]), 262, ModelError, "merge 'x y' does not fit"),
        (byte_level("qwen2"), 100, ModelError, "262 tokens for 100 embeddings"),
        (lambda writer: None, 262, ModelError, "holds no tokenizer"),
    ]
    for tokenizer, vocabulary, kind, message in cases:
        with pytest.raises(kind, match=message):
            exported_tiny(tiny_gguf, tmp_path, tokenizer, vocabulary)
        assert not (tmp_path / "out" / "model.json").exists()


def test_sentence_pieces_are_merged_by_their_scores(tiny_gguf: Any, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scored = {"▁": -9.0, "h": -8.0, "e": -7.0, "l": -6.0, "o": -5.0, "he": -1.0, "el": -0.5}
    scored |= {"▁h": -3.0, "lo": -1.5, "▁he": -0.1}

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*pieces, *scored])
        writer.add_token_scores([0.0] * len(pieces) + list(scored.values()))
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(scored))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    out = exported_tiny(tiny_gguf, tmp_path, add, 3 + 256 + len(scored))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = tokenizer.encode("hello 你", add_special_tokens=False)
    # "el" scores best, so "he" can no longer form; the Chinese character falls back to bytes.
    assert encoded.tokens == ["▁h", "el", "lo", "▁", "<0xE4>", "<0xBD>", "<0xA0>"]
    assert tokenizer.decode(encoded.ids) == "hello 你"
    assert json.loads((out / "model.json").read_text())["add_bos"] is True


def directory_with(tmp_path: Path, **changes: Any) -> ModelFiles:
    """A Qwen2-like directory; a None leaves the file out."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<s>", "<e>", "<|im_end|>")]
    )
    if changes.pop("bos_in_template", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    contents = {
        "config.json": {
            "model_type": "qwen2",
            "vocab_size": 300,
            "max_position_embeddings": 512,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            **sizes,
        },
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": "<e>"},
        "generation_config.json": {"eos_token_id": [257, 299]},
        **changes,
    }
    for name, content in contents.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
    return ModelFiles("dir", tmp_path, "safetensors")


def facts_of(files: ModelFiles, tmp_path: Path) -> dict[str, Any]:
    tokenizer_files.export(files, tmp_path / "out")
    return json.loads((tmp_path / "out" / "model.json").read_text())


def test_a_directory_states_all_its_end_tokens(tmp_path: Path) -> None:
    assert facts_of(directory_with(tmp_path), tmp_path) == {
        "name": "dir",
        "max_context": 512,
        "vocab_size": 300,
        "bos_token_id": 256,
        "eos_token_ids": [257, 258, 299],
        "add_bos": False,
    }
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_directory_adds_bos_where_its_tokenizer_does(tmp_path: Path) -> None:
    files = directory_with(tmp_path, bos_in_template=True)
    assert facts_of(files, tmp_path)["add_bos"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template.jinja": "T", "tokenizer_config.json": {"chat_template": "other"}},
        {"tokenizer_config.json": {"chat_template": "T"}},
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "rag", "template": "other"},
                    {"name": "default", "template": "T"},
                ]
            }
        },
    ],
)
def test_a_directorys_template_is_found(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer_files.export(directory_with(tmp_path, **changes), tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "T"


def test_a_directory_of_another_family_still_has_facts(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 77}
    facts = facts_of(directory_with(tmp_path, **{"config.json": config}), tmp_path)
    assert (facts["max_context"], facts["vocab_size"]) == (77, 300)


def test_a_damaged_or_missing_tokenizer_is_named(tmp_path: Path) -> None:
    for content in (None, "{", "[]"):
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        files = directory_with(tmp_path, **{"tokenizer.json": content})
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            tokenizer_files.export(files, tmp_path / "out")
