"""The field `speculation` over HTTP: it chooses the drafts, and whatever is drafted, the answer,
with all that can be asked of it, is the one without. One tenant's text is never another's draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mirror_sd.keys import KeyFile, Limits
from tests.system.stack import MODEL, Stack, started, until

# Drafts are made whether or not they pay on the machine that runs this.
SETTINGS = (
    "server.gateways=1",
    "speculation.drafter=auto",
    "speculation.draft=none",
    "speculation.min_tokens=2",
)
TENANTS = ("ada", "bob", "cy", "dan")
HISTORY = {"source": "history"}
# The seed comes back in the answers, which are compared.
GREEDY = {"temperature": 0, "seed": 1}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 77}
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Stack]:
    with started(SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def tenants(drafting: Stack) -> Iterator[dict[str, httpx.Client]]:
    """A client of each tenant."""
    keys = KeyFile(drafting.keys)
    texts = {name: keys.add(name, "standard", Limits())[1] for name in TENANTS}
    until(lambda: all(map(drafting.knows, texts.values())), 5, "the keys hold")
    clients = {name: drafting.http(key) for name, key in texts.items()}
    yield clients
    for client in clients.values():
        client.close()


def ask(client: httpx.Client, text: str, speculation: Any, **fields: Any) -> Answer:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        "speculation": speculation,
    }
    answer = client.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    document: Answer = answer.json()
    return document


def drafts(answer: Answer) -> Answer:
    """Counts of each source."""
    sources: Answer = answer["usage"]["speculation"]["sources"]
    return sources


CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": SEEDED,
    "penalties": GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "penalties and a seed": SEEDED | {"presence_penalty": -1.0, "frequency_penalty": 1.2},
    # "," and "." are not to be had, " the" is dear.
    "logit bias": GREEDY | {"logit_bias": {"28": -100, "30": -100, "260": 4}},
    "several choices": SEEDED | {"n": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_drafted_from_the_tenants_history_or_a_hint_is_the_one_without_drafts(
    tenants: dict[str, httpx.Client], case: str
) -> None:
    client, fields = tenants["ada"], CASES[case]
    text = f"Where is my parcel? It is about {case}."
    plain = ask(client, text, "off", **fields)
    assert drafts(plain) == {}
    first = ask(client, text, HISTORY, **fields)
    again = ask(client, text, HISTORY, **fields)
    assert first["choices"] == again["choices"] == plain["choices"]
    assert set(drafts(again)) == {"history"}
    assert drafts(again)["history"]["accepted_tokens"] > 0
    assert (
        again["usage"]["speculation"]["verify_rounds"]
        < (plain["usage"]["speculation"]["verify_rounds"])
    )
    hinted = ask(client, text, "auto", **fields)
    assert hinted["choices"] == plain["choices"]
    assert set(drafts(hinted)) <= {"hint", "history", "lookup"} and drafts(hinted)


def test_a_stop_string_ends_a_drafted_answer_where_it_ends_a_plain_one(
    tenants: dict[str, httpx.Client],
) -> None:
    client, text = tenants["ada"], "Please list the opening hours of a tea shop."
    whole = ask(client, text, HISTORY, **GREEDY)["choices"][0]["message"]["content"]
    for begin in (3, len(whole) // 2, len(whole) - 6):
        stop = whole[begin : begin + 4]
        plain = ask(client, text, "off", stop=stop, **GREEDY)["choices"]
        assert plain[0]["message"]["content"] == whole[: whole.index(stop)]
        for speculation in (HISTORY, "auto"):
            assert ask(client, text, speculation, stop=stop, **GREEDY)["choices"] == plain


def test_a_streamed_answer_is_the_same_text_with_drafts(tenants: dict[str, httpx.Client]) -> None:
    client, text = tenants["ada"], "Where is my parcel? It is about greedy."
    plain = ask(client, text, "off", **GREEDY)["choices"][0]["message"]["content"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 24}
    extra = {"stream": True, "stream_options": {"include_usage": True}, "speculation": HISTORY}
    streamed = client.post("/v1/chat/completions", json=body | GREEDY | extra)
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [httpx.Response(200, text=event).json() for event in events]
    pieces = [choice["delta"].get("content") for c in chunks for choice in c["choices"]]
    assert "".join(piece or "" for piece in pieces) == plain
    assert drafts(chunks[-1])["history"]["accepted_tokens"] > 0


@pytest.mark.parametrize(("other", "speculation"), [("bob", HISTORY), ("cy", "auto")])
def test_another_tenants_text_is_never_a_draft(
    tenants: dict[str, httpx.Client], other: str, speculation: Any
) -> None:
    """`other` has asked nothing before, so that whatever history gave it would be another's."""
    text = f"Order 4711 of {speculation}: please send the invoice once more to my address."
    own = ask(tenants["ada"], text, speculation, **GREEDY)
    own_again = ask(tenants["ada"], text, speculation, **GREEDY)
    others = ask(tenants[other], text, speculation, **GREEDY)
    assert own["choices"][0]["message"] == others["choices"][0]["message"]
    assert {"history", "hint"} & set(drafts(own_again)), "the tenant itself has a draft of it"
    assert not {"history", "hint"} & set(drafts(others))
    assert others["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_request_limits_the_length_of_its_drafts_and_a_source_that_is_not_there_means_auto(
    tenants: dict[str, httpx.Client],
) -> None:
    client, text = tenants["dan"], "Count from one to twenty, with commas."
    short: dict[str, Any] = {"source": "lookup", "max_tokens": 1}
    for _ in range(2):
        answer = ask(client, text, short, **GREEDY)
        used = answer["usage"]["speculation"]
        assert set(drafts(answer)) <= {"lookup"}
        assert used["drafted_tokens"] <= used["verify_rounds"]
    answer = ask(client, text, {"source": "head"}, **GREEDY)
    assert drafts(answer) and "head" not in drafts(answer)


def test_a_wrong_speculation_is_told_by_its_path(tenants: dict[str, httpx.Client]) -> None:
    body = {"model": MODEL, "prompt": "a", "speculation": {"source": "tree"}}
    answer = tenants["ada"].post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "speculation.source" and '"history"' in error["message"]
