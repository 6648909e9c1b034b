"""What makes two texts similar (a MinHash signature) and what keeps them apart (their terms).

Shingles are runs of one to three tokens: a token is a word where words are written apart, and a
character in Han, Kana, Hangul, Thai and their like. Case, spaces and punctuation do not count, and
every number is the same one: an answer about another order number is still the best of drafts.
What must not be the same for an answer to be shared is what `partition_terms` keeps.

Signatures are datasketch's (scheme affine32), whose import takes a second: it is made when the
first signature is.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

Signature = npt.NDArray[np.uint32]

# The beginning and the end of a text say what it asks; the middle of a pasted document does not.
MAX_CHARACTERS = 16_000

# Scripts whose words are not written apart: a token is a character.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_TOKEN = re.compile(rf"[0-9]+|[{_UNSPACED}]|[^\W0-9{_UNSPACED}]+")

_SECOND = np.uint32(0x9E3779B1)
_THIRD = np.uint32(0x85EBCA77)


def signature_of(text: str, permutations: int) -> bytes:
    """The MinHash signature of a text, `permutations` uint32 in little endian; empty for a text
    without a word. Equal texts up to case, spaces, punctuation and digits have equal ones."""
    hashes = _shingle_hashes(_tokens(text))
    if not len(hashes):
        return b""
    factors, offsets = _permutations(permutations)
    # As MinHash.update_batch of scheme affine32, in the layout that is five times as fast.
    values = np.multiply.outer(factors, _mixed(hashes))
    values += offsets
    return bytes(values.min(axis=1).astype("<u4").tobytes())


def similarity(one: Signature, other: Signature) -> float:
    """The estimate of the Jaccard similarity of two signatures of the same length."""
    return float(np.count_nonzero(one == other)) / len(one)


def read(signature: bytes) -> Signature:
    """The numbers of a signature; raises `ValueError` for bytes that are none."""
    return np.frombuffer(signature, dtype="<u4")


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        text = text[: MAX_CHARACTERS // 2] + "\n" + text[-MAX_CHARACTERS // 2 :]
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def _shingle_hashes(tokens: list[str]) -> npt.NDArray[np.uint32]:
    one = np.fromiter(map(_token_hash, tokens), dtype=np.uint32, count=len(tokens))
    if len(one) < 2:
        return one
    two = one[:-1] * _SECOND + one[1:]
    three = two[:-1] * _THIRD + one[2:]
    return np.concatenate((one, two, three))


@lru_cache(maxsize=16_384)
def _token_hash(token: str) -> int:
    return zlib.crc32(b"0" if token.isdigit() else token.encode("utf-8", "replace"))


def _mixed(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The finaliser of MurmurHash3, with which datasketch prepares affine permutations."""
    mixed = hashes ^ (hashes >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


@cache
def _permutations(count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    from datasketch import MinHash

    factors, offsets = MinHash(num_perm=count, scheme="affine32").permutations
    return factors, offsets[:, None]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Number words, dates and sizes: what changes an answer as digits do.
_NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
    " hundred hundreds thousand thousands million billion first second third fourth fifth sixth"
    " seventh eighth ninth tenth half halves quarter quarters once twice thrice double triple both"
    " single pair pairs dozen dozens couple few several many all each every some any only more less"
    " most least xs s m l xl xxl xxxl am pm before after above below over under inside outside"
    " on off in out up down already still yet too again plus minus next last previous"
    " eleventh twelfth hundredth thousandth millionth trillion trillions millions billions"
    " monday tuesday wednesday thursday friday saturday sunday today tomorrow yesterday"
    " mon tue tues wed thu thur thurs fri sat sun noon midnight morning evening night tonight"
    " hourly daily weekly monthly quarterly yearly annually"
    " january february march april june july august september october november december"
    " jan feb mar apr jun jul aug sep sept oct nov dec"
    " eins zwei drei vier funf sechs sieben acht neun zehn un une deux trois quatre cinq dix"
    " uno dos tres cuatro cinco seis siete ocho nueve diez"
)
_NEGATIONS = _words(
    "not no never none nobody nothing nowhere neither nor without cannot cant dont doesnt didnt"
    " wont wouldnt couldnt shouldnt isnt arent wasnt werent havent hasnt hadnt aint neednt mustnt"
    " mightnt shant darent oughtnt forbid forbids forbidden ban banned prevent prevents prevented"
    " prohibit prohibits prohibited reject rejects rejected decline declined nay nope hardly"
    " barely scarcely seldom rarely except excluding unless instead fail fails failed lack lacks"
    " lacking refuse refused deny denied false wrong against avoid stop stopped cancel cancelled"
    " nicht kein keine keinen keiner nie niemals ohne weder ne pas jamais sans aucun aucune rien"
    " nunca sin jamas ningun ninguna tampoco nada non mai senza nao sem nem"
    " не нет ни без никогда нельзя"
)
_NEGATIVE_FORM = re.compile(
    r"(?:un|dis|mis|non|il(?=l)|im(?=[mp])|ir(?=r)|in)\w{3,}|\w{2,}less|\w*n't"
)
# Numbers that are written as a form, Roman ones, and single letters: plan B, size XL, version II.
_NUMBER_FORM = re.compile(
    r"(?:thir|four|fif|six|seven|eigh|nine)teen(?:th)?"
    r"|(?:twen|thir|four|for|fif|six|seven|eigh|nine)t(?:y|ies|ieth)"
    r"|(?=..)x{0,3}(?:ix|iv|v?i{0,3})|[b-hj-z]"
)
# Signs that are part of what is asked: C# and C++, 5 $ and 5 €, a < b, thumbs up and down. A dash
# is one before a number only.
_SIGNS = "#%&*@/\\§‰-!"
# One apostrophe, and nothing that cannot be seen: neither may hide a negation.
_AS_SEEN = str.maketrans(
    dict.fromkeys("’‘`´ʼʹ′‛", "'")
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")
)
# And what turns a number round: before, after, above, below, inside, outside.
_HAN_NUMBERS = (
    "前后後上下内內外零〇一二三四五六七八九十百千万萬"
    "亿億两兩半双雙壹贰叁肆伍陆柒捌玖拾廿卅卌俩仨几幾数每全都"
    "今明昨去早晚"
)
_HAN_NEGATIONS = "不没沒无無未别別勿非否莫毋休禁拒免缺反甭弗"
_KANA_NEGATIONS = ("ない", "ません", "なし", "なく", "なけ")
_THAI_NEGATION = "ไม่"
_HANGUL_NEGATIONS = "안않못없아니말"
_ACCENTED = re.compile("[\u00c0-\u024f]")
_TERM = re.compile(
    r"[a-z]*[0-9](?:[a-z0-9]|[.,:/](?=[0-9]))*"
    rf"|[{_HAN_NUMBERS}]"
    rf"|[{_HAN_NEGATIONS}{_HANGUL_NEGATIONS}][{_UNSPACED}]?"
    rf"|{'|'.join(_KANA_NEGATIONS)}|{_THAI_NEGATION}"
    rf"|[^\W0-9_{_UNSPACED}]+(?:'[^\W0-9_{_UNSPACED}]+)?"
    r"|(?<!\w)-(?=\s?[0-9])|!(?=[\w=])|[^\w\s!-]"
)


def partition_terms(text: str) -> tuple[str, ...]:
    """What two texts must have in common, in this order, for one answer to serve both: numbers in
    digits and words, codes, dates, sizes, signs, and negations with the word that follows each.

    It errs on the side of more terms, because too many cost a shared answer and too few a wrong
    one. Complete for English and Chinese; for other languages it knows the common negations."""
    folded = unicodedata.normalize("NFKC", text.translate(_AS_SEEN)).casefold()
    terms: list[str] = []
    follows = False
    for word in _TERM.findall(_without_accents(folded).replace("–", "-")):
        is_negation, is_term = _kind(word)
        is_word = word[0].isalnum()
        if is_term or (follows and is_word):
            terms.append(word)
        if is_word:
            follows = is_negation
    return tuple(terms)


@lru_cache(maxsize=16_384)
def _kind(word: str) -> tuple[bool, bool]:
    """Whether a word is a negation, and whether it is one, a number or a sign."""
    is_negation = _is_negation(word)
    return is_negation, is_negation or _is_number(word) or _is_sign(word)


def _is_number(word: str) -> bool:
    return (
        any(c.isnumeric() for c in word)
        or word in _NUMBERS
        or word in _HAN_NUMBERS
        or _NUMBER_FORM.fullmatch(word) is not None
    )


def _is_sign(word: str) -> bool:
    return word in _SIGNS or unicodedata.category(word[0])[0] == "S"


def _is_negation(word: str) -> bool:
    return (
        word in _NEGATIONS
        or word[0] in _HAN_NEGATIONS
        or word[0] in _HANGUL_NEGATIONS
        or word in _KANA_NEGATIONS
        or word == _THAI_NEGATION
        or _NEGATIVE_FORM.fullmatch(word) is not None
    )


def _without_accents(text: str) -> str:
    # Of Latin letters only: in other scripts the marks make another letter.
    return _ACCENTED.sub(lambda found: unicodedata.normalize("NFD", found[0])[0], text)
