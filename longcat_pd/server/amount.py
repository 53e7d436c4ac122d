"""How much a JSON text holds, told before it is read: what a value takes in time and memory goes by that, not by bytes.

Owns the limits and the counting: by operations of ``str`` on whole texts, some nanoseconds a character, and only on texts
that are long enough to come near a limit. Does not know what is in the values.
"""

from __future__ import annotations

MAX_CONTAINERS = 1 << 17  # arrays and objects
MAX_KEYS = 1 << 18
MAX_VALUES = 1 << 21  # by their commas; a prompt of a million ids is half of it
_MAX_QUOTES = 2 * (MAX_CONTAINERS + MAX_KEYS + MAX_VALUES)  # what has more strings has more of something else too

_Counts = tuple[int, int, int]


class Amount:
    """What may still be read, in one text or in several that belong together."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._spent: _Counts = (0, 0, 0)

    def take(self, text: str) -> None:
        """One text more, of any kind. Raises ValueError, with the numbers."""
        if self._num_characters + len(text) <= MAX_CONTAINERS:  # which each needs a character
            self._num_characters += len(text)
            return
        counts = _marks(text)
        if _excess(self._with(counts)):
            counts = _marks(_outside_strings(text))
        self._spent = self._with(counts)
        if excess := _excess(self._spent):
            raise ValueError(excess)

    def _with(self, counts: _Counts) -> _Counts:
        """With what is in it so far; the short texts together are below every limit by themselves."""
        (containers, keys, values), (more_containers, more_keys, more_values) = self._spent, counts
        return containers + more_containers, keys + more_keys, values + more_values


def _marks(text: str) -> _Counts:
    """At least as many containers, keys and values behind the first as there are: what strings hold counts too."""
    return text.count("[") + text.count("{"), text.count(":"), text.count(",")


def _outside_strings(text: str) -> str:
    """A JSON text without its strings, quotes included. Of what is no JSON at least all before its first fault is there.

    Raises ValueError for more strings than a text may have.
    """
    # in this order: two backslashes in front of a quote do not escape it
    plain = text.replace("\\\\", "").replace('\\"', "")
    num_quotes = plain.count('"')
    if num_quotes > _MAX_QUOTES:
        raise ValueError(f"it holds {num_quotes // 2} strings, at most {_MAX_QUOTES // 2} keys and values are read")
    return "".join(plain.split('"')[::2])


def _excess(counts: _Counts) -> str:
    """Which limit is passed; empty if none is."""
    limits = ((MAX_CONTAINERS, "arrays and objects"), (MAX_KEYS, "keys"), (MAX_VALUES, "values"))
    passed = [f"{n} {what}, at most {most}" for n, (most, what) in zip(counts, limits, strict=True) if n > most]
    return f"it holds {', '.join(passed)} are read" if passed else ""
