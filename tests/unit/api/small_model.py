"""Small tokenizers in the two families of real ones, trained on the spot from the text below."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from mirror_sd.api.tokenizer import ModelFacts, Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = (
    "How do I reset my password? You are helpful. system user assistant",
    "订单什么时候发货？请帮我查一下物流信息。",
    "def total(items):\n    return sum(item.price for item in items)\n",
    "Grüße 🙂 👩‍👩‍👧 naïve café   two  spaces\n\n\nlines",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<a>", "a><b")


def byte_level_encoder() -> Encoder:
    """BPE over bytes, as SmolLM, Qwen and Llama 3 have it; special ids come first."""
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    encoder.train_from_iterator(TEXTS, trainer)
    encoder.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return encoder


def sentencepiece_encoder(scheme: str = "first") -> Encoder:
    """BPE with byte fallback, as Mistral and Llama 2 have it."""
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({c for text in TEXTS[:1] for c in text if c != " "} | {"\u2581"})
    merges = [("\u2581", "a"), ("\u2581", "h"), ("e", "l"), ("\u2581", "\u2581")]
    words = [*specials, *bytes_, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {word: id for id, word in enumerate(dict.fromkeys(words))}
    encoder = Encoder(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    encoder.add_special_tokens([AddedToken(text, special=True) for text in specials])
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme=scheme, split=False
    )
    encoder.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return encoder


def metaspace_encoder() -> Encoder:
    """As `sentencepiece_encoder`, with the decoder that strips all spaces of the first token."""
    encoder = sentencepiece_encoder("always")
    encoder.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    return encoder


def wordpiece_encoder() -> Encoder:
    """A decoder that joins tokens by rules of its own."""
    words = ["[UNK]", "[CLS]", "hello", "wor", "##ld", "un", "##aff", "##able", ",", "do", "'", "t"]
    encoder = Encoder(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    encoder.normalizer = normalizers.Lowercase()
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece()
    encoder.add_special_tokens([AddedToken("[CLS]", special=True)])
    return encoder


def small_tokenizer(**facts: object) -> Tokenizer:
    """The byte-level tokenizer with a ChatML template and a context of 256 tokens."""
    encoder = byte_level_encoder()
    known = {
        "name": "small",
        "max_context": 256,
        "vocab_size": encoder.get_vocab_size(),
        "bos_token_id": encoder.token_to_id("<|im_start|>"),
        "eos_token_ids": (encoder.token_to_id("<|im_end|>"),),
    }
    return Tokenizer(encoder, CHATML, ModelFacts(**{**known, **facts}))  # type: ignore[arg-type]
