"""The relay of ``longcat-pd fault relay``: late, standing still, cut and reset, one way or both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from longcat_pd.errors import ConfigError
from longcat_pd.fault.relay import Relay, RelayFaults, relaying

LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def server(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """The port where each connection is served so, until the end."""
    tasks: list[asyncio.Task[None]] = []

    async def life(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listening = await asyncio.start_server(
        lambda reader, writer: tasks.append(asyncio.ensure_future(life(reader, writer))), "127.0.0.1", 0
    )
    try:
        yield int(listening.sockets[0].getsockname()[1])
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()


def echo() -> contextlib.AbstractAsyncContextManager[int]:
    return server(send_back)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, relay: Relay) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", relay.port))

    async def say(self, words: bytes) -> None:
        self.writer.write(words)
        await self.writer.drain()

    async def hears(self, count: int, limit_s: float = LIMIT_S) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), limit_s)

    async def hears_the_end(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), LIMIT_S)


async def test_everything_passes_and_ends_by_halves() -> None:
    async with echo() as port, relaying(("127.0.0.1", port)) as relay:
        client = await Client.of(relay)
        await client.say(b"x" * 300_000)
        client.writer.write_eof()
        assert await client.hears_the_end() == b"x" * 300_000
        client.writer.close()


async def test_a_stall_holds_up_until_it_flows() -> None:
    async with echo() as port, relaying(("127.0.0.1", port)) as relay:
        client = await Client.of(relay)
        relay.stall()
        await client.say(b"hello")
        with pytest.raises(TimeoutError):
            await client.hears(5, 0.2)
        assert relay.num_open == 1
        relay.flow()
        assert await client.hears(5) == b"hello"
        client.writer.close()


async def test_a_stall_behind_so_many_bytes_is_over_when_it_flows() -> None:
    faults = RelayFaults(direction="to", stall_after=5)
    async with echo() as port, relaying(("127.0.0.1", port), faults=faults) as relay:
        client = await Client.of(relay)
        await client.say(b"hello")
        assert await client.hears(5) == b"hello"
        await client.say(b"again")
        with pytest.raises(TimeoutError):
            await client.hears(5, 0.2)
        relay.flow()
        assert await client.hears(5) == b"again"
        await client.say(b"and on")
        assert await client.hears(6) == b"and on"
        client.writer.close()


@pytest.mark.parametrize("direction", ["to", "from"])
async def test_a_fault_of_one_way_leaves_the_other_alone(direction: str) -> None:
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"news")
        if await reader.read(4):
            heard.set()
        await reader.read()

    faults = RelayFaults(direction=direction, stall_after=0)  # type: ignore[arg-type]
    async with server(serve) as port, relaying(("127.0.0.1", port), faults=faults) as relay:
        client = await Client.of(relay)
        await client.say(b"talk")
        if direction == "to":
            assert await client.hears(4) == b"news" and not heard.is_set()
        else:
            await asyncio.wait_for(heard.wait(), LIMIT_S)
            with pytest.raises(TimeoutError):
                await client.hears(4, 0.1)
        client.writer.close()


async def test_what_is_slow_comes_later() -> None:
    async with echo() as port, relaying(("127.0.0.1", port), faults=RelayFaults(delay_s=0.1)) as relay:
        client, began = await Client.of(relay), asyncio.get_running_loop().time()
        await client.say(b"hello")
        assert await client.hears(5) == b"hello"
        assert asyncio.get_running_loop().time() - began >= 0.2, "once each way"
        relay.become(RelayFaults())
        await client.say(b"again")
        assert await client.hears(5) == b"again"
        client.writer.close()


@pytest.mark.parametrize("resets", [False, True])
async def test_a_cut_after_so_many_bytes(resets: bool) -> None:
    faults = RelayFaults(direction="from", cut_after=7, resets=resets)
    async with echo() as port, relaying(("127.0.0.1", port), faults=faults) as relay:
        client = await Client.of(relay)
        await client.say(b"hello")
        assert await client.hears(5) == b"hello"
        await client.say(b"world")
        if resets:
            with pytest.raises(ConnectionResetError):  # what has arrived and was not read is thrown away
                await client.hears_the_end()
        else:
            assert await client.hears_the_end() == b"wo"
        client.writer.close()
        other = await Client.of(relay)
        await other.say(b"hello")
        assert await other.hears(5) == b"hello", "each connection has its own count"
        other.writer.close()


async def test_a_cut_ends_every_connection_and_the_next_is_served() -> None:
    async with echo() as port, relaying(("127.0.0.1", port)) as relay:
        clients = [await Client.of(relay) for _ in range(3)]
        for client in clients:
            await client.say(b"hi")
            assert await client.hears(2) == b"hi"
        relay.cut()
        for client in clients:
            assert await client.hears_the_end() == b""
            client.writer.close()
        client = await Client.of(relay)
        await client.say(b"hi")
        assert await client.hears(2) == b"hi"
        client.writer.close()


async def test_a_target_that_is_away_is_an_end_and_one_elsewhere_is_refused() -> None:
    async with echo() as port:
        pass
    async with relaying(("127.0.0.1", port)) as relay:
        client = await Client.of(relay)
        assert await client.hears_the_end() == b""
        client.writer.close()
    with pytest.raises(ConfigError, match=r"to=192\.0\.2\.1: a relay passes on to loopback addresses alone"):
        Relay(("192.0.2.1", 80))
