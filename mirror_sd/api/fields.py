"""Typed reading of a JSON object's fields, with errors that name the field, its value and the rule.

Written by hand rather than with a validation library because half of the OpenAI fields are unions
(`stop`, `prompt`, `content`), for which the libraries report one error per branch and a path that
the client never wrote. JSON `null` counts as absent, as OpenAI's clients send it for unset fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from mirror_sd.api.body import shorten
from mirror_sd.errors import InvalidRequest


def refuse(param: str, value: Any, allowed: str) -> NoReturn:
    """Raise the `InvalidRequest` for a field: its path, the value given, what is allowed."""
    raise InvalidRequest(f"{param}: expected {allowed}, got {shorten(value)}", param=param)


class Fields:
    """The fields of one object; `path` is its place in the body ("" for the body itself)."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def param(self, name: str) -> str:
        """The full path of field `name`."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """The raw value, None where it is absent."""
        return self._values.get(name)

    def require(self, name: str, allowed: str) -> Any:
        """The raw value; raises where it is absent."""
        value = self._values.get(name)
        if value is None:
            param = self.param(name)
            raise InvalidRequest(f"{param} is required: {allowed}", param=param)
        return value

    def number(
        self, name: str, low: float, high: float, default: float, *, above_low: bool = False
    ) -> float:
        """A number in [low, high], or in (low, high] with `above_low`."""
        value = self._values.get(name)
        if value is None:
            return default
        bound = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        allowed = f"a number {bound}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self.param(name), value, allowed)
        # Comparing before converting: an integer of 1000 digits overflows a float.
        if not (low < value if above_low else low <= value) or not value <= high:
            refuse(self.param(name), value, allowed)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]; None where it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse(self.param(name), value, f"an integer from {low} to {high}")
        return value

    def boolean(self, name: str) -> bool | None:
        """true or false; None where it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.param(name), value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string; None where it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            refuse(self.param(name), value, "a string")
        return value

    def object(self, name: str) -> Fields | None:
        """A JSON object; None where it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.param(name), value, "an object")
        return Fields(value, self.param(name))

    def refuse_unsupported(self, name: str, reason: str) -> None:
        """Raise unless the field is absent, null, false or empty."""
        if self._values.get(name):
            param = self.param(name)
            raise InvalidRequest(f"{param} is not supported: {reason}", param=param)


def is_finite_number(value: Any) -> bool:
    """Whether `value` is a JSON number (booleans are not) that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e308 < value < 1e308 and math.isfinite(value)
