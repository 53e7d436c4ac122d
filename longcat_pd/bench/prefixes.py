"""First-token times of prompts whose beginning was sent before, against prompts that share nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from longcat_pd.bench import client
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import BenchFailed

LENGTH, SHARED = 1000, 900
ROUNDS = 10


def prefix_rows(urls: Mapping[str, str], *, block_size: int) -> Iterator[Row]:
    """Of each server, by its name."""
    for name, url in urls.items():
        shared, fresh = asyncio.run(_first_tokens_s(url, block_size=block_size))
        what = f"first token, prompt {LENGTH}, {SHARED / LENGTH:.0%} of it sent before, {name}"
        yield compared(what, shared, fresh, unit="ms", them="nothing shared")


async def _first_tokens_s(url: str, *, block_size: int) -> tuple[list[float], list[float]]:
    """Seconds with a shared beginning, and without; in turn, the first of each warms up."""
    watch, stem = client.Watch(url), client.prompt(SHARED, seed=0)
    shared, fresh = list[float](), list[float]()
    await watch.first_token_s([*stem, *client.prompt(LENGTH - SHARED, seed=0)])
    for number in range(1, 2 + ROUNDS):
        took, cached = await watch.ask([*stem, *client.prompt(LENGTH - SHARED, seed=number)])
        check_cached(cached, SHARED - SHARED % block_size)
        shared.append(took)
        took, cached = await watch.ask(client.prompt(LENGTH, seed=number))
        check_cached(cached, 0)
        fresh.append(took)
    watch.close()
    return shared[1:], fresh[1:]


def check_cached(found: int, expected: int) -> None:
    """What a server had from before is what was sent before, in whole blocks: nothing else is measured."""
    if found != expected:
        raise BenchFailed(f"{found} tokens of a prompt came from the cache of prefixes, not {expected}")
