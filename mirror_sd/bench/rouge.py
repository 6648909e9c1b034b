"""ROUGE-L of answers against references, by the `rouge-score` package.

Its own tokenizer drops every character but a-z and 0-9, so a Chinese answer would have no token at
all. `WordSplitter` gives the same tokens for such text, and for the rest: each Han, kana or Hangul
character by itself, other words whole.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from mirror_sd.errors import SetupError

# Scripts that are written without spaces: kana, Han with its extensions, Hangul.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003fffd"
_TOKEN = re.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}_])\w)+")


class WordSplitter:
    """A tokenizer as `rouge_score` takes it."""

    def tokenize(self, text: str) -> list[str]:
        return _TOKEN.findall(text.lower())


def rouge_l(references: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The F-measure of each pair, 0 to 1. Raises `SetupError` as `scorer` does."""
    found = scorer()
    return [
        float(found.score(reference, answer)["rougeL"].fmeasure)
        for reference, answer in zip(references, answers, strict=True)
    ]


def scorer() -> Any:
    """The package's own. Raises `SetupError` without it."""
    try:
        module: Any = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise SetupError(
            "ROUGE-L needs rouge-score, which is missing: pip install -e '.[bench]' in the clone"
        ) from error
    return module.RougeScorer(["rougeL"], tokenizer=WordSplitter())
