"""A small tokenizer for stacks in which everything is emulated and no model is at hand.

Byte-level, with a few whole words, trained in a moment on the text below; the files are those of
`tokenizer_files`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mirror_sd.uir.tokenizer_files import FACTS, TEMPLATE, TOKENIZER

_MAX_CONTEXT = 8192
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "the morning light was soft and the water in the garden was clear while people came to sit "
    "under the old tree with bread tea and time to talk about what they had seen that day "
    "system user assistant how do I reset my password where is my order please help me with it "
    "thank you for your answer can you tell me when it will arrive and what it costs "
)


def export(ref: str, target: Path) -> str:
    """Write the three files for a model named `ref` into `target`; returns its served name."""
    target.mkdir(parents=True, exist_ok=True)
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Twice: a pair must occur more than once to become a token.
    encoder.train_from_iterator([_TEXT, _TEXT], trainer)
    encoder.save(str(target / TOKENIZER))
    (target / TEMPLATE).write_text(_TEMPLATE, encoding="utf-8")
    name = Path(ref).name.removesuffix(".gguf") or "emulated"
    facts = {
        "name": name,
        "max_context": _MAX_CONTEXT,
        "vocab_size": encoder.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_ids": [0, 2],
        "add_bos": False,
    }
    (target / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return name
