"""Plain data into frozen records, strictly: unknown keys, wrong types and values out of range become findings.

Owns the mechanics (paths of keys, findings, laying ``--set`` over a tree). Knows no YAML, no rule across two keys and no
default that depends on another key: that is ``resolve.py`` and ``checks.py``.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from longcat_pd.errors import ConfigError

R = TypeVar("R")

BEYOND = 2**63  # no setting means so much, and what is computed from less stays within floating point

_PLACE = re.compile("[0-9]{1,9}")  # in a list
_ZERO = {int: 0, float: 0.0, str: "", bool: False}


class Findings:
    """Everything that is wrong with one configuration, each with the path of its key; raised together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bad: set[str] = set()

    def add(self, path: str, text: str) -> None:
        """Note that the value at ``path`` itself is wrong."""
        self._lines.append(text)
        self._bad.add(path)

    def cross(self, paths: Sequence[str], text: str) -> None:
        """Note that values disagree. Dropped if one of ``paths`` is known to be wrong: its stand-in proves nothing."""
        if not any(bad == path or bad.startswith(f"{path}.") for path in paths for bad in self._bad):
            self._lines.append(text)

    def is_bad(self, path: str) -> bool:
        """Whether a finding was added for exactly this path."""
        return path in self._bad

    def raise_if_any(self) -> None:
        """Raise one ConfigError whose message has a line for each finding, in the order in which they were found."""
        if self._lines:
            raise ConfigError("\n".join(self._lines))


@dataclasses.dataclass(frozen=True)
class Range:
    """Closed bounds of a number; None is open. ``is_open_low``: the low bound itself is excluded."""

    low: float | None = None
    high: float | None = None
    is_open_low: bool = False

    def complaint(self, value: float) -> str | None:
        """What is wrong with ``value``, or None."""
        if not abs(value) < BEYOND:
            return "must be a number below 2^63"
        if self.low is not None and (value < self.low or (self.is_open_low and value == self.low)):
            return f"must be {'more than' if self.is_open_low else 'at least'} {self.low:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:g}"
        return None


class Reader:
    """Turns trees of dicts, lists and scalars into records.

    Args:
        findings: where complaints go; reading goes on with the field's default, so that all of them are found at once.
        ranges: record type -> field -> bounds.
    """

    def __init__(self, findings: Findings, ranges: Mapping[type, Mapping[str, Range]]) -> None:
        self._findings = findings
        self._ranges = ranges

    def record(self, kind: type[R], data: Any, path: str = "") -> R:
        """A record of ``kind`` from a mapping. A required key that is missing or wrong gets a stand-in and a finding."""
        if not isinstance(data, Mapping):
            if data is not None:
                self._findings.add(path, f"{path}={_show(data)}: must be a mapping of settings")
            data = {}
        hints = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for key in data:
            if key not in fields:
                self._findings.add(_join(path, key), f"{_join(path, key)}: unknown key; known here: {', '.join(fields)}")
        values: dict[str, Any] = {}
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            here = _join(path, name)
            if name in data:
                ok, value = self._value(hints[name], data[name], here)
                ok = ok and self._in_range(kind, name, value, here)
                if ok or required:
                    values[name] = value if ok else _stand_in(hints[name])
            elif required:
                self._findings.add(here, f"{here}: missing")
                values[name] = self.record(hints[name], {}, here) if _is_record(hints[name]) else _stand_in(hints[name])
        return kind(**values)

    def _in_range(self, kind: type, name: str, value: Any, path: str) -> bool:
        bounds = self._ranges.get(kind, {}).get(name)
        if bounds is None or value is None:
            return True
        numbers = value if isinstance(value, tuple) else (value,)
        complaint = next((text for number in numbers if (text := bounds.complaint(number))), None)
        if complaint:
            self._findings.add(path, f"{path}={_show(value)}: {complaint}")
        return complaint is None

    def _value(self, hint: Any, value: Any, path: str) -> tuple[bool, Any]:
        """(is it right, the value in its own type)."""
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            inner = [arg for arg in args if arg is not type(None)]
            return (True, None) if value is None else self._value(inner[0], value, path)
        if origin is Literal:
            return self._check(value in args, value, path, "must be one of " + ", ".join(str(arg) for arg in args))
        if origin is tuple:
            return self._items(args[0], value, path)
        if origin is dict:
            ok = isinstance(value, Mapping) and all(isinstance(x, str) for pair in value.items() for x in pair)
            return self._check(ok, dict(value) if ok else value, path, "must map names to strings (quote numbers)")
        if _is_record(hint):
            return True, self.record(hint, value, path)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            ok = abs(value) < BEYOND
            return self._check(ok, float(value) if ok else value, path, "must be a number below 2^63")
        ok = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        return self._check(ok, value, path, f"must be {_NAMES[hint]}")

    def _items(self, hint: Any, value: Any, path: str) -> tuple[bool, Any]:
        if not isinstance(value, (list, tuple)):
            return self._check(False, value, path, "must be a list")
        read = [self._value(hint, item, f"{path}[{place}]") for place, item in enumerate(value)]
        return all(ok for ok, _ in read), tuple(item for _, item in read)

    def _check(self, ok: bool, value: Any, path: str, text: str) -> tuple[bool, Any]:
        if not ok:
            self._findings.add(path, f"{path}={_show(value)}: {text}")
        return ok, value


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def lay_over(tree: Any, keys: Sequence[str], value: Any) -> str | None:
    """Set one value in a tree of dicts and lists, in place. Returns what is wrong with the key, or None.

    A number is the place in a list; the place behind the last one appends. Mappings that are missing on the way are made.
    """
    here = tree
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        so_far = ".".join(keys[:depth])
        if isinstance(here, list):
            if not _PLACE.fullmatch(key) or int(key) > len(here):
                return f"{so_far} is a list of {len(here)}; {key!r} is not a place in it"
            if int(key) == len(here):
                here.append({})
            here = _step(here, int(key), is_last, value)
        elif isinstance(here, dict):
            if here.get(key) is None:
                here[key] = {}
            here = _step(here, key, is_last, value)
        else:
            return f"{so_far} is a single value and has no key {key!r}"
    return None


def _step(container: Any, key: Any, is_last: bool, value: Any) -> Any:
    if is_last:
        container[key] = value
    return container[key]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _stand_in(hint: Any) -> Any:
    return () if get_origin(hint) is tuple else _ZERO.get(hint)


def _show(value: Any) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."
