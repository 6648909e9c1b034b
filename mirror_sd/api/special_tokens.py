"""Special tokens in text: those that a user typed, and those that a template wrote.

Text that a user typed stays text even if it spells a special token: a sentinel character, one that
occurs in no message, is put into each such spelling before the template is rendered. What is still
whole in the rendered text is real.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer as Encoder

# Unicode's non-characters, meant for a program's own use, then the private use area, then all else.
_SENTINELS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0x10000, 0x110000))


class SpecialTokens:
    """The spellings of special tokens: making typed ones harmless, finding real ones."""

    def __init__(self, encoder: Encoder) -> None:
        added = encoder.get_added_tokens_decoder().items()
        specials = {token.content: (id, token) for id, token in added if token.special}
        self._ids = {content: id for content, (id, _) in specials.items()}
        longest_first = sorted(specials, key=len, reverse=True)
        starts = {content[:length] for content in specials for length in range(1, len(content))}
        self._starts = tuple(starts)
        # Begins with plain characters, which `re` finds much faster than it tries a look-ahead
        # everywhere: a text of megabytes must not hold the interpreter lock for long. Where the
        # beginning of one token and the rest of another meet, a needless sentinel does no harm.
        firsts = "".join({re.escape(content[0]) for content in specials})
        rests = "|".join(re.escape(content[1:]) for content in longest_first)
        self._typed = re.compile(f"[{firsts}](?=(?:{rests}))" if specials else "(?!)")
        self._real = re.compile(
            "|".join(
                (r"\s*" if token.lstrip else "")
                + re.escape(content)
                + (r"\s*" if token.rstrip else "")
                for content in longest_first
                for token in (specials[content][1],)
            )
            or "(?!)"
        )

    def defuse(self, text: str, sentinel: str) -> str:
        """`text` with `sentinel` inside every special token it spells, and after a beginning of one
        at its end, which the template could otherwise complete."""
        text = self._typed.sub(rf"\g<0>{sentinel}", text)
        return text + sentinel if text.endswith(self._starts) else text

    def split(self, text: str) -> list[int | str]:
        """Special-token ids and the texts between them, in order, empty texts left out."""
        parts: list[int | str] = []
        end = 0
        for match in self._real.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            found = match[0]
            parts.append(self._ids[found if found in self._ids else found.strip()])
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts


def absent_character(texts: Sequence[str]) -> str:
    """A character that occurs in none of `texts`, to serve as the sentinel."""
    return next(
        character
        for character in map(chr, chain(*_SENTINELS))
        if not any(character in text for text in texts)
    )
