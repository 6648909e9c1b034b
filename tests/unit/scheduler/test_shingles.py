"""Which texts are alike, and which must never share an answer however alike they are."""

from __future__ import annotations

import numpy as np
import pytest
from datasketch import MinHash
from hypothesis import given
from hypothesis import strategies as st

from mirror_sd.messages import SamplingParams
from mirror_sd.scheduler import shingles
from mirror_sd.scheduler.merge_profile import profile_of, texts_of
from mirror_sd.scheduler.shingles import partition_terms, read, signature_of, similarity

PERMUTATIONS = 128


def alike(one: str, other: str) -> float:
    sketches = [read(signature_of(text, PERMUTATIONS)) for text in (one, other)]
    return similarity(*sketches)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Where is my parcel? It left on 3 May.", "  where is\tMY parcel?\n it left on 3 may."),
        ("Order HP-50112 is late by 6 days.", "Order HP-50121 is late by 9 days."),
        ("我的订单 123 到哪里了？昨天就该到了。", " 我的订单123 到哪里了？ 昨天就该到了。\n"),
        ("Ｏｒｄｅｒ　１２ is late", "order 34 is late"),
    ],
)
def test_case_spaces_and_digits_do_not_count(one: str, other: str) -> None:
    assert alike(one, other) == 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Can I return the lamp if the box is open?", "May I return the lamp if the box is open?"),
        ("我可以取消订单 51 吗？它已经发货了。", "我能取消订单 51 吗？它已经发货了。"),
        ("รถไฟขบวนนี้ออกกี่โมงครับ", "รถไฟขบวนนั้นออกกี่โมงครับ"),
    ],
)
def test_a_word_more_or_less_leaves_texts_alike(one: str, other: str) -> None:
    assert 0.5 < alike(one, other) < 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Where is my parcel?", "Is the oak stool back in stock?"),
        ("我的订单到哪里了？", "Where is my order?"),
        ("我的订单到哪里了？", "这款茶适合晚上喝吗？"),
    ],
)
def test_other_questions_are_not_alike(one: str, other: str) -> None:
    assert alike(one, other) < 0.3


@pytest.mark.parametrize("text", ["", "  \n", "?!…", "😀"])
def test_a_text_without_a_word_has_no_signature(text: str) -> None:
    assert signature_of(text, PERMUTATIONS) == b""


@given(st.text(max_size=60), st.integers(16, 200))
def test_any_text_has_the_signature_that_datasketch_gives_its_shingles(
    text: str, permutations: int
) -> None:
    hashes = shingles._shingle_hashes(shingles._tokens(text))
    signature = signature_of(text, permutations)
    if not len(hashes):
        assert signature == b""
        return
    sketch = MinHash(num_perm=permutations, scheme="affine32", hashfunc=int)
    sketch.update_batch(hashes.tolist())
    assert np.array_equal(read(signature), sketch.hashvalues)


def test_a_pasted_document_costs_no_more_than_its_ends_and_shares_no_answer() -> None:
    ends = "a" + " first words" * 800
    document = f"{ends} {'middle ' * 100_000} {ends}"
    assert alike(document, document.replace("middle", "other")) == 1.0
    assert profile(user_text=document).partition == b""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Order HP-50112 is late", "Order HP-50121 is late"),
        ("Pay back 32.50", "Pay back 23.50"),
        ("Make it 190 cm long, not 180 cm", "Make it 180 cm long, not 190 cm"),
        ("I have two left gloves", "I have three left gloves"),
        ("两个碗碎了", "三个碗碎了"),
        ("Size M, please", "Size L, please"),
        ("It comes on Tuesday", "It comes on Wednesday"),
        ("Code SPRUCE10", "Code SPRUCE15"),
        ("The box is open", "The box is not open"),
        ("Do not offer a coupon", "Do offer a coupon"),
        ("I can eat nuts", "I cannot eat nuts"),
        ("I can eat nuts", "I can't eat nuts"),
        ("I can eat nuts", "I can’t eat nuts"),
        ("I have the receipt", "I have no receipt"),
        ("Pause it without losing the price", "Pause it while losing the price"),
        ("I would not like A but B", "I would like A but not B"),
        ("It is opened", "It is unopened"),
        ("吊牌还在", "吊牌不在"),
        ("它已经发货了", "它还没发货"),
        ("我不可以留下，我要退", "我可以留下，我不要退"),
        ("Das ist neu", "Das ist nicht neu"),
        ("食べます", "食べません"),
        ("Это новое", "Это не новое"),
        ("I can log in", "I can´t log in"),
        ("I can log in", "I can`t log in"),
        ("I can log in", "I canʼt log in"),
        ("I can log in", "I can\u200bnot log in"),
        ("I do want it", "I do n't want it"),
        ("It may be forbidden", "It may be allowed"),
        ("我用它", "我甭用它"),
        ("It is 5 degrees here", "It is -5 degrees here"),
        ("It is 5 degrees here", "It is –5 degrees here"),
        ("What is 7 - 3?", "What is 7 + 3?"),
        ("Refund me 10 $", "Refund me 10 €"),
        ("Take 50 off", "Take 50% off"),
        ("Answer in C#", "Answer in C++"),
        ("Is a < b here?", "Is a > b here?"),
        ("Is it !ready or", "Is it ready or"),
        ("My verdict is 👍", "My verdict is 👎"),
        ("I am on plan B", "I am on plan C"),
        ("Chapter II, please", "Chapter III, please"),
        ("Chapter Ⅳ, please", "Chapter Ⅵ, please"),
        ("It comes on the eleventh", "It comes on the twelfth"),
        ("It comes on the thirteenth", "It comes on the thirtieth"),
        ("It comes in Jan", "It comes in Feb"),
        ("It came last week", "It comes next week"),
        ("今天到吗", "明天到吗"),
        ("我们俩", "我们仨"),
        ("٣ parcels", "٤ parcels"),
    ],
)
def test_numbers_and_negations_keep_texts_apart(one: str, other: str) -> None:
    assert partition_terms(one) != partition_terms(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Order HP-50112 is NOT late", "  order hp-50112 is\nnot   late "),
        ("May I return the open lamp?", "Can I return the open lamp?"),
        ("我能取消订单 51 吗？", "我可以取消订单51吗？"),
        ("It didn't - as I said - come", "it didn’t, as I said, come!"),
        ("Is HP-12 (the big one) here?", "is hp-12, the big one, here"),
    ],
)
def test_spaces_capitals_and_other_words_do_not(one: str, other: str) -> None:
    assert partition_terms(one) == partition_terms(other)


@given(st.text(max_size=80))
def test_any_text_has_terms(text: str) -> None:
    assert all(partition_terms(text))


GREEDY = SamplingParams(max_tokens=50, seed=7, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=50, seed=7, temperature=0.7)
BASE = {"tenant": "a", "model": "m", "prompt_ids": (1, 2), "params": GREEDY}
TEXTS = {"system_text": "be brief", "user_text": "Where is my parcel?"}


def profile(**changes: object):
    fields = {**BASE, **TEXTS, "permutations": PERMUTATIONS, "is_seed_chosen": False, **changes}
    return profile_of(**fields)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, "exact partition scope"),
        (
            {"params": SamplingParams(max_tokens=50, seed=8, temperature=0.0)},
            "exact partition scope",
        ),
        ({"tenant": "b"}, ""),
        ({"model": "n"}, ""),
        ({"prompt_ids": (1, 3)}, "partition scope"),
        ({"params": SamplingParams(max_tokens=51, seed=7, temperature=0.0)}, "scope"),
        ({"params": SAMPLED}, "scope"),
        ({"params": SAMPLED, "is_seed_chosen": True}, "scope"),
        ({"system_text": "be long"}, "exact scope"),
        ({"user_text": "Where is my second parcel?"}, "exact scope"),
    ],
)
def test_a_profile_changes_in_the_parts_that_it_must(change: dict, same: str) -> None:
    one, other = profile(), profile(**change)
    equal = [n for n in ("exact", "partition", "scope") if getattr(one, n) == getattr(other, n)]
    assert equal == same.split()


def test_where_chance_decides_the_answer_nothing_is_shared() -> None:
    drawn = profile(params=SAMPLED)
    assert drawn.exact == drawn.partition == b"" and drawn.signature
    chosen = profile(params=SAMPLED, is_seed_chosen=True)
    assert chosen.exact and chosen.partition


def test_uncompared_a_request_has_its_exact_digest_only() -> None:
    uncompared = profile(compare=False)
    assert uncompared.exact == profile().exact
    assert uncompared.signature == uncompared.partition == b""


def test_a_chat_is_parted_at_its_last_user_message() -> None:
    chat = [("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "three")]
    rest, last = texts_of(chat)
    assert last == "three"
    assert texts_of([*chat[:-1], ("user", "four")]) == (rest, "four")
    assert texts_of([("system", "t"), *chat[1:]])[0] != rest
    assert texts_of([*chat, ("assistant", "five")])[0] != rest
    assert texts_of([("system", "s")])[1] == ""
