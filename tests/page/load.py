"""The load that the page is looked at under: streams, so many at a time, and what became of them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx

PAUSE_S = 2.0  # before a stream that failed is asked for again
FEWEST_TOKENS, MORE_TOKENS = 500, 25  # of an answer: each place has a length of its own, so that they do not end together


class Load:
    """``num_streams`` at a time, the next one when one has ended. They may fail once ``victim`` is gone, and not before.

    ``run`` goes on until it is cancelled; a stream that goes on then is left.
    """

    def __init__(self, client: httpx.AsyncClient, num_streams: int, victim: int) -> None:
        self.num_ended = 0
        self.num_after_loss = 0
        self.troubles: list[str] = []
        self._client = client
        self._num_streams = num_streams
        self._victim = victim

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_another(place) for place in range(self._num_streams)))

    async def _one_after_another(self, place: int) -> None:
        for number in itertools.count():
            trouble = await self._stream(place, f"load-{place}-{number}")
            if not trouble:
                self.num_ended += 1
                continue
            if is_alive(self._victim):
                self.troubles.append(trouble)
            else:
                self.num_after_loss += 1
            await asyncio.sleep(PAUSE_S)

    async def _stream(self, place: int, name: str) -> str:
        """What went wrong with it, if anything."""
        body = {
            "prompt": [5 + place] * (20 + place),
            "max_tokens": FEWEST_TOKENS + place * MORE_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        last = ""
        try:
            async with self._client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
                async for line in answer.aiter_lines():
                    last = line or last
        except httpx.TransportError as error:
            return f"{name}: {error!r}"
        return "" if last == "data: [DONE]" else f"{name}: {answer.status_code}, ends with {last[:200]}"


def is_alive(pid: int) -> bool:
    """A killed process that nobody has asked after yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
