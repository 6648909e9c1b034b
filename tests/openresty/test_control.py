"""Real nginx: the admin server, and routing that follows policy, weights and load."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.openresty.stack import EDGE, Edge, chat, error_of, wait_until

pytestmark = pytest.mark.system
LONG = {"pad": "x" * 1000}


@pytest.fixture(autouse=True)
def undisturbed(wide_edge: Edge) -> None:
    """No weights of another test, and the project's own policy."""
    assert wide_edge.put_weights({}, version=0).status_code == 200
    assert wide_edge.admin("PUT", "/admin/policy", **as_lua(policy_text())).status_code == 200


def policy_text() -> str:
    return (EDGE / "lua" / "mirror" / "policy.lua").read_text()


def as_lua(text: str) -> dict[str, Any]:
    return {"content": text, "headers": {"Content-Type": "text/x-lua"}}


def classes_of(edge: Edge, body: dict[str, Any], count: int) -> Counter[str]:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat(edge, body), range(count)))
    return Counter(answer.json()["headers"]["x-mirror-device"] for answer in answers)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic token-of-the-tests", "Bearer"])
def test_without_its_token_the_admin_server_tells_nothing(
    wide_edge: Edge, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("/admin/state", "/admin/policy", "/nowhere"):
        answer = httpx.get(wide_edge.admin_url + path, headers=headers)
        assert answer.status_code == 401
        assert error_of(answer.content)["code"] == "invalid_admin_token"


def test_the_admin_server_has_no_other_paths_or_methods(wide_edge: Edge) -> None:
    assert wide_edge.admin("GET", "/gateway/state").status_code == 404
    assert wide_edge.admin("GET", "/v1/models").status_code == 404
    answer = wide_edge.admin("DELETE", "/admin/policy")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, PUT"
    assert error_of(answer.content)["code"] == "method_not_allowed"


def test_shares_over_a_thousand_requests_are_the_policys_within_two_points(
    wide_edge: Edge,
) -> None:
    # The band of a high rate would change them.
    policy = wide_edge.admin("GET", "/admin/policy").json() | {"qps_bands": [{}]}
    assert wide_edge.admin("PUT", "/admin/policy", json=policy).status_code == 200
    short = classes_of(wide_edge, {"a": 1}, 1000)
    assert abs(short["cpu"] - 700) <= 20 and abs(short["gpu"] - 300) <= 20
    long = classes_of(wide_edge, LONG, 200)
    assert abs(long["tpu"] - 120) <= 4 and abs(long["gpu"] - 80) <= 4


def test_a_heated_class_gets_less_until_the_document_is_stale(wide_edge: Edge) -> None:
    assert wide_edge.put_weights({"gpu": 0.0}).status_code == 200
    assert wide_edge.metric("mirror_edge_weights_stale") == 0
    assert wide_edge.metric('mirror_edge_class_factor{class="gpu"}') == 0
    assert classes_of(wide_edge, LONG, 40)["gpu"] == 0
    wait_until(lambda: wide_edge.metric("mirror_edge_weights_stale") == 1, 7)
    assert classes_of(wide_edge, LONG, 40)["gpu"] >= 12


def test_a_lying_document_is_refused_and_moves_nothing(wide_edge: Edge) -> None:
    refused = wide_edge.metric('mirror_edge_documents_refused_total{document="weights"}')
    assert wide_edge.put_weights({"gpu": 0.5}).status_code == 200
    for document in (
        b'{"version": 1, "at": NaN, "classes": {}}',
        b"not JSON",
        b'{"version": 1, "at": %d, "classes": {"gpu": {"factor": NaN}}}' % time.time(),
        b'{"version": 1, "at": %d, "classes": {"gpu": {"factor": -1}}}' % (time.time() + 1),
        b'{"version": 1, "at": %d, "classes": {"gpu": {"factor": 0}}}' % (time.time() - 3),
    ):
        answer = wide_edge.admin("PUT", "/admin/weights", content=document)
        assert answer.status_code == 400
        assert error_of(answer.content)["message"].startswith("weights: ")
    assert wide_edge.admin("GET", "/admin/weights").json()["classes"] == {"gpu": {"factor": 0.5}}
    sample = 'mirror_edge_documents_refused_total{document="weights"}'
    assert wide_edge.metric(sample) == refused + 5


def test_full_classes_are_passed_over_by_the_count_of_requests_in_flight(wide_edge: Edge) -> None:
    classes = {"gpu": {"factor": 1, "slots": 2}, "tpu": {"factor": 1, "slots": 3}}
    wide_edge.put_weights({}, classes=classes)
    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(chat, wide_edge, LONG | {"hold_s": 0.7}) for _ in range(8)]
        taken = Counter(one.result().json()["headers"]["x-mirror-device"] for one in held)
    assert taken == {"gpu": 2, "tpu": 3, "cpu": 3}
    wait_until(lambda: wide_edge.metric('mirror_edge_class_in_flight{class="cpu"}') == 0)
    for name in ("gpu", "tpu"):
        assert wide_edge.metric(f'mirror_edge_class_in_flight{{class="{name}"}}') == 0


def test_the_share_of_drafting_elsewhere_reaches_the_gateway(wide_edge: Edge) -> None:
    for sent, given in ((0.4, "0.40"), (0, "0.00"), (1, "1.00"), (1e-5, "0.00")):
        wide_edge.put_weights({}, draft_factor=sent)
        assert chat(wide_edge, {}).json()["headers"]["x-mirror-draft-factor"] == given
    answer = wide_edge.put_weights({}, draft_factor=1.2)
    assert answer.status_code == 400
    assert "draft_factor is 1.2; it must be a number from 0 to 1" in answer.text


def test_the_degradation_level_reaches_the_gateway_and_sheds_standard_at_3(
    wide_edge: Edge,
) -> None:
    wide_edge.put_weights({}, degrade_level=2)
    assert chat(wide_edge, {}).json()["headers"]["x-mirror-degrade"] == "2"
    wide_edge.put_weights({}, degrade_level=3)
    answer = chat(wide_edge, {})
    assert answer.status_code == 503
    assert error_of(answer.content)["code"] == "degraded"
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx.get(wide_edge.url + "/v1/models").status_code == 200


def test_draining_refuses_new_generations_only(wide_edge: Edge) -> None:
    with ThreadPoolExecutor() as pool:
        held = pool.submit(chat, wide_edge, {"hold_s": 0.5})
        wait_until(lambda: sum(wide_edge.in_flight()) == 1)
        answer = wide_edge.admin("POST", "/admin/drain", json={"draining": True})
        assert answer.json() == {"draining": True}
        refused = chat(wide_edge, {})
        assert refused.status_code == 503
        assert error_of(refused.content)["code"] == "draining"
        assert wide_edge.metric("mirror_edge_draining") == 1
        assert httpx.get(wide_edge.url + "/health").status_code == 200
        assert held.result().status_code == 200
    assert wide_edge.admin("POST", "/admin/drain", content="yes").status_code == 400
    wide_edge.admin("POST", "/admin/drain", json={"draining": False})
    assert chat(wide_edge, {}).status_code == 200


def test_a_bad_policy_is_refused_with_the_fault_and_the_old_one_stays(wide_edge: Edge) -> None:
    before = wide_edge.admin("GET", "/admin/policy").json()
    text = policy_text().replace("cpu = 0.7", "cpu = -0.7")
    line = text[: text.index("cpu = -0.7")].count("\n") + 1
    answer = wide_edge.admin("PUT", "/admin/policy", **as_lua(text))
    assert answer.status_code == 400
    message = error_of(answer.content)["message"]
    assert message.startswith(f"policy: line {line}: prompt_buckets[1].weights.cpu is -0.7")
    answer = wide_edge.admin("PUT", "/admin/policy", json=before | {"colour": "red"})
    assert answer.status_code == 400
    assert "colour: there is no such key" in error_of(answer.content)["message"]
    assert wide_edge.admin("GET", "/admin/policy").json() == before


def test_the_file_of_the_policy_is_followed_and_a_bad_one_is_not(wide_edge: Edge) -> None:
    text = wide_edge.policy_file.read_text()

    def caps() -> Any:
        return wide_edge.admin("GET", "/admin/policy").json()["caps"]

    wide_edge.policy_file.write_text(text.replace("caps = {}", "caps = { gpu = 9 }"))
    wait_until(lambda: caps() == {"gpu": 9})
    wide_edge.policy_file.write_text(text.replace("caps = {}", "caps = { gpu = 0 }"))
    wait_until(lambda: "caps.gpu is 0" in wide_edge.log.read_text())
    # A reload that would read a bad file does not happen either.
    pids = wide_edge.worker_pids()
    wide_edge.signal(signal.SIGHUP)
    wait_until(lambda: len(re.findall("caps.gpu is 0", wide_edge.log.read_text())) >= 2)
    assert wide_edge.worker_pids() == pids
    assert caps() == {"gpu": 9}
    wide_edge.policy_file.write_text(text)
    wait_until(lambda: caps() == {})


def test_the_state_holds_the_gateways_and_the_edges_own(wide_edge: Edge) -> None:
    chat(wide_edge, {})
    wide_edge.put_weights({"gpu": 0.5}, version=7)
    answer = wide_edge.admin("GET", "/admin/state")
    assert answer.status_code == 200
    state = answer.json()
    assert state["workers"] == [] and state["broker"] == {}
    edge = state["edge"]
    assert set(edge["qps"]["class"]) == set(edge["in_flight"]) == {"cpu", "gpu", "tpu"}
    assert edge["qps"]["tenant"]["default"] > 0
    brief = wide_edge.admin("GET", "/admin/state?tenants=no").json()["edge"]
    assert brief["qps"]["tenant"] == {} and brief["slots"] == edge["slots"]
    assert 0 <= edge["weights_age_s"] < 2
    assert edge["factors"] == {"gpu": 0.5}
    shares = edge["effective_weights"][1]["shares"]
    assert shares["gpu"] == pytest.approx(0.2 / 0.8)
    assert sum(wide_edge.in_flight()) == 0


def test_a_decision_is_explained_in_words(wide_edge: Edge) -> None:
    query = "/admin/route?prompt_tokens=30&qps=10&tier=vip&tenant=acme"
    answer = wide_edge.admin("GET", query).json()
    assert answer["class"] == "tpu"
    assert answer["shares"] == {"tpu": 1}
    assert any("bucket 1 (below 50)" in reason for reason in answer["reasons"])
    assert any("acme" in reason for reason in answer["reasons"])
    answer = wide_edge.admin("GET", "/admin/route?prompt_tokens=30").json()
    assert answer["shares"] == {"cpu": pytest.approx(0.7), "gpu": pytest.approx(0.3), "tpu": 0}
    for query in ("", "?prompt_tokens=x", "?prompt_tokens=1&tier=gold", "?prompt_tokens=1&qps=-1"):
        assert wide_edge.admin("GET", "/admin/route" + query).status_code == 400


def test_the_true_counts_teach_the_estimate_and_stay_inside(wide_edge: Edge) -> None:
    def ask(size: int, act: str) -> httpx.Response:
        body = {"model": f"m-{act}", "pad": "word " * size, "act": act, "counts": [2 * size, 5]}
        return chat(wide_edge, body)

    first = int(ask(100, "echo").json()["headers"]["x-mirror-prompt-estimate"])
    assert first < 180
    for act in ("echo", "stream"):
        for size in range(20, 60):
            answer = ask(size, act)
            assert "mirror-usage" not in answer.text
            assert not [name for name in answer.headers if name.startswith("x-mirror-")]
            assert act == "echo" or answer.text.endswith("data: [DONE]\n\n")
    last = chat(wide_edge, {"model": "m-stream", "pad": "word " * 100})
    for answer in (ask(100, "echo"), last):
        estimate = int(answer.json()["headers"]["x-mirror-prompt-estimate"])
        assert abs(estimate - 200) <= 50
    # They outlive a reload.
    wide_edge.signal(signal.SIGHUP)
    time.sleep(0.5)
    estimate = int(ask(100, "echo").json()["headers"]["x-mirror-prompt-estimate"])
    assert abs(estimate - 200) <= 50
    assert wide_edge.metric('mirror_edge_prompt_estimates_total{error="0.25"}') > 0


def test_reloads_policies_and_weights_under_load_lose_no_request(wide_edge: Edge) -> None:
    policy = wide_edge.admin("GET", "/admin/policy").json()
    is_over = threading.Event()

    def load(index: int) -> int:
        count = 0
        body = {"act": "stream", "events": 2, "interval_s": 0.02} if index % 2 else LONG
        while not is_over.is_set():
            answer = chat(wide_edge, body)
            assert answer.status_code == 200, answer.text
            assert index % 2 == 0 or answer.text.endswith("data: [DONE]\n\n")
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, index) for index in range(8)]
        try:
            for round_ in range(9):
                assert wide_edge.put_weights({"gpu": round_ % 2}).status_code == 200
                changed = policy | {"caps": {"cpu": 1 + round_}}
                assert wide_edge.admin("PUT", "/admin/policy", json=changed).status_code == 200
                if round_ % 3 == 1:
                    wide_edge.signal(signal.SIGHUP)
                time.sleep(0.2)
        finally:
            is_over.set()
        assert sum(one.result() for one in loads) > 50
    wait_until(lambda: wide_edge.in_flight() == [0, 0])
    state = wide_edge.admin("GET", "/admin/state").json()["edge"]
    assert state["in_flight"] == {"cpu": 0, "gpu": 0, "tpu": 0}
