"""A client's request from its acceptance to its one end: its course, and what cuts that short.

Knows the client only as something that takes a head and bytes, so that the end-to-end probe is a client like any other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import DeadlineExceeded, LongcatError
from longcat_pd.load_balancer.attempt import Call, LegFailed, Means
from longcat_pd.load_balancer.course import Client, Course
from longcat_pd.load_balancer.farewell import tell_failure
from longcat_pd.load_balancer.progress import Progress
from longcat_pd.load_balancer.replies import failure_of
from longcat_pd.load_balancer.request_spans import request_spans
from longcat_pd.server import sse
from longcat_pd.server.gate import Cut

KEPT = 50  # requests that can be looked at


@dataclass(frozen=True)
class Proof:
    """The last time that a token came out of a pair."""

    at: float
    pair: tuple[str, str]


class Proxy:
    """Serves clients through the pool."""

    def __init__(self, means: Means, config: LoadBalancerConfig) -> None:
        self.proof: Proof | None = None
        self.recent: deque[Progress] = deque(maxlen=KEPT)  # of the clients' requests that began last
        self._means = means
        self._config = config

    async def serve(
        self, call: Call, client: Client, *, gone: Awaitable[Any], cuts: list[Cut], counts: bool = True
    ) -> Progress:
        """Answer one request. Returns when the client has its answer or error, or has gone.

        Args:
            gone: is done when the client has closed its connection.
            cuts: of the gate; to be told when the request has to end with an error.
            counts: false for a probe.
        """
        progress = Progress(started=self._means.clock.now(), request_id=call.request_id, counts=counts)
        if counts:
            self.recent.append(progress)
        try:
            await self._until_cut(call, client, progress=progress, gone=gone, cuts=cuts)
        except LegFailed as failed:
            progress.failure, progress.failed_at = failed.failure, failed.instance.name
            failed.__traceback__ = None  # its frames hold the tasks that hold it: all the request had would stay
        except LongcatError as error:
            progress.failure = failure_of(error)
            error.__traceback__ = None
        except asyncio.CancelledError:
            progress.cut_by = "drain"
            raise
        finally:
            if progress.counts:
                progress.account(self._means.metrics, self._means.clock.now())
                self._tell_spans(call, progress)
        if progress.failure is not None:
            await tell_failure(client, progress.failure, request_id=call.request_id, clock=self._means.clock)
        return progress

    async def _until_cut(
        self, call: Call, client: Client, *, progress: Progress, gone: Awaitable[Any], cuts: list[Cut]
    ) -> None:
        """Run the request until it ends by itself, the client goes, its time is over, or the gate cuts it."""
        clock = self._means.clock
        cut: asyncio.Future[LongcatError] = asyncio.get_running_loop().create_future()
        cuts.append(lambda error: None if cut.done() else cut.set_result(error))
        course = Course(
            self._means,
            self._config,
            call=call,
            client=client,
            progress=progress,
            on_piece=lambda: self._note_proof(progress),
        )
        work = asyncio.ensure_future(course.run())
        left = asyncio.ensure_future(gone)
        late = asyncio.ensure_future(clock.sleep(call.deadline - clock.now()))
        helpers: list[asyncio.Future[Any]] = [left, late, cut]
        if call.is_stream and self._config.keepalive_comment_s > 0:
            helpers.append(asyncio.ensure_future(self._keep_alive(client, progress)))
        try:
            ends: set[asyncio.Future[Any]] = {work, left, late, cut}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # who has the whole answer may go while the legs are closed
            if progress.told_at is not None and work not in done:
                done, _ = await asyncio.wait(ends - {left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # whatever ended it, the calls to the workers are closed before anything else happens
            await _end(work, *helpers)
        if not work.cancelled():
            work.result()
        elif progress.told_at is not None:
            return  # the client has the whole answer; only the end of its calls was cut
        elif left in done:
            progress.cut_by = "client"
        elif late in done:
            progress.cut_by = "deadline"
            raise DeadlineExceeded("the time of the request is over")
        else:
            progress.cut_by = "drain"
            raise cut.result()

    def _tell_spans(self, call: Call, progress: Progress) -> None:
        tracer, trace = self._means.tracer, call.traced
        if tracer is not None and trace is not None and trace.is_sampled:
            tracer.keep([*request_spans(trace, progress, route=call.route)])

    def _note_proof(self, progress: Progress) -> None:
        if progress.counts and progress.pair is not None:
            self.proof = Proof(self._means.clock.now(), progress.pair.names)

    async def _keep_alive(self, client: Client, progress: Progress) -> None:
        """A comment after each silent time, which also fixes the status at 200."""
        silent_s = self._config.keepalive_comment_s
        progress.last_sent = self._means.clock.now()
        while True:
            await self._means.clock.sleep(progress.last_sent + silent_s - self._means.clock.now())
            if self._means.clock.now() - progress.last_sent < silent_s:
                continue
            progress.last_sent = self._means.clock.now()
            if not client.is_started:
                await client.start(200, sse.HEADERS)
            await client.send(sse.KEEP_ALIVE)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done yet and wait until nothing of it runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
