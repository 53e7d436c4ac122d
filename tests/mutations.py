"""Bodies that are almost right: mutations of valid ones, by a seed. What comes out is what a careless client might send."""

# ruff: noqa: E501 - a table

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from longcat_pd.server.openapi_examples import REQUESTS

NAN = float("nan")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 0.5, 1.0, 16.0, -2.1, 2.1, 20, 21, 64, 65, 100, 101, -101, 1024, 4096, 1e308, -1e-308, 1e-308, 5e-324, 1e-45,
    2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**40, "", "x", "7", "auto", "none", "required", "user", "assistant",
    "tool", "function", "text", "json_object", "json_schema", "f\n", "é", "\x00", "你好", "\U0001f600", "\u2028", "a" * 1025,
    [], [1], [0], [-1], ["x"], [""], [[]], [[1]], [["x"]], [None], [1, "x"], [1.5], [True], [{}], list(range(70)), ["s"] * 17,
    {}, {"a": 1}, {"type": "text"}, {"type": "function", "function": {"name": "f"}}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, {"5": 1}, {"x": 1}, {"-1": 1}, {"5": 101},
    {"include_usage": True}, {"enable_thinking": "x"}, {"chat_template": "x"}, {"role": "user", "content": "x"},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a body, itself left out."""
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The body with another value at one place."""
    changed = copy.deepcopy(body)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return changed


class Mutator:
    """An endless source of bodies for one route.

    Args:
        path: the route.
        names: fields that the route knows, which are put in beside those of the examples.
        seed: of everything.
    """

    def __init__(self, path: str, names: list[str], seed: int) -> None:
        self._random = random.Random(f"{path} {seed}")
        self._path = path
        self._names = names
        self._bodies = list(REQUESTS[path].values())

    def value(self) -> Any:
        """Some value, or two nested ones."""
        pick = self._random
        value = copy.deepcopy(pick.choice(VALUES))
        turn = pick.random()
        if turn < 0.05:
            return [value] * pick.choice((1, 2, 17, 65, 129))
        if turn < 0.1:
            return {pick.choice((*self._names, "a", "é", "")): value}
        if turn < 0.12:
            for _ in range(pick.choice((30, 62, 63, 64, 200))):
                value = [value] if pick.random() < 0.5 else {"a": value}
        return value

    def body(self) -> dict[str, Any]:
        """A valid body with one to three changes."""
        pick = self._random
        body: Any = copy.deepcopy(pick.choice(self._bodies))
        for _ in range(pick.choice((1, 1, 1, 2, 3))):
            where = list(places(body))
            turn = pick.random()
            if turn < 0.45 or not where:
                body[pick.choice(self._names)] = self.value()
                continue
            path = pick.choice(where)
            if turn < 0.85:
                body = put(body, path, self.value())
            elif turn < 0.95:
                body = removed(body, path)
            else:
                holder = _at(body, path[:-1])
                if isinstance(holder, list):
                    holder.extend(copy.deepcopy(holder) * pick.choice((1, 40)))
                else:
                    holder[pick.choice(self._names)] = copy.deepcopy(holder[path[-1]])
        return dict(body)

    def damaged(self) -> bytes:
        """The bytes of a body, damaged on the way: cut, flipped, doubled, in another encoding, with what JSON forbids."""
        pick = self._random
        raw = json.dumps(self.body(), ensure_ascii=pick.random() < 0.5, allow_nan=True).encode("utf-8", "surrogatepass")
        at = pick.randrange(len(raw))
        turn = pick.randrange(9)
        if turn == 0:
            return raw[:at]
        if turn == 1:
            return raw[:at] + bytes([pick.randrange(256)]) + raw[at + 1 :]
        if turn == 2:
            return raw + raw[at:]
        if turn == 3:
            return raw.decode().encode("utf-16")
        if turn == 4:
            return raw[:-1] + pick.choice(
                (b', "a": NaN}', b', "a": 1e999}', b', "a": "\\ud800"}', b', "a": ' + b"9" * 5000 + b"}")
            )
        if turn == 5:
            return raw[:-1] + b', "a": ' + b"[" * 100 + b"]" * 100 + b"}"
        if turn == 6:
            return b"[" + raw + b"]"
        if turn == 7:
            return b"\xef\xbb\xbf" + raw
        return raw[:-1] + b"," + raw[1:]  # every key twice


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        body = body[step]
    return body


def removed(body: Any, path: tuple[Any, ...]) -> Any:
    """The body without one place."""
    changed = copy.deepcopy(body)
    del _at(changed, path[:-1])[path[-1]]
    return changed
