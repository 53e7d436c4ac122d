"""The measuring client: first-token times and output rates through `/v1/completions`, token ids in, greedy."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

FIRST_ID = 300  # above the special tokens and single bytes of a small tokenizer
NUM_WARM_UP = 3


def prompt(length: int, *, seed: int, vocab_size: int = 1024) -> list[int]:
    """Random token ids without special tokens; the same for the same arguments, else with nothing in common to share."""
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(FIRST_ID, vocab_size) for _ in range(length)]


def client() -> httpx.AsyncClient:
    """A client that keeps connections and takes no proxy from its surroundings."""
    return httpx.AsyncClient(timeout=300.0, trust_env=False)


class Watch:
    """One connection that times streams. Written by hand: a client library takes as long as some of what is measured."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def first_token_s(self, ids: Sequence[int], *, max_tokens: int = 2) -> float:
        """Seconds from sending a request to its first event; returns when the whole answer is here."""
        return (await self.ask(ids, max_tokens=max_tokens))[0]

    async def ask(self, ids: Sequence[int], *, max_tokens: int = 2, **fields: Any) -> tuple[float, int]:
        """The same, and how many of ``ids`` the server says it had from before. ``fields``: more of the body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        body = json.dumps({**_body(ids, max_tokens=max_tokens, stream=True), **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        began = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status + await reader.read(1000)
        await reader.readuntil(b"data:")
        took = time.perf_counter() - began
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")  # the end of a body in chunks
        return took, cached_tokens(rest)

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()


def cached_tokens(stream: bytes) -> int:
    """What the usage of a stream says."""
    found = re.search(rb'"cached_tokens": ?(\d+)', stream)
    assert found, f"a stream without usage: {stream[-500:]!r}"
    return int(found[1])


async def first_tokens_s(urls: dict[str, str], *, length: int, rounds: int) -> dict[str, list[float]]:
    """First-token seconds of each server, asked in turn with the same prompts, one request at a time."""
    watches = {name: Watch(url) for name, url in urls.items()}
    times: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(NUM_WARM_UP + rounds):
        for name, watch in watches.items():
            took = await watch.first_token_s(prompt(length, seed=number))
            if number >= NUM_WARM_UP:
                times[name].append(took)
    for watch in watches.values():
        watch.close()
    return times


async def output_rate(url: str, *, batch: int, length: int, num_tokens: int, seed: int) -> float:
    """Output tokens per second of ``batch`` requests that start together and run to ``num_tokens`` each."""
    async with client() as http:

        async def one(number: int) -> int:
            ids = prompt(length, seed=seed * 1000 + number)
            response = await http.post(f"{url}/v1/completions", json=_body(ids, max_tokens=num_tokens, stream=False))
            response.raise_for_status()
            return int(response.json()["usage"]["completion_tokens"])

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(batch)))
        return sum(counts) / (time.perf_counter() - began)


async def counter(url: str, name: str) -> float:
    """A counter of a server's `/metrics`, all its labels together; 0 if it has not counted yet."""
    return total(await metrics(url), name)


async def metrics(url: str) -> str:
    """The text of a server's `/metrics`."""
    async with client() as http:
        response = await http.get(f"{url}/metrics")
        response.raise_for_status()
    return response.text


def total(text: str, name: str, label: str = "") -> float:
    """The sum of a metric in such a text, of all its series or of those with this label (`key="value"`)."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _body(ids: Sequence[int], *, max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "model": "",
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
