"""Fields: typed reading of a foreign JSON object whose keys have aliases. Knows no particular key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from longcat_pd.errors import ConfigError

T = TypeVar("T", bound=str)

_BEYOND = 2**63  # no size is as large; not finite ones are not below it either


class Fields:
    """A JSON object and the path that leads to it. null counts as absent; the first alias that is present wins.

    Every reader raises ConfigError with the field's path when the value is absent without default or of the wrong kind.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        self._content = content
        self._path = path

    def has(self, *names: str) -> bool:
        """Whether one of the names has a value."""
        return any(self._content.get(name) is not None for name in names)

    def integer(self, name: str, *aliases: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number not below ``minimum``."""
        found, value = self._find((name, *aliases), default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < _BEYOND:
            raise self._bad(found, value, f"a whole number >= {minimum}")
        return value

    def number(self, name: str, *aliases: str, default: float | None = None, minimum: float | None = None) -> float:
        """A number above 0, or not below ``minimum`` where that is given."""
        found, value = self._find((name, *aliases), default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < _BEYOND or not (value > 0 if minimum is None else value >= minimum):
            raise self._bad(found, value, "a number > 0" if minimum is None else f"a number >= {minimum}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """true or false."""
        found, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self._bad(found, value, "true or false")
        return value

    def text(self, name: str, *, default: str) -> str:
        """A string."""
        found, value = self._find((name,), default)
        if not isinstance(value, str):
            raise self._bad(found, value, "a string")
        return value

    def choice(self, name: str, allowed: Sequence[T], *aliases: str, default: T) -> T:
        """One of a closed set of strings."""
        found, value = self._find((name, *aliases), default)
        for item in allowed:
            if item == value:
                return item
        raise self._bad(found, value, "one of " + ", ".join(allowed))

    def integers(self, name: str, *, default: tuple[int, ...]) -> tuple[int, ...]:
        """A whole number or a list of them; never empty."""
        found, value = self._find((name,), list(default))
        items = value if isinstance(value, list) else [value]
        if not items or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
            raise self._bad(found, value, "a whole number >= 0 or a list of them")
        return tuple(items)

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """Half-open ranges from a text such as ``"5:7,100:200"``; none where the field is absent."""
        found, value = self._find((name,), "")
        pairs = [] if value == "" else [part.split(":") for part in str(value).split(",")]
        if any(len(pair) != 2 or not all(end.strip().isdigit() for end in pair) for pair in pairs):
            raise self._bad(found, value, 'ranges of token ids such as "5:7,100:200"')
        return tuple((int(first), int(end)) for first, end in pairs)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where the field is absent."""
        found, value = self._find((name,), [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(found, value, "a list of strings")
        return tuple(value)

    def value(self, name: str, *, default: Any) -> Any:
        """Whatever is there."""
        return self._find((name,), default)[1]

    def names(self) -> tuple[str, ...]:
        """The keys."""
        return tuple(self._content)

    def record(self, name: str) -> Fields | None:
        """A nested object; None where it is absent or empty."""
        found, value = self._find((name,), {})
        if not isinstance(value, dict):
            raise self._bad(found, value, "an object")
        return Fields(value, f"{self._path}{name}.") if value else None

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self._content.get(name) is not None:
                return name, self._content[name]
        if default is None:
            known = " or ".join(names)
            raise ConfigError(f"config.json lacks {self._path}{known}", param=self._path + names[0])
        return names[0], default

    def _bad(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"config.json: {self._path}{name} = {value!r} is not {wanted}", param=self._path + name)
