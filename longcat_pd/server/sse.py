"""Event streams, and noticing that a client has gone.

Owns the encoding of events, and the two ways in which an answer is produced while its connection is watched: as a whole
(``while_connected``) and as a stream (``EventStream``). Does not know what an event says. Closing the connection is the
only cancel signal there is, so both act on it at once and not at their next write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.errors import LongcatError
from longcat_pd.server.errors import ClientGone, Message, Receive, Scope, Send, ending_in_error_event, to_json

T = TypeVar("T")

FAREWELL_S = 1.0  # how long a client that does not read may hold up its own error
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(value: Any) -> bytes:
    """One event: ``data: <json>`` and an empty line."""
    return b"data: " + to_json(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` for as long as the client is there. The request's body must have been read.

    Raises:
        ClientGone: the client has closed the connection; ``work`` is cancelled and has ended by then.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for part in (task, watch):
            part.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. Status and headers leave with the first of them, so that an exception before it is the
    caller's to answer; one after it ends the stream with an error event.

    Args:
        events: encoded events; closed in any case.
        request_id: for the error event.
        on_error: told of an exception after the first event.
        time_left_s: then, or when ``cut`` is set, ``events`` end soon with an error. A client that does not take it in
            FAREWELL_S has its connection closed: what it holds up is held no longer.
        keepalive_s: after so many silent seconds a comment goes out, which fixes the status at 200; 0 is off.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request_id: str,
        *,
        on_error: Callable[[LongcatError], None],
        time_left_s: float,
        cut: asyncio.Event,
        keepalive_s: float = 0.0,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id
        self._on_error = on_error
        self._time_left_s = time_left_s
        self._cut = cut
        self._unsent: Message | None = None  # what waits for the client
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises ClientGone also for a client that does not read."""
        await while_connected(receive, self._until_cut(send))

    async def _until_cut(self, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            limit_s = max(self._time_left_s, 0.0)
            await asyncio.wait((sending, cut), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            while not sending.done():
                unsent = self._unsent
                await asyncio.wait((sending,), timeout=FAREWELL_S)
                if unsent is not None and unsent is self._unsent:
                    log.logger().debug("client_does_not_read")
                    raise ClientGone
            sending.result()
        finally:
            for part in (sending, cut):
                part.cancel()
            await asyncio.gather(sending, cut, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        has_begun = False
        source = ending_in_error_event(self._events, self._request_id, lambda: has_begun, self._on_error)
        if self._keepalive_s > 0:
            source = _with_comments(source, self._keepalive_s)
        async with aclosing(source):
            async for data in source:
                if not has_begun:
                    has_begun = True
                    head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await self._send(send, head)
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._unsent = message
        await send(message)
        self._unsent = None


async def _with_comments(source: AsyncGenerator[bytes, None], silent_s: float) -> AsyncGenerator[bytes, None]:
    """The items of ``source``, and a comment whenever none came for ``silent_s``.

    They are made by a task of their own, because a limited wait must not cut into their making. It is one item ahead.
    """
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    taken = asyncio.Semaphore(0)
    clock = MonotonicClock()

    async def produce() -> None:
        try:
            async with aclosing(source):
                async for data in source:
                    queue.put_nowait(data)
                    await taken.acquire()
        finally:
            queue.put_nowait(None)

    producer = asyncio.ensure_future(produce())
    try:
        while True:
            try:
                data = await clock.within(silent_s, queue.get())
            except TimeoutError:
                data = KEEP_ALIVE
            if data is None:
                await producer  # raises what went wrong
                return
            if data is not KEEP_ALIVE:
                taken.release()
            yield data
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
