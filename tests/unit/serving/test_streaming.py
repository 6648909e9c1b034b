"""Events are put together from kept pieces; they must be what building each one anew gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import event
from mirror_sd.serving.intake import Caller, Intake, Plan
from mirror_sd.serving.streaming import ChunkWriter
from tests.unit.api.small_model import small_tokenizer

INTAKE = Intake(small_tokenizer(), 'a "quoted" \\ model é', 256, 10.0)
CALLER = Caller("id-1", "cpu", "standard", "default")


def plan_of(kind: str, **fields: Any) -> Plan:
    body: dict[str, Any] = {"model": INTAKE.model, "stream": True, **fields}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": "hello"}]
        return INTAKE.chat(json.dumps(body).encode(), CALLER)
    return INTAKE.completion(json.dumps(body | {"prompt": "hello"}).encode(), CALLER)


def built_anew(plan: Plan, delta: Delta) -> bytes:
    extra = {"usage": None} if plan.decoding.include_usage else {}
    wrapped = [plan.envelope.wrap([c], is_chunk=True) | extra for c in plan.form.chunks(delta)]
    return b"".join(map(event, wrapped))


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("options", [{}, {"include_usage": True}], ids=["", "usage"])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_an_event_of_text_is_the_same_from_its_kept_frame(
    kind: str, options: dict[str, bool], text: str
) -> None:
    plan = plan_of(kind, n=2, stream_options=options)
    writer = ChunkWriter(plan)
    openings = [writer.render(Delta(index, "first")) for index in (1, 0)]
    assert all(opening.count(b"data: ") == 2 for opening in openings)
    for index in (0, 1):
        delta = Delta(index, text)
        assert writer.render(delta) == built_anew(plan, delta)
        last = Delta(index, text, finish_reason="stop")
        assert writer.render(last) == built_anew(plan, last)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_event_with_logprobs_is_always_built_anew(kind: str) -> None:
    plan = plan_of(kind, logprobs=True if kind == "chat" else 1)
    writer = ChunkWriter(plan)
    writer.render(Delta(0, "first"))
    delta = Delta(0, "text")
    assert writer.render(delta) == built_anew(plan, delta)
