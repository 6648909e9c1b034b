"""A request body as a JSON object, read strictly: whatever is wrong with it is a 400.

Python's own reader takes `NaN`, lone surrogates and repeated keys; here they are refused, because
a value that two readers of the same body understand differently is a bug waiting for its day.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mirror_sd.errors import InvalidRequest


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises `InvalidRequest` for anything else."""
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the request body begins with a byte order mark; send plain UTF-8")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8 (at byte {error.start})") from error
    value = _parse(text)
    if not isinstance(value, dict):
        kind = _JSON_TYPES.get(type(value), "a value")
        raise InvalidRequest(f"the request body is {kind}; send a JSON object")
    # Only an escape can smuggle in half of a surrogate pair: the bytes themselves were UTF-8.
    if "\\u" in text:
        _refuse_lone_surrogates(value)
    return value


_JSON_TYPES = {list: "a list", str: "a string", int: "a number", float: "a number"} | {
    bool: "a boolean",
    type(None): "null",
}


def _parse(text: str) -> Any:
    try:
        return _decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(
            f"the request body is not valid JSON: {error.msg} ({place})"
        ) from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error
    except ValueError as error:
        # Python refuses to read integers of more than 4300 digits.
        raise InvalidRequest("the request body holds a number with too many digits") from error


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = shorten(key)
                raise InvalidRequest(f"the key {shown} appears twice in one object", param=key)
            seen.add(key)
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the request body holds {name}, which is not JSON")


# One for all bodies: to make it takes as long as to read a short one.
_decoder = json.JSONDecoder(
    object_pairs_hook=_object_without_repeats, parse_constant=_refuse_constant
)


def _refuse_lone_surrogates(value: Any) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, str) and not item.isascii() and not _is_encodable(item):
            raise InvalidRequest(
                f"the string {shorten(item)} holds half of a surrogate pair, which is not text"
            )


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shorten(value: Any, limit: int = 60) -> str:
    """`value` as JSON-like text of about `limit` characters, fit for an error message."""
    if isinstance(value, str):
        shown = json.dumps(value[: limit + 1], ensure_ascii=not _is_encodable(value))
    elif isinstance(value, dict):
        shown = "an object"
    elif isinstance(value, list):
        shown = f"a list of {len(value)}"
    elif isinstance(value, int) and value.bit_length() > 200:
        shown = f"a number of {value.bit_length()} bits"
    else:
        shown = json.dumps(value)
    return shown if len(shown) <= limit else shown[:limit] + "…"
