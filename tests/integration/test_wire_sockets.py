"""Sockets of an event loop: no message is overlooked, whatever else the socket does at that moment."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from longcat_pd.wire import AsyncSocket, BlockingSocket, Unsendable, tcp
from tests.peers import OPEN

LIMIT_S = 5.0


@pytest.fixture
def peer() -> Iterator[BlockingSocket]:
    socket = BlockingSocket("dealer", "tcp://127.0.0.1:*", bind=True, admission=OPEN)
    yield socket
    socket.close()


async def connected(peer: BlockingSocket) -> AsyncSocket:
    mine = AsyncSocket("dealer", peer.endpoint, bind=False, admission=OPEN)
    mine.send([b"hello"])
    assert await asyncio.to_thread(peer.recv, LIMIT_S) == [b"hello"]
    return mine


async def test_sending_does_not_swallow_the_signal_of_a_message(peer: BlockingSocket) -> None:
    mine = await connected(peer)
    for number in range(20):
        receiving = asyncio.ensure_future(mine.recv())
        await asyncio.sleep(0)
        peer.send([b"%d" % number])
        threading.Event().wait(0.01)  # it is here, and the loop has not looked
        mine.send([b"meanwhile"])
        assert await asyncio.wait_for(receiving, LIMIT_S) == [b"%d" % number]
    mine.close()


async def test_messages_that_came_together_are_all_received(peer: BlockingSocket) -> None:
    mine = await connected(peer)
    for number in range(100):
        peer.send([b"a", b"%d" % number])
    assert [await asyncio.wait_for(mine.recv(), LIMIT_S) for _ in range(100)] == [[b"a", b"%d" % n] for n in range(100)]
    mine.close()


async def test_a_cancelled_wait_loses_nothing(peer: BlockingSocket) -> None:
    mine = await connected(peer)
    for number in range(20):
        receiving = asyncio.ensure_future(mine.recv())
        await asyncio.sleep(0)
        peer.send([b"%d" % number])
        threading.Event().wait(0.005)
        await asyncio.sleep(0)
        if not receiving.done():
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        got = await asyncio.wait_for(mine.recv(), LIMIT_S) if receiving.cancelled() else receiving.result()
        assert got == [b"%d" % number]
    mine.close()


async def test_closing_ends_the_wait_and_sending(peer: BlockingSocket) -> None:
    mine = await connected(peer)
    receiving = asyncio.ensure_future(mine.recv())
    await asyncio.sleep(0)
    mine.close()
    await asyncio.wait({receiving}, timeout=LIMIT_S)
    assert receiving.cancelled()
    with pytest.raises(Unsendable):
        mine.send([b"x"])


async def test_a_name_is_bound_by_its_address() -> None:
    heard = AsyncSocket("pull", "tcp://localhost:*", bind=True, admission=OPEN)
    assert heard.endpoint.startswith("tcp://127.0.0.1:")
    port = heard.endpoint.rpartition(":")[2]
    said = AsyncSocket("push", tcp("localhost", port), bind=False, admission=OPEN)
    said.send([b"hello"])
    assert await asyncio.wait_for(heard.recv(), LIMIT_S) == [b"hello"]
    said.close()
    heard.close()


def test_a_name_of_both_kinds_of_addresses_is_that_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolved(host: str, port: None, **options: Any) -> list[Any]:
        addresses = {"p0-0.p0": ["::1", "127.0.0.1"], "p0-0.six": ["::1"]}[host]
        return [entry for address in addresses for entry in real(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for name, address in (("p0-0.p0", "127.0.0.1"), ("p0-0.six", "[::1]")):
        heard = BlockingSocket("pull", tcp(name, "*"), bind=True, admission=OPEN)
        assert heard.endpoint.startswith(f"tcp://{address}:")
        heard.close()


def test_a_name_that_nobody_knows_is_an_oserror_that_names_it() -> None:
    with pytest.raises(OSError, match=r"tcp://nobody\.invalid:29999"):
        AsyncSocket("pull", "tcp://nobody.invalid:29999", bind=True, admission=OPEN)


async def test_an_address_of_ipv6_has_brackets() -> None:
    assert tcp("::1", 5) == "tcp://[::1]:5" and tcp("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    heard = AsyncSocket("pull", tcp("::1", "*"), bind=True, admission=OPEN)
    said = AsyncSocket("push", heard.endpoint, bind=False, admission=OPEN)
    said.send([b"hello"])
    assert await asyncio.wait_for(heard.recv(), LIMIT_S) == [b"hello"]
    said.close()
    heard.close()
