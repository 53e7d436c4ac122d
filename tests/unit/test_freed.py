"""What a request leaves for the garbage collector when it has ended, in whatever way: nothing that is large."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import httpx
import pytest

from longcat_pd.errors import DeadlineExceeded, EngineFault
from longcat_pd.load_balancer.attempt import Attempt
from longcat_pd.load_balancer.transport import WorkerTransport, _Connection
from longcat_pd.load_balancer.workers import Workers
from longcat_pd.server.merge import merged
from tests.balancer_rig import BODY, DONE, Rig, Script, chunk, error, never, prefilled, stream, whole
from tests.manual_clock import ManualClock


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(*kinds: type) -> list[str]:
    return [type(found).__name__ for found in gc.get_objects() if type(found) in kinds]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", ["good", "left", "late", "cut"])
async def test_a_request_of_the_balancer(is_stream: bool, ending: str) -> None:
    rig = await Rig.make()
    middle = stream(chunk("a"), 50.0, DONE, clock=rig.clock)
    good = stream(chunk("a"), chunk("", "stop"), DONE) if is_stream else whole
    scripts: dict[str, Script] = {"good": good, "left": never, "late": middle if is_stream else never}
    rig.script(p0=prefilled, d0=scripts.get(ending, error(503, "draining", "self")))
    before = sorted(alive(Attempt, httpx.Response))
    exchange = rig.post({**BODY, "stream": is_stream}, **{"x-request-timeout": "2"})
    await rig.clock.advance(1)
    if ending == "left":
        await exchange.leave()
    await rig.clock.advance(3)
    await exchange.end()
    assert sorted(alive(Attempt, httpx.Response)) == before


class Held:
    """Something that a source works with."""


async def source(held: Held, *, fails: bool) -> AsyncGenerator[int, None]:
    yield id(held)
    if fails:
        raise EngineFault("of a source")
    await asyncio.Event().wait()


@pytest.mark.parametrize("ending", ["left", "late", "failed"])
async def test_sources_that_are_merged(ending: str) -> None:
    async def read() -> None:
        limit_s = 0.0 if ending == "late" else 60.0
        async with aclosing(
            merged(sources, time_left_s=limit_s, cuts=[], on_cut=lambda: None, on_leaving=lambda _: None)
        ) as items:
            async for _ in items:
                if ending == "left":
                    return

    held = Held()
    gone, sources = weakref.ref(held), [source(held, fails=ending == "failed") for _ in range(2)]
    del held
    try:
        await read()
    except (DeadlineExceeded, EngineFault):
        assert ending != "left"
    sources.clear()
    await asyncio.sleep(0)
    assert gone() is None


@pytest.mark.parametrize("ending", ["good", "left"])
async def test_a_connection_to_a_worker(ending: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + (b"hi" if ending == "good" else b"h"))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    workers = Workers(ManualClock(), transport=WorkerTransport(60.0))
    port = server.sockets[0].getsockname()[1]
    async with workers.open(f"http://127.0.0.1:{port}/") as incoming:
        if ending == "good":
            assert (await incoming.whole()).body == b"hi"
        else:
            assert await anext(incoming.chunks()) == b"h"
    del incoming
    await workers.close()
    server.close()
    until = asyncio.get_running_loop().time() + 20.0
    while (left := alive(_Connection, httpx.Response)) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert left == []
