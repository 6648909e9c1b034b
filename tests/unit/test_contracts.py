"""The Python side of the contract files; `tests/openresty/spec` holds the Lua side to them."""

from __future__ import annotations

import asyncio
import json
import re
import typing
from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest

from mirror_sd import config, errors
from mirror_sd.serving.answers import caller_of
from mirror_sd.serving.error_answers import RequestIds

CONTRACTS = Path(__file__).resolve().parents[1] / "contracts"


def contract(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CONTRACTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


ERRORS = contract("errors")
HEADERS = contract("edge_headers")
ESTIMATE = contract("prompt_estimate")


def request_with(headers: dict[str, str]) -> falcon.asgi.Request:
    return falcon.testing.create_asgi_req(headers=headers)


@pytest.mark.parametrize("case", [case for case in ERRORS["edge"] if "python" in case])
def test_an_error_that_both_make_is_the_same_from_both(case: dict[str, Any]) -> None:
    made_by = getattr(errors, case["python"])
    assert (made_by.status, made_by.type, made_by.code) == (
        case["status"],
        case["type"],
        case["code"],
    )


@pytest.mark.parametrize("case", [case for case in ERRORS["edge"] if "python_kin" in case])
def test_an_error_of_the_edge_alone_has_the_status_and_type_of_its_kin(
    case: dict[str, Any],
) -> None:
    kin = getattr(errors, case["python_kin"])
    assert (kin.status, kin.type) == (case["status"], case["type"])
    assert issubclass(kin, errors.CapacityError) == case["retry_after"]


def test_the_error_object_has_the_shape_of_the_contract() -> None:
    document = errors.InvalidRequest("no", param="n").to_openai()
    assert set(document) == {"error"}
    assert set(document["error"]) == set(ERRORS["shape"])


def test_no_status_is_listed_twice() -> None:
    statuses = [case["status"] for case in ERRORS["edge"]]
    assert len(statuses) == len(set(statuses))


def test_classes_are_those_of_the_configuration() -> None:
    assert sorted(HEADERS["classes"]) == sorted(typing.get_args(config.DeviceClass))


def test_header_patterns_hold_the_listed_values() -> None:
    patterns = {header["name"]: header["pattern"] for header in HEADERS["request"]}
    for device_class in HEADERS["classes"]:
        assert re.fullmatch(patterns["X-Mirror-Device"], device_class)
    for tier in HEADERS["tiers"]:
        assert re.fullmatch(patterns["X-Mirror-Tier"], tier)


@pytest.mark.parametrize("device_class", HEADERS["classes"])
@pytest.mark.parametrize("tier", HEADERS["tiers"])
def test_the_gateway_takes_what_the_edge_says(device_class: str, tier: str) -> None:
    headers = {
        b"x-mirror-device": device_class.encode(),
        b"x-mirror-tier": tier.encode(),
        b"x-mirror-tenant": b"shop-1",
    }
    pools: dict[config.DeviceClass, config.PoolConfig] = {
        name: config.PoolConfig() for name in typing.get_args(config.DeviceClass)
    }
    caller = caller_of(headers, config.Config(pools=pools))
    assert (caller.device_class, caller.tier, caller.tenant) == (device_class, tier, "shop-1")


def id_given_to(sent: str) -> str:
    request, response = request_with({"X-Request-Id": sent}), falcon.asgi.Response()
    asyncio.run(RequestIds().process_request(request, response))
    id: str = request.context.request_id
    assert response.get_header("X-Request-Id") == id
    return id


@pytest.mark.parametrize("sent", HEADERS["request_ids"]["kept"])
def test_the_gateway_keeps_the_request_ids_that_the_edge_keeps(sent: str) -> None:
    assert id_given_to(sent) == sent


@pytest.mark.parametrize(
    # A header can hold neither line breaks nor what latin-1 does not have.
    "sent",
    [id for id in HEADERS["request_ids"]["replaced"] if "\n" not in id],
)
def test_the_gateway_replaces_the_request_ids_that_the_edge_replaces(sent: str) -> None:
    assert id_given_to(sent) != sent


@pytest.mark.parametrize("level", range(4))
def test_the_gateway_takes_the_edges_degradation_level(level: int) -> None:
    [header] = [one for one in HEADERS["request"] if one["name"] == "X-Mirror-Degrade"]
    assert re.fullmatch(header["pattern"], str(level))
    headers = {b"x-mirror-degrade": str(level).encode()}
    assert caller_of(headers, config.Config()).degrade_level == level


@pytest.mark.parametrize(
    ("sent", "factor"),
    [("0.40", 0.4), ("0.00", 0.0), ("1.00", 1.0), ("", 1.0), ("1.50", 1.0), ("nan", 1.0)],
)
def test_the_gateway_takes_the_edges_share_of_drafting_elsewhere(sent: str, factor: float) -> None:
    [header] = [one for one in HEADERS["request"] if one["name"] == "X-Mirror-Draft-Factor"]
    assert bool(re.fullmatch(header["pattern"], sent)) == (sent in ("0.40", "0.00", "1.00"))
    headers = {b"x-mirror-draft-factor": sent.encode()}
    assert caller_of(headers, config.Config()).draft_factor == factor


@pytest.mark.parametrize(
    ("text", "spare"), [("", ()), ("gpu", ("gpu",)), ("tpu,gpu", ("gpu",)), ("gpu;cpu", ())]
)
def test_the_gateway_takes_the_classes_to_spare_that_it_knows(
    text: str, spare: tuple[str, ...]
) -> None:
    settings = config.load(overrides=["pools.gpu.engine=emulated"], environ={})
    assert caller_of({b"x-mirror-spare": text.encode()}, settings).spare == spare


@pytest.mark.parametrize("case", ESTIMATE["cases"], ids=lambda case: case["name"])
def test_the_estimates_byte_counts_are_those_of_the_decoded_text(case: dict[str, Any]) -> None:
    text = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), case["text"])
    data = text.encode()
    non_ascii = sum(byte > 127 for byte in data)
    assert (case["ascii_bytes"], case["non_ascii_bytes"]) == (len(data) - non_ascii, non_ascii)


@pytest.mark.parametrize("case", ESTIMATE["cases"], ids=lambda case: case["name"])
def test_the_estimates_bounds_hold_the_rule_of_thumb(case: dict[str, Any]) -> None:
    ascii_tokens = 0.3 * case["ascii_bytes"] * case["repeat"]
    other_tokens = 0.6 * case["non_ascii_bytes"] / 3 * case["repeat"]
    assert case["at_least"] <= ascii_tokens + other_tokens <= case["at_most"]
