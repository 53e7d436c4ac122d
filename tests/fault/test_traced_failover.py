"""The trace of an answer that lost its decode instance half-way: one story of both attempts, told by real processes.

A killed rank leaves its driver time to tell its part; a killed driver has told nothing, and the rest of the trace is whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector, Seen, collecting
from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, all_linked, ranks_of, running
from tests.topology import CHUNK, Topology, cluster_file

PROMPT = list(range(100, 100 + CHUNK + 9))
NUM_TOKENS = 500  # long enough to be met in the middle
BEGUN = 20  # events of the stream
CLIENT = "b7ad6b7169203331"
ENDS_WITHIN_S, SPANS_WITHIN_S = 240.0, 60.0
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
BODY |= {"stream": True, "return_token_ids": True}
STAGES = {
    "prefill": {"queue", "prefill chunks", "transfer of layers"},
    "decode": {"queue", "transfer of layers", "decode steps"},
}


@dataclass
class Answer:
    """A streamed answer as its client sees it."""

    num_events: int = 0
    last: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, topology: Topology, trace: str) -> None:
        headers = {"traceparent": f"00-{trace}-{CLIENT}-01"}
        async with topology.client.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                self.num_events += line.startswith("data: ")
                self.last = line or self.last
                if self.num_events >= BEGUN:
                    self.has_begun.set()


@dataclass(frozen=True)
class Story:
    """The spans of one trace."""

    spans: list[Seen]

    def below(self, parent: Seen) -> dict[str, Seen]:
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found), found
        return by_name

    @property
    def roots(self) -> list[Seen]:
        return [span for span in self.spans if span.parent_id == CLIENT]

    @property
    def attempts(self) -> list[Seen]:
        return sorted(
            (s for s in self.spans if s.name == "attempt"), key=lambda span: int(span.attributes["longcat.attempt"])
        )


async def whole_story(collector: Collector, trace: str, num_instances: int) -> Story:
    """Once the balancer has told its part, and so many bodies of instances have ended."""
    until = asyncio.get_running_loop().time() + SPANS_WITHIN_S
    while True:
        story = Story(collector.of(trace))
        told = [span for span in story.spans if span.name in STAGES]
        if story.roots and len(told) >= num_instances:
            return story
        assert asyncio.get_running_loop().time() < until, story.spans
        await asyncio.sleep(0.1)


async def who_decodes(topology: Topology) -> str:
    account = await topology.account()
    (name,) = [n for n, one in account["instances"].items() if n[0] == "d" and one["driver"]["requests_running"]]
    return str(name)


async def broken_off(processes: Processes, topology: Topology, trace: str, *, is_rank: bool) -> str:
    """An answer whose decode instance is killed, or a rank of it, and that comes to its end; the victim's name."""
    answer = Answer()
    reading = asyncio.ensure_future(answer.read(topology, trace))
    waiting = asyncio.ensure_future(answer.has_begun.wait())
    await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=ENDS_WITHIN_S)
    if reading.done():
        await reading  # it was refused
    victim = await who_decodes(topology)
    if is_rank:
        os.kill(ranks_of(processes.running[victim])[-1], signal.SIGKILL)
    else:
        processes.signal(victim)
    await asyncio.wait_for(reading, ENDS_WITHIN_S)
    assert answer.last == "data: [DONE]"
    assert processes.wait(victim) == (1 if is_rank else 128 + signal.SIGKILL)
    return victim


def check_balancers_part(story: Story, victim: str) -> None:
    """One root, and under it two attempts: at the victim, and behind it at the other instance."""
    (root,) = story.roots
    assert not root.is_error
    assert [name for name, _ in sorted(root.events, key=lambda e: e[1])] == ["queued", "paired", "first_token", "failover"]
    facts = {name.removeprefix("longcat."): value for name, value in root.attributes.items()}
    assert (facts["outcome"], facts["failover"], facts["attempts"]) == ("length", "resumed", 2)
    assert facts["output_tokens"] == NUM_TOKENS
    first, second = story.attempts
    assert {first.parent_id, second.parent_id} == {root.span_id}
    assert first.ended <= second.began
    assert first.is_error and first.attributes["longcat.failed_at"] == victim == first.attributes["longcat.decode"]
    assert not second.is_error and second.attributes["longcat.decode"] == ({"d0", "d1"} - {victim}).pop()


def check_instances_part(story: Story, victim: str, *, is_told_by_victim: bool) -> None:
    """Spans of P and of D are under the attempt that they were asked in, with their stages below them."""
    first, second = map(story.below, story.attempts)
    assert set(first) == ({"prefill", "decode"} if is_told_by_victim else {"prefill"}) and set(second) == {
        "prefill",
        "decode",
    }
    for attempt, parts in zip(story.attempts, (first, second), strict=True):
        for name, part in parts.items():
            assert part.instance == attempt.attributes[f"longcat.{name}"], part
            assert part.attributes["longcat.transfer_id"] == attempt.attributes["longcat.transfer_id"], part
            assert set(story.below(part)) == STAGES[name], part
    assert story.attempts[0].attributes["longcat.transfer_id"] != story.attempts[1].attributes["longcat.transfer_id"]
    wrong = {(span.instance, span.name) for span in story.spans if span.is_error}
    assert wrong == {("load_balancer", "attempt"), *([(victim, "decode")] if is_told_by_victim else [])}
    if is_told_by_victim:
        assert first["decode"].said == "RankLost"
        assert story.below(first["decode"])["decode steps"].attributes["longcat.unfinished"] is True
    prompts = {parts["prefill"].attributes["longcat.prompt_tokens"] for parts in (first, second)}
    assert prompts == {len(PROMPT)}, "what was said already is no prompt of the client"
    inner = sum(len(STAGES[name]) for parts in (first, second) for name in parts)
    assert len(story.spans) == 3 + len(first) + len(second) + inner, "nothing else is in the trace"


@pytest.mark.slow
async def test_a_failover_is_one_trace_with_both_attempts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    sizes = {"max_model_len": 1024, "num_blocks": 257, "rank_lost_s": 2}
    with collecting() as collector:
        config = cluster_file(
            tmp_path,
            tiny("2.0+predictable"),
            num_decode=2,
            prefill_engine=sizes,
            decode_engine=sizes,
            tracing={"endpoint": collector.url},
        )
        async with running(config) as (processes, topology):
            await all_linked(processes, topology)
            for number, is_rank in enumerate((True, False)):
                trace = f"0af7651916cd43dd8448eb211c8031{number:02d}"
                victim = await broken_off(processes, topology, trace, is_rank=is_rank)
                story = await whole_story(collector, trace, num_instances=4 if is_rank else 3)
                check_balancers_part(story, victim)
                check_instances_part(story, victim, is_told_by_victim=is_rank)
                assert processes.left_of(victim, grace_s=30.0) == []
                if is_rank:
                    processes.start(victim)
                    await all_linked(processes, topology)
