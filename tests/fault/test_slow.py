"""Too much for the decode pool, and steps that take long: who waits is served or refused in time, and health stays honest.

Failures of the kinds 23 and 35, with ranks that are slow over prompts of some lengths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from longcat_pd.config import resolve
from tests.fault.slow_steps import SLOW_S
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, Topology, cluster_file, pools

BODY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
SHORT = list(range(100, 110))
QUEUE_S = 1.0
SLACK_S = 4.0  # of a machine that does many things at once
SHORT_STEP_S, STEP_S, LONG_STEP_S = sorted(SLOW_S.values())
LONG = 200  # tokens, each of a tenth of a slow step: six times as long as others wait for room
PROBES = 20
OVERDUE_S = 2.0  # of the eight of a step: who is to be refused meanwhile has time to come


def prompt(step_s: float) -> list[int]:
    """One whose steps take so long."""
    (length,) = (length for length, seconds in SLOW_S.items() if seconds == step_s)
    return list(range(100, 100 + length))


@asynccontextmanager
async def slow_pools(checkpoint: Path, folder: Path, **sections: Any) -> AsyncIterator[Topology]:
    entries = {role: f"tests.fault.slow_steps:{role}" for role in ("prefill", "decode")}
    config = resolve.load(cluster_file(folder, checkpoint, **sections), ["model.dtype=float32"])
    async with pools(config, entries=entries) as topology:
        yield topology


async def ask(topology: Topology, ids: Sequence[int], max_tokens: int, **more: Any) -> httpx.Response:
    return await topology.client.post(
        "/v1/completions", json={**BODY, "prompt": list(ids), "max_tokens": max_tokens, **more}
    )


def ids_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def count(topology: Topology, instance: str, name: str, mark: str = "") -> float:
    """A metric of an instance, summed over labels."""
    lines = topology.parts[instance].metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith(f"longcat_pd_{name}{{") and mark in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def until(said: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30.0
    while not said():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


# ---------------------------------------------------------------------- 23


async def test_a_full_decode_pool_refuses_in_time_and_cuts_nobody(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    length = {"max_model_len": 1024}
    engine = {**length, "max_num_seqs": 2, "queue_timeout_s": QUEUE_S}
    settings = {"prefill_engine": length, "decode_engine": engine, "load_balancer_settings": {"retry": 0}}
    async with slow_pools(tiny("2.0"), tmp_path, **settings) as topology:
        slow = prompt(SHORT_STEP_S)
        alone, short = ids_of(await ask(topology, slow, 2)), ids_of(await ask(topology, SHORT, 4))
        running = [asyncio.ensure_future(ask(topology, slow, LONG)) for _ in range(2)]
        await until(lambda: count(topology, "d0", "slots", 'state="used"') == 2 and not count(topology, "p0", "sequences"))
        chunks = count(topology, "p0", "step_seconds_count", "prefill")
        began = time.monotonic()
        refused = await asyncio.gather(*(ask(topology, SHORT, 4, stream=bool(i % 2)) for i in range(6)))
        took = time.monotonic() - began
        assert QUEUE_S * 0.9 < took < QUEUE_S + SLACK_S
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert answer.headers["x-should-retry"] == "true"
        assert count(topology, "p0", "step_seconds_count", "prefill") == chunks, "no prefill work without a grant"
        assert not any(task.done() for task in running)
        for answer in await asyncio.gather(*running):
            said = answer.json()["choices"][0]
            assert (ids_of(answer)[:2], len(said["token_ids"]), said["finish_reason"]) == (alone, LONG, "length")
        await topology.idle_within()
        assert ids_of(await ask(topology, SHORT, 4)) == short


async def test_a_large_request_among_many_small_ones_is_not_starved(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """It needs nearly all blocks; small ones come all the time and would always fit."""
    num_blocks = 34
    async with slow_pools(tiny("2.0"), tmp_path, decode_engine={"num_blocks": num_blocks}) as topology:
        large = list(range(100, 100 + (num_blocks - 2) * BLOCK - 10))
        right, small = ids_of(await ask(topology, large, 4)), ids_of(await ask(topology, SHORT, 24))
        ended: list[str] = []

        async def noted(name: str, ids: list[int], max_tokens: int) -> list[int]:
            answer = ids_of(await ask(topology, ids, max_tokens))
            ended.append(name)
            return answer

        asked = [asyncio.ensure_future(noted("before", SHORT, 24)) for _ in range(4)]
        await asyncio.sleep(0.1)
        big = asyncio.ensure_future(noted("large", large, 4))
        while not big.done():
            asked.append(asyncio.ensure_future(noted("after", SHORT, 24)))
            await asyncio.sleep(0.05)
            assert len(asked) < 400, "starved"
        assert await big == right
        assert all(answer == small for answer in await asyncio.gather(*asked))
        assert ended.index("large") < len(ended) - 1, "some of those that came after it were still waiting"
        await topology.idle_within()


# ---------------------------------------------------------------------- 35


class Watch:
    """Asks /health and /ready of everybody all the time, and keeps what was said."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.times: list[float] = []
        self.reasons: dict[str, list[tuple[str, ...]]] = {name: [] for name in urls}
        self._urls = urls

    async def run(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                for name, url in self._urls.items():
                    began = time.monotonic()
                    health, ready = await client.get(f"{url}/health"), await client.get(f"{url}/ready")
                    self.times.append((time.monotonic() - began) / 2)
                    assert (health.status_code, health.json()) == (200, {"status": "ok"})
                    assert ready.status_code == (200 if ready.json()["ready"] else 503)
                    said = tuple(reason["code"] for reason in ready.json()["reasons"])
                    if self.reasons[name][-1:] != [said]:
                        self.reasons[name].append(said)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def watched(topology: Topology) -> AsyncIterator[Watch]:
    places = {name: f"http://127.0.0.1:{parts.spec.http_port}" for name, parts in topology.parts.items()}
    watch = Watch({**places, "balancer": topology.url})
    task = asyncio.ensure_future(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()
        times = sorted(watch.times)
        print(f"health: median {times[len(times) // 2] * 1000:.1f} ms, longest {times[-1] * 1000:.0f} ms of {len(times)}")
        assert times[0] < 0.1


async def probes(topology: Topology, by: str) -> None:
    """Twenty at once, all good."""
    answers = await asyncio.gather(*(topology.client.get("/health_generate") for _ in range(PROBES)))
    assert {(answer.status_code, answer.json()["by"]) for answer in answers} == {(200, by)}


async def test_slow_steps_and_probes_are_told_as_they_are(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with slow_pools(tiny("2.0"), tmp_path) as topology:
        async with watched(topology) as watch:
            offered = count(topology, "p0", "transfers_total")
            await probes(topology, "probe")
            await topology.idle_within()
            assert count(topology, "p0", "transfers_total") == offered + 1, "they share one"
            assert "longcat_pd_requests_total{" not in (await topology.client.get("/metrics")).text
            right = ids_of(await ask(topology, SHORT, 8))
            await probes(topology, "traffic")
            waiting = asyncio.ensure_future(ask(topology, prompt(STEP_S), 10))
            others = [asyncio.ensure_future(ask(topology, SHORT, 8)) for _ in range(8)]
            await asyncio.sleep(1.0)
            under_load = await asyncio.gather(*(topology.client.get("/health_generate") for _ in range(PROBES)))
            assert {answer.status_code for answer in under_load} == {200}, under_load[0].text
            for answer in await asyncio.gather(*others):
                assert ids_of(answer) == right
            assert len(ids_of(await waiting)) == 10
        assert watch.reasons == {"p0": [()], "d0": [()], "balancer": [()]}, "slow is busy, not ill"
        await topology.idle_within()


async def test_a_step_beyond_its_time_is_overdue_until_it_ends(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    engine = {"step_timeout_s": OVERDUE_S, "rank_lost_s": 60.0}
    short = {"max_num_batched_tokens": 512}
    async with slow_pools(tiny("2.0"), tmp_path, prefill_engine={**engine, **short}) as topology:
        right = ids_of(await ask(topology, SHORT, 4))
        async with watched(topology) as watch:
            slow = asyncio.ensure_future(ask(topology, prompt(LONG_STEP_S), 4))
            await until(lambda: ("step_overdue",) in watch.reasons["p0"])
            await until(lambda: ("no_prefill",) in watch.reasons["balancer"])
            began = time.monotonic()
            answer = await ask(topology, SHORT, 4)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
            assert time.monotonic() - began < SLACK_S
            assert len(ids_of(await slow)) == 4
            await until(lambda: watch.reasons["balancer"][-1] == ())
        assert set(watch.reasons["p0"]) == {(), ("step_overdue",)} and watch.reasons["p0"][-1] == ()
        assert watch.reasons["d0"] == [()]
        assert ids_of(await ask(topology, SHORT, 4)) == right
        await topology.idle_within()
