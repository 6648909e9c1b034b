import re

from mirror_sd.training.prompts import Conversation, bundled


def text(conversation: Conversation) -> str:
    return "\n".join(m["content"] for m in conversation.messages)


def test_every_prompt_is_a_conversation_that_the_target_can_answer() -> None:
    for conversation in bundled(7):
        roles = [m["role"] for m in conversation.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], conversation.origin
        assert [m["role"] for m in conversation.messages].count("system") <= 1
        assert all(m["content"].strip() for m in conversation.messages), conversation.origin
        assert conversation.lang in ("en", "zh")


def test_no_slot_is_left_open() -> None:
    for conversation in bundled(7):
        assert not re.search(r"\{\{|\}\}|#{2}", text(conversation)), conversation


def test_no_prompt_is_given_twice() -> None:
    prompts = bundled(7, variants=10)
    assert len({text(p) for p in prompts}) == len(prompts)


def test_the_seed_alone_decides_the_prompts_and_their_order() -> None:
    assert bundled(7) == bundled(7)
    assert {text(p) for p in bundled(7)} != {text(p) for p in bundled(8)}


def test_every_line_is_met_once_before_any_is_met_again() -> None:
    prompts = bundled(7)
    lines = len({p.origin for p in prompts})
    assert len({p.origin for p in prompts[:lines]}) == lines


def test_a_slot_says_the_same_wherever_a_conversation_says_it_and_its_second_value_differs() -> (
    None
):
    pairs = [
        re.fullmatch(r"Should I learn (.+) or (.+)\?", p.messages[-1]["content"])
        for p in bundled(7, variants=20)
    ]
    found = [pair for pair in pairs if pair]
    assert found and all(pair[1] != pair[2] for pair in found)
