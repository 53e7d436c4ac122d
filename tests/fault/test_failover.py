"""An instance dies under many answers at once and another one goes on with them: nobody can tell from what was said.

Failures of the kinds 5 and 12. Real processes; the answers of an undisturbed run are the measure, to the letter.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, all_linked, gauge, ranks_of, running
from tests.topology import Topology, cluster_file
from tests.watched import Watched

NUM_DRAFTS = 2
SPREAD_S = 2.0  # the calls begin within this time
ENDS_WITHIN_S = 240.0
NARROW = {str(token): 6 for token in range(100, 106)}  # who says little else repeats itself
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SPECIAL: tuple[dict[str, Any], ...] = (
    {},
    {"logit_bias": NARROW, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"stop": True},  # a piece of what it says otherwise
    {"logit_bias": NARROW, "repetition_penalty": 1.3, "min_p": 0.02},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"logprobs": 1},
    {"logit_bias": {"2": 6}, "min_tokens": 20, "ignore_eos": False},
)


def bodies(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Greedy and with seeds; of both routes; streamed and not; short and long prompts; every kind of special wish."""
    made = []
    for i in range(count):
        special = SPECIAL[i % len(SPECIAL)]
        body: dict[str, Any] = {
            "max_tokens": draw.randrange(100, 220),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": i % 5 != 4,
            **({"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": 1000 + i}),
            **special,
        }
        if i % 3 == 2:
            words = " ".join(draw.choice(("red", "green", "blue", "one", "two")) for _ in range(draw.randrange(1, 40)))
            body["messages"] = [{"role": "user", "content": words}]
            if "logprobs" in body:
                body["logprobs"] = True
        else:
            body["prompt"] = [draw.randrange(32, 1000) for _ in range(draw.choice((1, 5, 15, 16, 17, 40, 70, 130)))]
        if body["stream"] and i % 2:
            body["stream_options"] = {"include_usage": True}
        made.append(body)
    return made


def what_was_said(call: Watched) -> dict[str, Any]:
    """All that a client can compare."""
    counted = {name: count for name, count in (call.usage or {}).items() if name.endswith("_tokens")}
    return {
        "outcome": call.outcome,
        "text": call.text,
        "reasoning": call.reasoning,
        "finish": call.finish,
        "usage": counted,
        "roles": call.num_roles,
        "heads": len(call.heads),
        "logprobs": len(call.logprobs),
    }


IsTime = Callable[[list[Watched]], Awaitable[bool]]


class Crowd:
    """Many calls, an undisturbed run of them, and runs in which something happens."""

    def __init__(self, topology: Topology, wanted: list[dict[str, Any]]) -> None:
        self._topology = topology
        self._bodies = wanted
        self._right: list[Watched] = []
        self._runs = 0

    async def undisturbed(self) -> None:
        """The measure. Who wants a stop string is given a piece of its own answer."""
        plain = await self._all([{**body, "stop": None} if "stop" in body else body for body in self._bodies], 0.0, [])
        for call, body in zip(plain, self._bodies, strict=True):
            assert isinstance(call.outcome, tuple) and len(call.outcome) > 5, (call.outcome, body)
            if "stop" in body:
                said = call.text or call.reasoning
                body["stop"] = said[len(said) * 2 // 3 :][:3]
        self._right = await self._all(self._bodies, 0.0, [])

    async def disturbed(self, is_time: IsTime, kill: Callable[[], None]) -> int:
        """Everybody again, and ``kill`` in the middle of it. How many were being answered then."""
        calls: list[Watched] = []
        running = asyncio.ensure_future(self._all(self._bodies, SPREAD_S, calls))
        while not await is_time(calls):
            assert not running.done(), "the moment has not come"
            await asyncio.sleep(0.01)
        kill()
        num_answered = sum(bool(call.token_ids) and call.outcome is None for call in calls)
        await running
        wrong = [
            (body, what_was_said(right), what_was_said(call))
            for body, right, call in zip(self._bodies, self._right, calls, strict=True)
            if what_was_said(right) != what_was_said(call) or right.logprobs != pytest.approx(call.logprobs, abs=1e-3)
        ]
        assert not wrong, f"{len(wrong)} of {len(calls)}, as {wrong[0]}"
        return num_answered

    def share(self, calls: list[Watched], *, of_tokens: bool) -> float:
        """Of all tokens, those that have been streamed; or of all streams, those that have begun to be answered."""
        right, calls = ([one for one in them if one.is_streamed] for them in (self._right, calls))
        if of_tokens:
            return sum(len(one.token_ids) for one in calls) / sum(len(one.token_ids) for one in right)
        return sum(bool(one.token_ids) for one in calls) / len(right)

    async def _all(self, wanted: list[dict[str, Any]], spread_s: float, calls: list[Watched]) -> list[Watched]:
        self._runs += 1
        for i, body in enumerate(wanted):
            calls.append(Watched.start(self._topology.client, f"run-{self._runs}-{i}", body))
            await asyncio.sleep(spread_s / len(wanted))
        await asyncio.wait_for(asyncio.gather(*(call.task for call in calls if call.task)), ENDS_WITHIN_S)
        return calls


async def is_time(
    processes: Processes, topology: Topology, calls: list[Watched], *, crowd: Crowd, victim: str, share: float
) -> bool:
    """So much has been said, and the victim is at work."""
    is_decode = victim == "d1"
    if crowd.share(calls, of_tokens=is_decode) < share:
        return False
    metric, label = ("sequences", 'state="running"') if is_decode else ("transfers_open", "")
    return await gauge(processes, topology, victim, metric, label) > 0


def struck(processes: Processes, victim: str, *, is_rank: bool) -> Callable[[], None]:
    """What kills it."""

    def kill() -> None:
        if is_rank:
            os.kill(ranks_of(processes.running[victim])[-1], signal.SIGKILL)
        else:
            processes.signal(victim)

    return kill


async def counters(topology: Topology) -> dict[str, int]:
    """Of the balancer: failovers by outcome, and retries."""
    metrics = (await topology.client.get("/metrics")).text
    found = re.findall(r'^longcat_pd_failovers_total{.*outcome="(\w+)".*} (\S+)$', metrics, re.MULTILINE)
    found += re.findall(r"^longcat_pd_(retries)_total{.*} (\S+)$", metrics, re.MULTILINE)
    return {"completed": 0, "failed": 0, "no_pair": 0, **{name: int(float(count)) for name, count in found}}


async def back(processes: Processes, topology: Topology, victim: str, status: int) -> None:
    """The victim has ended as it should, and is there again."""
    assert processes.wait(victim) == status
    assert processes.left_of(victim, grace_s=30.0) == []
    processes.start(victim)
    await all_linked(processes, topology)
    await topology.idle_within(12.0)


def make_file(tiny: MakeCheckpoint, folder: Path, victim: str) -> Path:
    """Two instances of the victim's role, one of the other.

    Of layouts that compute the same bits: what an answer holds was computed by the decode pool and is computed again by the
    prefill pool, and a draw may fall between two ids that rounding alone decides about.
    """
    checkpoint = tiny("2.0+predictable", with_tokenizer=True)
    engine = {"num_draft_tokens": NUM_DRAFTS, "rank_lost_s": 2, "queue_timeout_s": ENDS_WITHIN_S, "num_blocks": 257}
    return cluster_file(
        folder,
        checkpoint,
        num_prefill=1 + (victim == "p1"),
        num_decode=1 + (victim == "d1"),
        prefill={"pp_size": 2},
        decode={"dp_size": 2, "ep_size": 2, "moe_dispatch": "all_to_all"},
        prefill_engine=engine,
        decode_engine=engine,
        model={"path": str(checkpoint), "dtype": "float32"},
    )


async def failed_over(tiny: MakeCheckpoint, folder: Path, victim: str, *, count: int, kills: int) -> None:
    """So many answers at once, and again for each of so many kills."""
    draw = random.Random(20)
    async with running(make_file(tiny, folder, victim)) as (processes, topology):
        await all_linked(processes, topology)
        crowd = Crowd(topology, bodies(count, draw))
        await crowd.undisturbed()
        for is_rank in [bool(number % 2) for number in range(kills)]:
            began, share = time.monotonic(), draw.uniform(0.1, 0.6)
            before = await counters(topology)
            moment = partial(is_time, processes, topology, crowd=crowd, victim=victim, share=share)
            num_answered = await crowd.disturbed(moment, struck(processes, victim, is_rank=is_rank))
            counted = {name: count - before[name] for name, count in (await counters(topology)).items()}
            what = f"{'a rank of ' * is_rank}{victim} killed at {share:.0%} of {count} calls"
            print(
                f"\n{what}, {num_answered} being answered: {counted}, all equal, {time.monotonic() - began:.1f} s", end=" "
            )
            assert not counted["failed"] and not counted["no_pair"]
            assert counted["completed" if victim == "d1" else "retries"] > 0
            await back(processes, topology, victim, 1 if is_rank else 128 + signal.SIGKILL)


async def test_some_answers_survive_their_decode_instance(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    await failed_over(tiny, tmp_path, "d1", count=12, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_fifty_answers_survive_an_instance(tiny: MakeCheckpoint, tmp_path: Path, victim: str) -> None:
    await failed_over(tiny, tmp_path, victim, count=50, kills=4)
