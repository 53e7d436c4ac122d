"""Reading single fields of a request body without coercion.

Owns what a type, a range and a path are in an error message. Does not know which fields there are.

``null`` is the same as absent. ``true`` is not 1 and ``"7"`` is not 7, but ``16.0`` is 16: JSON has one kind of number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from longcat_pd.errors import InvalidRequest
from longcat_pd.server.amount import Amount

MAX_DEPTH = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, amount: Amount | None = None) -> Any:
    """The value of a JSON text; of a repeated key the last value counts.

    Args:
        text: of any length: one that would take long to read is refused before.
        amount: what may be read of several texts together.

    Raises:
        ValueError: not JSON; more than an ``Amount`` in it; NaN, an infinity or a number beyond any range; nested deeper
            than ``MAX_DEPTH``; a lone surrogate in a string, which no UTF-8 answer could repeat.
    """
    (amount or Amount()).take(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH or _SURROGATE_ESCAPE.search(text):
        _inspect(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _inspect(value: Any) -> None:
    """Look at depth and strings level by level, so that the depth of a body is never a depth of calls."""
    level, depth = [value], 0
    while level:
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        depth += any(isinstance(item, (dict, list)) for item in level)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        level = deeper


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a string holds a lone surrogate") from None


def shown(value: Any) -> str:
    """A value for a message: JSON, cut where it is long; of a long one no more is written than that."""
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += part
        if len(text) > 100:
            break
    return text if len(text) <= 100 else text[:97] + "..."


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return next((name for cls, name in names.items() if isinstance(value, cls)), "null")


def wrong_type(path: str, wanted: str, value: Any) -> InvalidRequest:
    """The error for a value of another type."""
    return InvalidRequest(f"{path} must be {wanted}, not {kind_of(value)}", code="invalid_type", param=path)


def out_of_range(path: str, value: Any, allowed: str) -> InvalidRequest:
    """The error for a value outside its range."""
    return InvalidRequest(f"{path} = {shown(value)} is outside {allowed}", code="invalid_value", param=path)


def missing(path: str) -> InvalidRequest:
    """The error for a required field that is not there."""
    return InvalidRequest(f"{path} is required", code="missing_field", param=path)


def unsupported(path: str, value: Any) -> InvalidRequest:
    """The error for a value of a field that this server does not offer."""
    return InvalidRequest(f"{path} = {shown(value)} is not supported", code="unsupported_parameter", param=path)


def as_integer(value: Any, path: str) -> int:
    """A JSON number without fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(path, "an integer", value)
    return value


class Fields:
    """One JSON object of a body, and the path that leads to it. Every reader returns None for an absent field."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def path(self, name: str) -> str:
        """The path of a field, for messages."""
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        """The value, unchecked."""
        return self.values.get(name)

    def required(self, name: str) -> Any:
        """The value, unchecked but there."""
        value = self.values.get(name)
        if value is None:
            raise missing(self.path(name))
        return value

    def flag(self, name: str) -> bool | None:
        """A boolean."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.path(name), "a string", value)
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer of ``low`` ... ``high`` (None: no upper end)."""
        value = self.get(name)
        if value is None:
            return None
        number = as_integer(value, self.path(name))
        if number < low or (high is not None and number > high):
            raise out_of_range(self.path(name), value, f">= {low}" if high is None else f"{low} ... {high}")
        return number

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A number of ``low`` ... ``high``; ``above_low`` leaves the lower end out."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(self.path(name), "a number", value)
        if not low <= value <= high or (above_low and value == low):
            raise out_of_range(self.path(name), value, f"{low} < x <= {high}" if above_low else f"{low} ... {high}")
        return float(value)

    def items(self, name: str, at_most: int | None = None) -> list[Any] | None:
        """An array; its elements are unchecked."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong_type(self.path(name), "an array", value)
        if at_most is not None and len(value) > at_most:
            raise InvalidRequest(f"{self.path(name)} has {len(value)} entries, at most {at_most}", param=self.path(name))
        return value

    def object(self, name: str) -> Fields | None:
        """An object."""
        value = self.get(name)
        return None if value is None else Fields.of(value, self.path(name))

    @classmethod
    def of(cls, value: Any, path: str) -> Fields:
        """The fields of a value that has to be an object."""
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        return cls(value, path)
