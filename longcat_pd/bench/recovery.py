"""Ten times the load for half a minute, then the load of before: how refusals come, and how soon all is as it was.

Closed loops: every client asks again when it has its answer, or a while after a refusal. Before, during and after are of
one run, so that their ratio holds where absolute rates do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from longcat_pd.bench import client, report
from longcat_pd.bench.report import Row
from longcat_pd.bench.servers import BenchFailed, cluster, make_checkpoint
from longcat_pd.clock import MonotonicClock

PORT, PREFILL_PORT, DECODE_PORT = 24501, 24520, 24540
CLUSTER = """
model: {path: %s, served_name: bench}
load_balancer: {port: %d, max_inflight: %d}
prefill:
  engine: {block_size: 16, max_num_batched_tokens: 256, max_num_seqs: 8, max_queued_requests: %d}
  instances: [{name: p0, http_port: %d}]
decode:
  engine: {block_size: 16, max_num_seqs: 8, max_queued_requests: %d}
  instances: [{name: d0, http_port: %d}]
"""
REFUSALS = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
LENGTH, NUM_TOKENS = 16, 8
WITHIN_S = 5.0
ANSWERED_S = 120.0  # longest time of any request: who is accepted is answered, and who is refused is told at once
IDLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """Clients at once, ``times`` as many in the overload, and seconds of each phase.

    ``pause_s``: from a refusal to the next try.
    """

    clients: int = 8
    times: int = 10
    pause_s: float = 0.1
    warm_up_s: float = 3.0
    before_s: float = 10.0
    overload_s: float = 30.0
    after_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One request: when its answer was there, how long that took, and its status."""

    at: float
    seconds: float
    status: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a course brought. Rates: answers with status 200 a second; ``seconds_after``: in each second after it."""

    before: float
    during: float
    seconds_after: tuple[float, ...]
    offered: float
    refused: Counter[int]
    refusal_p99_s: float

    @property
    def after(self) -> float:
        """The rate once there were five seconds to recover in."""
        later = self.seconds_after[int(WITHIN_S) :]
        return sum(later) / len(later)


class Crowd:
    """Clients in closed loops. ``answers``: of all of them, in the order in which they came."""

    def __init__(self, url: str, course: Course) -> None:
        self.answers: list[Answered] = []
        self._address = urlsplit(url)
        self._course = course
        self._clock = MonotonicClock()
        self._number = 0

    async def run(self, until: asyncio.Event) -> None:
        """One client, from now until it has its answer after ``until`` is set. Raises BenchFailed if one does not come."""
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            while not until.is_set():
                began = self._clock.now()
                writer.write(self._next_request())
                status = await self._answer(reader)
                now = self._clock.now()
                self.answers.append(Answered(at=now, seconds=now - began, status=status))
                if status != httpx.codes.OK:
                    await self._clock.sleep(self._course.pause_s)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> int:
        try:
            return await self._clock.within(ANSWERED_S, _status(reader))
        except TimeoutError:
            raise BenchFailed(f"a request has no answer after {ANSWERED_S:g} s") from None
        except (EOFError, OSError) as error:
            raise BenchFailed(f"a request has no answer: {error}") from error

    def _next_request(self) -> bytes:
        self._number += 1
        body = {"prompt": client.prompt(LENGTH, seed=self._number), "max_tokens": NUM_TOKENS, "temperature": 0}
        raw = json.dumps({**body, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
        )
        return f"{head}\r\n\r\n".encode() + raw


async def _status(reader: asyncio.StreamReader) -> int:
    """Of the next answer, when all of it is here."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().splitlines()
    length = next(line for line in lines if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(first.split()[1])


async def overloaded(url: str, course: Course) -> Outcome:
    """Run a course against a server.

    Raises:
        BenchFailed: an answer was neither good nor a refusal, or did not come, or something is kept when all have theirs.
    """
    clock, crowd = MonotonicClock(), Crowd(url, course)
    some_end, all_end = asyncio.Event(), asyncio.Event()
    staying = [asyncio.ensure_future(crowd.run(all_end)) for _ in range(course.clients)]
    await clock.sleep(course.warm_up_s)
    began = clock.now()
    await clock.sleep(course.before_s)
    flooded = clock.now()
    more = [asyncio.ensure_future(crowd.run(some_end)) for _ in range(course.clients * (course.times - 1))]
    await clock.sleep(course.overload_s)
    some_end.set()
    ebbed = clock.now()
    await clock.sleep(course.after_s)
    all_end.set()
    await asyncio.gather(*staying, *more)
    _check(crowd.answers)
    await _check_idle(url)
    during = _between(crowd.answers, flooded, ebbed)
    refusals = sorted(answer.seconds for answer in during if answer.status in REFUSALS)
    return Outcome(
        before=_rate(crowd.answers, began, flooded),
        during=_rate(crowd.answers, flooded, ebbed),
        seconds_after=tuple(_rate(crowd.answers, ebbed + s, ebbed + s + 1) for s in range(int(course.after_s))),
        offered=len(during) / (ebbed - flooded),
        refused=Counter(answer.status for answer in during if answer.status in REFUSALS),
        refusal_p99_s=refusals[int(0.99 * len(refusals))] if refusals else 0.0,
    )


def _between(answers: Sequence[Answered], begin: float, end: float) -> list[Answered]:
    return [answer for answer in answers if begin <= answer.at < end]


def _rate(answers: Sequence[Answered], begin: float, end: float) -> float:
    return sum(answer.status == httpx.codes.OK for answer in _between(answers, begin, end)) / (end - begin)


def _check(answers: Sequence[Answered]) -> None:
    strange = Counter(answer.status for answer in answers if answer.status not in (httpx.codes.OK, *REFUSALS))
    if strange:
        raise BenchFailed(f"answers that are neither good nor refusals: {dict(strange)}")


async def _check_idle(url: str) -> None:
    await MonotonicClock().sleep(IDLE_S)
    async with client.client() as http:
        account = (await http.get(f"{url}/debug/accounting")).json()
    if not account["idle"]:
        raise BenchFailed(f"not idle {IDLE_S:g} s after the last answer: {account}")


def recovery_rows(folder: Path, course: Course) -> Iterator[Row]:
    """Refused by the balancer, which has as many open as it may; then by workers, whose lines are full."""
    model = make_checkpoint(folder / "tiny-overloaded", "2.0", dtype="float32")
    twice = 2 * course.clients
    for who, inflight, queued in (("the balancer", twice, 512), ("workers", 4096, course.clients)):
        config = folder / f"overloaded-{inflight}.yaml"
        config.write_text(CLUSTER % (model, PORT, inflight, queued, PREFILL_PORT, queued, DECODE_PORT), encoding="utf-8")
        with cluster(config, root=folder) as served:
            outcome = asyncio.run(overloaded(served.url, course))
        rates = " ".join(f"{rate:.0f}" for rate in outcome.seconds_after)
        sys.stderr.write(f"{who} refusing: {outcome.before:.1f} requests/s before, in each second after {rates}\n")
        yield from rows_of(outcome, who)


def rows_of(outcome: Outcome, who: str) -> Iterator[Row]:
    """``who`` refused."""
    yield Row(
        what=f"requests/s, from {WITHIN_S:g} s after ten times the clients on, {who} refusing",
        ours=f"{outcome.after:.1f}",
        other=f"before them {outcome.before:.1f}",
        ratio=outcome.after / outcome.before,
        goal="≥ 0.9",
    )
    first = outcome.seconds_after[0] / outcome.before
    refused = ", ".join(f"{count} with {status}" for status, count in sorted(outcome.refused.items()))
    yield Row(
        what=f"refusals of {who}, 99th of 100 ({refused}; {outcome.offered / outcome.before:.0f} times as many asked)",
        ours=f"{outcome.refusal_p99_s * 1000:.0f} ms",
        other=f"meanwhile served {outcome.during:.1f}/s, in the first second after it {first:.0%} of before",
        goal="< 1 s",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print this part alone."""
    argparse.ArgumentParser(prog="python -m longcat_pd.bench.recovery", description=__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longcat-recovery-") as scratch:
        rows = list(recovery_rows(Path(scratch), Course()))
    sys.stdout.write(report.table(report.machine(), rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
