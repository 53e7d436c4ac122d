"""What it costs to be looked at: 64 streams with the status page open and every request traced, against neither.

One cluster, one load that never stops. It is looked at in every other window: a page's events are read, and requests say
that they have a trace (``traceparent``); in the others they say that they have none, and nobody reads. So both kinds of
window have the same processes. Owns the crowd, the page's reader and a collector that takes all and keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longcat_pd.bench import client, report
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import BenchFailed, Served, cluster, cpu_seconds, make_checkpoint
from longcat_pd.clock import MonotonicClock

PORT, PREFILL_PORT, DECODE_PORT, COLLECTOR_PORT = 24601, 24620, 24640, 24660
STREAMS = 64
CLUSTER = """
model: {path: %s, served_name: bench}
load_balancer: {port: %d}
tracing: {endpoint: "http://127.0.0.1:%d"}
prefill:
  engine: {block_size: 16, max_num_batched_tokens: 256, max_num_seqs: 64}
  instances: [{name: p0, http_port: %d}]
decode:
  engine: {block_size: 16, max_num_seqs: 64}
  instances: [{name: d0, http_port: %d}]
"""
LENGTH, FEWEST, MOST = 32, 16, 48  # ids of a prompt; tokens of an answer, drawn so that answers do not end together
WINDOW_S = 600.0
IDS = b'"token_ids":['
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\ntraceparent: 00-%s-%s-%s\r\n"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How much is measured. ``tokens``: of a window, which begins when every stream is of its kind."""

    pairs: int = 10
    tokens: int = 16384


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one window: output tokens a second, and processor seconds of the cluster for each."""

    rate: float
    cpu_s: float


class Crowd:
    """Streams in closed loops. ``num_tokens``: that have come."""

    def __init__(self, url: str) -> None:
        self.num_tokens = 0
        self._is_traced = False
        self._of_kind: set[int] = set()  # streams whose request says what it has to
        self._awaited = 0
        self._has_come = asyncio.Event()
        self._address = urlsplit(url)
        self._draw = random.Random(0)
        self._number = 0

    async def become(self, *, is_traced: bool) -> None:
        """Until every stream has a request that says so of itself."""
        self._is_traced = is_traced
        self._of_kind = set()
        while len(self._of_kind) < STREAMS:
            await self.come(1)

    async def come(self, num_tokens: int) -> None:
        """Until so many more have come."""
        self._awaited = self.num_tokens + num_tokens
        self._has_come.clear()
        await self._has_come.wait()

    async def run(self, stream: int) -> None:
        """One client, for ever. Raises BenchFailed for an answer that is not good."""
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        while True:
            writer.write(self._next_request())
            self._of_kind.add(stream)
            status = await reader.readuntil(b"\r\n\r\n")
            if not status.startswith(b"HTTP/1.1 200"):
                raise BenchFailed(f"{status!r} {await reader.read(1000)!r}")
            while (piece := await _chunk(reader)) != b"":
                self.num_tokens += piece.count(IDS)
                if self.num_tokens >= self._awaited:
                    self._has_come.set()

    def _next_request(self) -> bytes:
        self._number += 1
        tokens = self._draw.randint(FEWEST, MOST)
        body: dict[str, Any] = {"prompt": client.prompt(LENGTH, seed=self._number), "max_tokens": tokens, "temperature": 0}
        raw = json.dumps({**body, "ignore_eos": True, "return_token_ids": True, "stream": True}).encode()
        head = HEAD % (secrets.token_hex(16), secrets.token_hex(8), "01" if self._is_traced else "00")
        return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next piece of a body in chunks; nothing at its end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


@asynccontextmanager
async def _page(url: str) -> Any:
    """A status page that is open: its events are read."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /status/events HTTP/1.1\r\nHost: bench\r\n\r\n")
    reading = asyncio.ensure_future(_read_all(reader))
    try:
        yield
    finally:
        reading.cancel()
        writer.close()
        with suppress(asyncio.CancelledError):
            if not await reading:
                raise BenchFailed("the status page had no event")


async def _read_all(reader: asyncio.StreamReader) -> int:
    num_bytes = 0
    with suppress(asyncio.CancelledError):
        while data := await reader.read(1 << 16):
            num_bytes += len(data)
    return num_bytes


@asynccontextmanager
async def _collector() -> Any:
    """Yields what it was sent, in a list of one number: bytes."""
    taken = [0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split()[0])
                taken[0] += len(await reader.readexactly(length))
                writer.write(GOOD)

    server = await asyncio.start_server(answer, "127.0.0.1", COLLECTOR_PORT)
    try:
        yield taken
    finally:
        server.close()


async def watched(served: Served, windows: Windows) -> tuple[list[Seen], list[Seen]]:
    """Windows that were looked at, and the others, in pairs of neighbours. Raises BenchFailed."""
    looked: list[Seen] = []
    alone: list[Seen] = []
    async with _collector() as taken:
        crowd = Crowd(served.url)
        clients = [asyncio.ensure_future(crowd.run(stream)) for stream in range(STREAMS)]
        for pair in range(windows.pairs):
            for is_watched in (True, False) if pair % 2 else (False, True):
                before = taken[0]
                window = asyncio.ensure_future(_window(served, crowd, windows.tokens, is_watched=is_watched))
                await asyncio.wait({window, *clients}, return_when=asyncio.FIRST_COMPLETED, timeout=WINDOW_S)
                for task in clients:
                    if task.done():
                        task.result()
                if not window.done():
                    raise BenchFailed(f"a window took longer than {WINDOW_S:g} s")
                (looked if is_watched else alone).append(window.result())
                if is_watched and taken[0] == before:
                    raise BenchFailed("no span came to the collector")
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return looked, alone


async def _window(served: Served, crowd: Crowd, num_tokens: int, *, is_watched: bool) -> Seen:
    clock = MonotonicClock()
    async with AsyncExitStack() as stack:
        if is_watched:
            await stack.enter_async_context(_page(served.url))
        await crowd.become(is_traced=is_watched)
        tokens, cpu_s, began = crowd.num_tokens, cpu_seconds(served.pids.values()), clock.now()
        await crowd.come(num_tokens)
        num, took = crowd.num_tokens - tokens, clock.now() - began
        return Seen(rate=num / took, cpu_s=(cpu_seconds(served.pids.values()) - cpu_s) / num)


def watching_rows(folder: Path, windows: Windows) -> Iterator[Row]:
    """Throughput, and what the cluster's processes take of the cores for a token."""
    model = make_checkpoint(folder / "tiny-watched", "2.0", dtype="float32")
    config = folder / "watched.yaml"
    config.write_text(CLUSTER % (model, PORT, COLLECTOR_PORT, PREFILL_PORT, DECODE_PORT), encoding="utf-8")
    with cluster(config, root=folder) as served:
        looked, alone = asyncio.run(watched(served, windows))
    what, them = f"{STREAMS} streams, status page open, all traced", "neither"
    for seen in zip(looked, alone, strict=True):
        sys.stderr.write(f"{' | '.join(f'{s.rate:.0f} tokens/s, {1000 * s.cpu_s:.3f} ms' for s in seen)}\n")
    rates = [[seen.rate for seen in kind] for kind in (looked, alone)]
    yield compared(f"output tokens/s, {what}", *rates, unit="", goal="≥ 0.98", them=them)
    costs = [[seen.cpu_s for seen in kind] for kind in (looked, alone)]
    yield compared(f"processor time of all processes for a token, {what}", *costs, unit="ms", them=them)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print this part alone."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.bench.watching", description=__doc__)
    parser.add_argument("--pairs", type=int, default=Windows.pairs, help="windows of each kind")
    parser.add_argument("--tokens", type=int, default=Windows.tokens, help="of each window")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longcat-watching-") as scratch:
        rows = list(watching_rows(Path(scratch), Windows(pairs=options.pairs, tokens=options.tokens)))
    sys.stdout.write(report.table(report.machine(), rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
