from __future__ import annotations

import pytest

from mirror_sd.api.body import read_object, shorten
from mirror_sd.errors import InvalidRequest

GARBAGE = [
    (b"", "empty"),
    (b"  \n", "empty"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    (b"[1]", "a list"),
    (b'"text"', "a string"),
    (b"12", "a number"),
    (b"true", "a boolean"),
    (b"null", "null"),
    (b"{", "not valid JSON"),
    (b'{"a": 1,}', "not valid JSON"),
    (b"{'a': 1}", "not valid JSON"),
    (b'{"a": 1} {"b": 2}', "not valid JSON"),
    (b'{"a": "\x01"}', "not valid JSON"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": -Infinity}', "Infinity"),
    (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b'{"a": 1, "b": 2, "a": 3}', '"a" appears twice'),
    (b'{"x": [{"a": 1, "a": 1}]}', '"a" appears twice'),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
    (b'{"a": ["\\ud83d"]}', "surrogate"),
    (b'{"\\udc00": 1}', "surrogate"),
    (b"\x00" * 100_000, "not valid JSON"),
    (bytes(range(256)) * 400, "not UTF-8"),
]


@pytest.mark.parametrize(("body", "reason"), GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        read_object(body)
    assert len(refusal.value.message) < 300


def test_an_object_is_read_as_it_stands() -> None:
    body = '{"a": "\\ud83d\\ude42 \\u4f60好", "b": [1, 2.5, null, true], "c": {}}'.encode()
    assert read_object(body) == {"a": "🙂 你好", "b": [1, 2.5, None, True], "c": {}}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("short", '"short"'),
        ("\ud83d", '"\\ud83d"'),
        (10**400, "a number of 1329 bits"),
        ({"a": 1}, "an object"),
        ([1, 2], "a list of 2"),
        (None, "null"),
        (True, "true"),
    ],
)
def test_a_value_is_shown_shortly(value: object, shown: str) -> None:
    assert shorten(value) == shown
    assert len(shorten("x" * 1000)) < 70
