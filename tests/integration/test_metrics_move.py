"""What a process declares, traffic moves: no metric is there for show, and the table of the contract is all there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from longcat_pd.config import resolve
from longcat_pd.config.schema import ClusterConfig, LoadBalancerConfig
from tests.metric_table import ALONE, BALANCER, DECODE, PREFILL, PREFIX, families_of, scraped
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, cluster_file, pools, standalone

# moved by workers that fail, which is shown with scripted ones (test_course.py), and by ranks that compile (test_soak.py)
BY_OTHERS: dict[str, set[str]] = {
    BALANCER: {"breaker_open", "retries", "failovers"},
    PREFILL: {"compilations"},
    DECODE: {"compilations"},
    ALONE: {"compilations"},
}
GAUGES = {"inflight_requests", "sequences", "transfers_open"}  # which are zero again behind a request
ADMIN = {"Authorization": "Bearer chief"}
COMPLETIONS = "/v1/completions"
DRAFTS = {"num_draft_tokens": 2}
BODY: dict[str, Any] = {"prompt": list(range(5, 105)), "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
LONG: dict[str, Any] = {**BODY, "max_tokens": 300, "stream": True}


@dataclass
class Process:
    """One that is looked at: what it showed last, and what of it was ever other than zero."""

    kind: str
    instance: str
    url: str
    text: str = ""
    moved: set[str] = field(default_factory=set)

    async def look(self, client: httpx.AsyncClient) -> None:
        self.text = (await client.get(f"{self.url}/metrics")).text
        scrape = scraped(self.text, kind=self.kind, instance=self.instance)
        assert scrape.families == families_of(self.kind), self.kind
        self.moved |= scrape.moved

    @property
    def never_moved(self) -> set[str]:
        return {name.removeprefix(PREFIX) for name in families_of(self.kind) - self.moved}

    def value(self, series: str) -> float:
        """Of the one sample of a metric without more labels."""
        (line,) = (line for line in self.text.splitlines() if line.startswith(f"{PREFIX}{series}{{"))
        return float(line.split()[-1])


class Watch:
    """Looks at several processes at once."""

    def __init__(self, client: httpx.AsyncClient, processes: Iterable[Process]) -> None:
        self._client = client
        self.processes = {process.instance: process for process in processes}

    async def look(self) -> None:
        for process in self.processes.values():
            await process.look(self._client)

    async def drain(self) -> None:
        """Say to each that it is to take no more, and look."""
        for process in self.processes.values():
            assert (await self._client.post(f"{process.url}/admin/drain", headers=ADMIN)).status_code == 202
        await self.look()


async def use(topology: Topology, watch: Watch) -> None:
    """Good ends, of a stream as well, a client's fault found late, a deadline, a client that leaves."""
    client = topology.client
    assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert (await client.post(COMPLETIONS, json={**BODY, "stream": True})).status_code == 200
    assert (await client.post(COMPLETIONS, json={**BODY, "prompt": [999999]})).status_code == 400
    late = await client.post(COMPLETIONS, json={**LONG, "stream": False}, headers={"X-Request-Timeout": "0.02"})
    assert late.status_code == 504
    async with client.stream("POST", COMPLETIONS, json=LONG) as answer:
        await anext(answer.aiter_lines())
        await watch.look()
    waiting = [asyncio.ensure_future(client.post(COMPLETIONS, json=BODY)) for _ in range(3)]
    while not all(task.done() for task in waiting):
        await watch.look()
    await topology.idle_within()
    await watch.look()


def watch_of(config: ClusterConfig, pair: Topology) -> Watch:
    assert config.prefill is not None and config.decode is not None
    processes = [Process(BALANCER, "load_balancer", pair.url)]
    for kind, pool in ((PREFILL, config.prefill), (DECODE, config.decode)):
        processes += [Process(kind, place.name, f"http://{place.host}:{place.http_port}") for place in pool.instances]
    return Watch(pair.client, processes)


def unmoved(watch: Watch) -> Mapping[str, set[str]]:
    return {process.kind: process.never_moved for process in watch.processes.values()}


async def test_every_metric_of_every_kind_of_process_is_moved(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("chief\n")
    path = cluster_file(tmp_path, tiny("2.0+predictable"), prefill_engine=DRAFTS, decode_engine=DRAFTS)
    keys = [f"load_balancer.admin_key_file={tmp_path / 'admin'}", f"cluster_key_file={tmp_path / 'admin'}"]
    config = resolve.load(path, ["model.dtype=float32", *keys])
    async with pools(config) as pair:
        watch = watch_of(config, pair)
        await use(pair, watch)
        balancer, decode = watch.processes["load_balancer"], watch.processes["d0"]
        for name in ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total"):
            assert balancer.value(name) == decode.value(name) > 0, name
        for first in range(200, 220):  # on a busy machine a short prompt is computed before the first layer of it is sent
            if "transfer_early_bytes" in watch.processes["p0"].never_moved:
                await pair.complete([first, *BODY["prompt"]], max_tokens=1)
                await watch.look()
        for first in range(300, 320):  # a deadline that ends between the first and the last step of a long prompt
            if "cancels" in watch.processes["p0"].never_moved:
                late = {**BODY, "prompt": list(range(first, first + 400)), "max_tokens": 100}
                await pair.client.post(COMPLETIONS, json=late, headers={"X-Request-Timeout": "0.05"})
                await watch.look()
        for first in range(400, 420):  # P is busy for a moment only, in which somebody has to look
            if watch.processes["p0"].never_moved & GAUGES:
                asked = asyncio.ensure_future(
                    pair.client.post(COMPLETIONS, json={**BODY, "prompt": [first, *range(5, 405)]})
                )
                while not asked.done():
                    await watch.look()
        await watch.drain()
        assert unmoved(watch) == {kind: BY_OTHERS[kind] for kind in (BALANCER, PREFILL, DECODE)}
    front = LoadBalancerConfig(admin_key_file=str(tmp_path / "admin"))
    overrides = ("model.dtype=float32", "engine.num_draft_tokens=2")
    async with standalone(tiny("2.0+predictable"), *overrides, front=front) as alone:
        watch = Watch(alone.client, [Process(ALONE, "standalone", alone.url)])
        await use(alone, watch)
        await watch.drain()
        assert unmoved(watch) == {ALONE: BY_OTHERS[ALONE]}


async def test_tokens_are_told_to_the_balancer_without_failover_and_of_several_choices(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    path = cluster_file(tmp_path, tiny("2.0+predictable"))
    config = resolve.load(path, ["model.dtype=float32", "load_balancer.failover=false"])
    async with pools(config) as pair:
        for fields in ({}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}):
            assert (await pair.client.post(COMPLETIONS, json={**BODY, **fields})).status_code == 200
        await pair.idle_within()
        watch = watch_of(config, pair)
        await watch.look()
        balancer = watch.processes["load_balancer"]
        assert balancer.value("output_tokens_total") == (1 + 2 + 1 + 2) * BODY["max_tokens"]
        assert balancer.value("prompt_tokens_total") == 4 * len(BODY["prompt"])
