"""Clients by the thousand: requests of every kind and every intended end, and what became of each.

The client is written by hand: a client library takes as much of two cores as what it asks. Knows no processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Intent = Literal["good", "left", "invalid", "late"]
EACH_HUNDRED: dict[Intent, int] = {"left": 10, "invalid": 5, "late": 3, "good": 82}

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "letter", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WORDS = ("the", "model", "reads", "a", "prompt", "and", "writes", "one", "more", "word", "until", "it", "is", "done")
FINE = [300, 301]
ENDS_WITHIN_S = 120.0  # whatever a request is, it has its end then
UNKNOWN_ID = 999_999  # only the prefill side knows that the vocabulary ends before it


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. ``leaves_after``: so many events of its stream, or so many seconds, the client hangs up."""

    intent: Intent
    route: str
    body: dict[str, Any]
    time_limit_s: float | None = None
    leaves_after: int | float | None = None

    @property
    def reaches_workers(self) -> bool:
        """Whether the balancer lets its body through."""
        return self.intent != "invalid" or len(self.body["prompt"]) != len(FINE)


@dataclass(frozen=True, kw_only=True)
class End:
    """``status``: 0 of a client that left before the head. ``code``: of an error, by status or as the last event."""

    ask: Ask
    status: int
    code: str | None
    seconds: float
    finishes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """In a word, for a table."""
        return f"{self.ask.intent}: {self.status} {self.code or 'ok'}"


def asks(count: int, *, seed: int) -> Iterator[Ask]:
    """So many, a hundred at a time in the shares of ``EACH_HUNDRED``, in any order."""
    draw = random.Random(seed)
    for first in range(0, count, 100):
        intents = [intent for intent, number in EACH_HUNDRED.items() for _ in range(number)]
        draw.shuffle(intents)
        yield from (_ask(draw, intent) for intent in intents[: count - first])


def _ask(draw: random.Random, intent: Intent) -> Ask:
    if intent == "good":
        return _good(draw)
    if intent == "invalid":
        return _invalid(draw)
    body = {"prompt": _ids(draw), "max_tokens": 400, "ignore_eos": True, "stream": draw.random() < 0.5}
    if intent == "late":
        return Ask(intent=intent, route=COMPLETIONS, body=body, time_limit_s=draw.choice((0.05, 0.1, 0.2)))
    after = draw.randrange(1, 4) if body["stream"] else draw.choice((0.0, 0.02, 0.05, 0.1))
    return Ask(intent=intent, route=COMPLETIONS, body=body, leaves_after=after)


def _good(draw: random.Random) -> Ask:
    body: dict[str, Any] = {
        "max_tokens": draw.choice((1, 2, 3, 5)),
        "temperature": draw.choice((0, 0, 0.8)),
        "seed": draw.randrange(1000),
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.4:
        words = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 12)))
        body["messages"] = [{"role": "user", "content": words}]
        _spice(draw, body, {"tools": TOOLS}, {"logprobs": True, "top_logprobs": 2})
        return Ask(intent="good", route=CHAT, body=body)
    body["prompt"] = _ids(draw) if draw.random() < 0.8 else " ".join(draw.choice(WORDS) for _ in range(9))
    _spice(draw, body, {"logprobs": 3}, {"n": 2}, {"stop": ["a", "the"]}, {"repetition_penalty": 1.2})
    return Ask(intent="good", route=COMPLETIONS, body=body)


def _spice(draw: random.Random, body: dict[str, Any], *more: dict[str, Any]) -> None:
    if draw.random() < 0.3:
        body.update(draw.choice((*more, {"response_format": AS_JSON})))


def _ids(draw: random.Random) -> list[int]:
    """Some begin like others before them, most are new."""
    stem = random.Random(draw.randrange(8)) if draw.random() < 0.3 else draw
    return [stem.randrange(300, 1000) for _ in range(draw.choice((3, 17, 40, 70)))]


def _invalid(draw: random.Random) -> Ask:
    """Refused by the balancer, by the prefill side, and by its reader of JSON."""
    wrong = draw.choice(({"temperature": 7}, {"prompt": [UNKNOWN_ID]}, {"prompt": [5] * 600}, {"stop": 3}))
    body = {"prompt": FINE, "max_tokens": 2, "stream": draw.random() < 0.5, **wrong}
    return Ask(intent="invalid", route=COMPLETIONS, body=body)


@dataclass
class Client:
    """One who asks one thing after the other, on a connection that is kept while answers end well."""

    url: str
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None, repr=False)

    async def ask(self, ask: Ask) -> End:
        """Until its end, whatever that is."""
        began = time.monotonic()
        reader, writer = await self._connected()
        writer.write(self._encoded(ask))
        if isinstance(ask.leaves_after, float):
            await asyncio.sleep(ask.leaves_after)
            self.close()
            return End(ask=ask, status=0, code="left", seconds=time.monotonic() - began)
        status, headers = await _head(reader)
        code, finishes = None, list[str]()
        if headers.get("transfer-encoding") == "chunked":
            async for number, event in _numbered(reader):
                code = code or _code(event)
                finishes += _finishes(event)
                if number == ask.leaves_after:
                    self.close()
                    return End(ask=ask, status=status, code="left", seconds=time.monotonic() - began)
        else:
            answer = json.loads(await reader.readexactly(int(headers["content-length"])))
            code, finishes = _code(answer), [*_finishes(answer)]
        if headers.get("connection") == "close":
            self.close()
        return End(ask=ask, status=status, code=code, seconds=time.monotonic() - began, finishes=tuple(finishes))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            address = urlsplit(self.url)
            self._streams = await asyncio.open_connection(address.hostname, address.port)
        return self._streams

    @staticmethod
    def _encoded(ask: Ask) -> bytes:
        body = json.dumps(ask.body).encode()
        lines = [
            f"POST {ask.route} HTTP/1.1",
            "Host: soak",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if ask.time_limit_s is not None:
            lines.append(f"X-Request-Timeout: {ask.time_limit_s}")
        return "\r\n".join([*lines, "", ""]).encode() + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    fields = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip().lower() for name, _, value in fields}


async def _numbered(reader: asyncio.StreamReader) -> Any:
    """Events of a stream, from 1 on. The body must end in order, with ``[DONE]`` or with an error."""
    number, waiting, last = 0, b"", None
    while size := int(await reader.readuntil(b"\r\n"), 16):
        waiting += await reader.readexactly(size)
        await reader.readexactly(2)
        *events, waiting = waiting.split(b"\n\n")
        for event in events:
            assert event.startswith(b"data: "), event
            number += 1
            last = None if event == b"data: [DONE]" else json.loads(event.removeprefix(b"data: "))
            yield number, last or {}
    await reader.readexactly(2)
    assert not waiting and (last is None or "error" in last), f"a stream without an end: {last} {waiting!r}"


def _code(answer: dict[str, Any]) -> str | None:
    return str(answer["error"]["code"]) if "error" in answer else None


def _finishes(answer: dict[str, Any]) -> Iterator[str]:
    yield from (choice["finish_reason"] for choice in answer.get("choices", ()) if choice["finish_reason"])


async def serve(url: str, wanted: Iterator[Ask], *, at_once: int) -> list[End]:
    """All of them, by so many clients; the ends in the order in which they came."""
    ends = list[End]()

    async def one() -> None:
        client = Client(url)
        for ask in wanted:
            async with asyncio.timeout(ENDS_WITHIN_S):
                ends.append(await client.ask(ask))
        client.close()

    await asyncio.gather(*(one() for _ in range(at_once)))
    return ends


def counted(ends: list[End]) -> Counter[str]:
    """How often each kind of end came."""
    return Counter(end.kind for end in ends)
