"""The measuring client: first-token times and output rates through `/v1/completions`, token ids in, greedy."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

FIRST_ID = 300  # above the special tokens and single bytes of a small tokenizer


def prompt(length: int, *, seed: int, vocab_size: int = 1024) -> list[int]:
    """Random token ids without special tokens; the same for the same arguments."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ID, vocab_size) for _ in range(length)]


def client() -> httpx.AsyncClient:
    """A client that keeps connections and takes no proxy from its surroundings."""
    return httpx.AsyncClient(timeout=300.0, trust_env=False)


async def first_token_s(http: httpx.AsyncClient, url: str, ids: Sequence[int]) -> float:
    """Seconds from sending a request to its first event."""
    began = time.perf_counter()
    async with http.stream("POST", f"{url}/v1/completions", json=_body(ids, max_tokens=2, stream=True)) as response:
        await _expect_ok(response)
        took = 0.0
        async for line in response.aiter_lines():
            if line.startswith("data:") and not took:
                took = time.perf_counter() - began
    return took


async def output_rate(http: httpx.AsyncClient, url: str, *, batch: int, length: int, num_tokens: int, seed: int) -> float:
    """Output tokens per second of ``batch`` requests that start together and run to ``num_tokens`` each."""

    async def one(number: int) -> int:
        ids = prompt(length, seed=seed * 1000 + number)
        response = await http.post(f"{url}/v1/completions", json=_body(ids, max_tokens=num_tokens, stream=False))
        await _expect_ok(response)
        return int(response.json()["usage"]["completion_tokens"])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(number) for number in range(batch)))
    return sum(counts) / (time.perf_counter() - began)


async def alternate(urls: dict[str, str], *, length: int, rounds: int) -> dict[str, float]:
    """Median first-token seconds of each server, asked in turn with the same prompts, one request at a time."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    async with client() as http:
        for number in range(rounds + 3):
            for name, url in urls.items():
                took = await first_token_s(http, url, prompt(length, seed=number))
                if number >= 3:  # the first ones warm up
                    times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def _body(ids: Sequence[int], *, max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "model": "",
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


async def _expect_ok(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        await response.aread()
        raise httpx.HTTPStatusError(f"{response.status_code}: {response.text}", request=response.request, response=response)
