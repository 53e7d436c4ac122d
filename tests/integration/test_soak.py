"""A compiled step under traffic of every kind: nothing is compiled any more, nothing grows, nothing is kept."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_matrix import SLOTS, Cell, topology_of
from tests.parity.conftest import MakeCheckpoint
from tests.processes import children_of_forkservers
from tests.topology import Topology

NUM_REQUESTS, SAMPLE_EVERY, AT_ONCE = 500, 5, SLOTS + 2  # some wait for a slot
GROWTH_MIB = 8.0  # of a rank of some 500 MiB, from the second to the last fifth
PROBE = {"prompt": list(range(300, 370)), "max_tokens": 20, "temperature": 0.7, "seed": 5}


def body(draw: random.Random) -> dict[str, Any]:
    """A request of any length and kind."""
    fields: dict[str, Any] = {
        "prompt": [draw.randrange(32, 1000) for _ in range(draw.choice((1, 2, 7, 16, 33, 47, 48, 49, 65, 110)))],
        "max_tokens": draw.choice((1, 2, 3, 8, 13, 21, 40)),
        "temperature": draw.choice((0, 0, 0.7, 1.3)),
        "top_p": draw.choice((1.0, 0.9)),
        "top_k": draw.choice((0, 5, 50)),
        "seed": draw.randrange(1000),
        "ignore_eos": draw.random() < 0.5,
        "return_token_ids": True,  # there is no tokenizer
    }
    if draw.random() < 0.3:
        fields["stop_token_ids"] = [draw.randrange(32, 1000) for _ in range(60)]
    if draw.random() < 0.3:
        fields["logprobs"] = draw.randrange(6)
    return fields


@dataclass(frozen=True)
class Leaving:
    """After so many lines of the stream, and a while."""

    lines: int
    seconds: float


async def serve(topology: Topology, fields: dict[str, Any], leaving: Leaving | None) -> None:
    """To its end, or until the client leaves."""
    if leaving is None:
        answer = await topology.client.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        return
    async with topology.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        for _ in range(leaving.lines):
            await anext(lines, None)
        await asyncio.sleep(leaving.seconds)


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return next(sample.value for family in families if family.name == name for sample in family.samples)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
async def test_nothing_is_compiled_and_nothing_grows(tiny: MakeCheckpoint, tmp_path: Path, graphs: Path) -> None:
    before = {*children_of_forkservers(os.getpid())}
    draw = random.Random(41)
    cell = Cell(3, "inductor", "alone", "fp32")
    async with topology_of(cell, tiny("2.0+predictable"), tmp_path, graphs) as topology:
        (rank,) = {*children_of_forkservers(os.getpid())} - before
        alone = await topology.complete(**PROBE)
        compiled = {await gauge(topology.client, "longcat_pd_compilations")}
        assert compiled in ({0.0}, {1.0})
        sizes, free = list[float](), asyncio.Semaphore(AT_ONCE)

        async def one(number: int, fields: dict[str, Any], leaving: Leaving | None) -> None:
            async with free:
                await serve(topology, fields, leaving)
            if number % SAMPLE_EVERY == 0:
                sizes.append(resident_mib(rank))
                compiled.add(await gauge(topology.client, "longcat_pd_compilations"))

        some = []
        for number in range(NUM_REQUESTS):
            leaving = Leaving(draw.choice((0, 1, 2, 4)), draw.choice((0.0, 0.0, 0.01, 0.05)))
            some.append((number, body(draw), leaving if draw.random() < 0.2 else None))
        await asyncio.gather(*(one(*each) for each in some))
        await topology.idle_within()
        again = await topology.complete(**PROBE)
        cancelled = await gauge(topology.client, "longcat_pd_cancels")
        acceptance = topology.parts["standalone"].engine.acceptance.mean()
    assert (again["token_ids"], again["finish_reason"]) == (alone["token_ids"], alone["finish_reason"])
    assert len(compiled) == 1, "compiled while serving"
    fifth = len(sizes) // 5
    second, last = statistics.median(sizes[fifth : 2 * fifth]), statistics.median(sizes[-fifth:])
    print(f"rank: {second:.1f} MiB, then {last:.1f} MiB; mean accepted run {acceptance}; {cancelled:.0f} cancelled")
    assert cancelled > 30
    assert last - second < GROWTH_MIB
