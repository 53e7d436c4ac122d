"""A TCP relay between a balancer and one worker, which makes faults in calls to generate and lets everything else pass.

One act for each call to generate, in order; the last one repeats. ``calls`` tells what came and what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from longcat_pd.errors import LongcatError
from longcat_pd.server.errors import error_headers, error_object, to_json

End = asyncio.StreamReader, asyncio.StreamWriter
Fault = Literal["pass", "reset", "answer", "cut"]


@dataclass(frozen=True)
class Act:
    """What becomes of a call.

    pass: it goes on to the worker, whose answer comes ``after_s`` later than it could. reset: the connection is reset
    ``after_s`` later, on both sides. answer: the relay answers with ``data`` in place of the worker, which never hears of
    it. cut: of the worker's answer so many events pass, then half of one, then the connection is reset.
    """

    fault: Fault = "pass"
    after_s: float = 0.0
    data: bytes = b""
    num_events: int = 0


PASS = Act()
RESET = Act("reset")


def answer(status: int, body: bytes, **headers: str) -> Act:
    """An answer of the relay's own."""
    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    head = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in told.items())]
    return Act("answer", data="\r\n".join([*head, "", ""]).encode() + body)


def refusal(error: LongcatError) -> Act:
    """A worker's answer with this error."""
    return answer(error.status, to_json(error_object(error, "r")), **error_headers(error, is_worker=True))


@dataclass
class Seen:
    """One call to generate. Times are those of the event loop."""

    began: float
    headers: dict[str, str]
    ended: float | None = None


@dataclass
class Relay:
    """In front of a worker at ``port``."""

    port: int
    acts: list[Act] = field(default_factory=lambda: [PASS])
    calls: list[Seen] = field(default_factory=list)
    url: str = ""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def script(self, *acts: Act) -> None:
        """What happens from now on."""
        self.acts = list(acts)
        self.calls.clear()

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection of the balancer, with one of its own to the worker."""
        self._writers.add(to_client)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            worker, to_worker = await asyncio.open_connection("127.0.0.1", self.port)
            self._writers.add(to_worker)
            try:
                await self._calls((client, to_client), (worker, to_worker))
            finally:
                for writer in (to_client, to_worker):
                    self._writers.discard(writer)
                    _reset(writer)

    async def _calls(self, client: End, worker: End) -> None:
        while request := await _message(client[0]):
            if not request.startswith(b"POST /v1/"):
                worker[1].write(request)
                await self._until_next(client, worker, PASS)
                continue
            seen = Seen(asyncio.get_running_loop().time(), _headers(request))
            self.calls.append(seen)
            act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
            try:
                if act.fault == "answer":
                    client[1].write(act.data)
                    continue
                if act.fault == "reset" and not act.after_s:
                    return
                worker[1].write(request)
                await self._until_next(client, worker, act)
            finally:
                seen.ended = asyncio.get_running_loop().time()

    async def _until_next(self, client: End, worker: End, act: Act) -> None:
        """Pass the worker's answer on. Raises ConnectionResetError where the act, or one of the two, ends it."""
        passing = asyncio.ensure_future(_pass_answer(worker[0], client[1], act))
        leaving = asyncio.ensure_future(_left(client[0]))
        ends: set[asyncio.Future[None]] = {passing, leaving}
        if act.fault == "reset":
            ends.add(asyncio.ensure_future(asyncio.sleep(act.after_s)))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if passing not in done:
                raise ConnectionResetError
            await passing
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def close(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST, not FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    length = int(_headers(head).get("content-length", "0"))
    return head + await reader.readexactly(length)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def _left(reader: asyncio.StreamReader) -> None:
    """Wait until the balancer closes the connection; it sends nothing while a call is open."""
    assert not await reader.read(1)


async def _pass_answer(worker: asyncio.StreamReader, to_client: asyncio.StreamWriter, act: Act) -> None:
    head = await worker.readuntil(b"\r\n\r\n")
    if act.fault == "pass":
        await asyncio.sleep(act.after_s)
    to_client.write(head)
    headers = _headers(head)
    if "content-length" in headers:
        to_client.write(await worker.readexactly(int(headers["content-length"])))
        return
    passed = 0
    while True:
        size = await worker.readuntil(b"\r\n")
        data = await worker.readexactly(int(size, 16) + 2)
        passed += data.count(b"\n\n")
        if act.fault == "cut" and passed > act.num_events:
            half = _events_up_to(data, data.count(b"\n\n") - (passed - act.num_events))
            to_client.write(f"{len(half):x}\r\n".encode() + half + b"\r\n")
            await to_client.drain()
            await asyncio.sleep(0.05)  # a reset would overtake what is still on its way
            raise ConnectionResetError
        to_client.write(size + data)
        if int(size, 16) == 0:
            return


def _events_up_to(data: bytes, count: int) -> bytes:
    """So many events, and half of the next."""
    end = 0
    for _ in range(count):
        end = data.index(b"\n\n", end) + 2
    return data[: end + 12]


@contextlib.asynccontextmanager
async def relays(ports: dict[str, int]) -> AsyncIterator[dict[str, Relay]]:
    """One for each instance."""
    made = {name: Relay(port) for name, port in ports.items()}
    servers: Sequence[asyncio.Server] = []
    try:
        for relay in made.values():
            server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
            relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            servers = [*servers, server]
        yield made
    finally:
        for server in servers:
            server.close()
        for relay in made.values():
            relay.close()
