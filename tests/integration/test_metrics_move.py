"""What a process declares, traffic moves: no metric is there for show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, cluster_file, pools, standalone

# moved by workers that fail, which is shown with scripted ones, and by those that compile (test_soak.py)
BY_OTHERS = {"longcat_pd_breaker_open", "longcat_pd_retries", "longcat_pd_failovers", "longcat_pd_compilations"}
# draining is shown with the pools
WITHOUT_PEERS = {"longcat_pd_transfer_seconds", "longcat_pd_draining", "longcat_pd_compilations"}
COMPLETIONS = "/v1/completions"
DRAFTS = {"num_draft_tokens": 2}
BODY: dict[str, Any] = {"prompt": list(range(5, 105)), "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
LONG: dict[str, Any] = {**BODY, "max_tokens": 300, "stream": True}


class Scraper:
    """Reads ``/metrics`` of several processes; remembers what was there, and what was ever other than zero."""

    def __init__(self, client: httpx.AsyncClient, urls: Iterable[str]) -> None:
        self._client = client
        self._urls = tuple(urls)
        self.declared: set[str] = set()
        self.moved: set[str] = set()

    async def look(self) -> None:
        for url in self._urls:
            for family in text_string_to_metric_families((await self._client.get(f"{url}/metrics")).text):
                if family.name.endswith("_created"):
                    continue  # when its namesake began to count
                self.declared.add(family.name)
                if any(sample.value for sample in family.samples):
                    self.moved.add(family.name)


async def use(topology: Topology, scraper: Scraper) -> None:
    """Good ends, a client's fault found late, a deadline, a client that leaves."""
    client = topology.client
    assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert (await client.post(COMPLETIONS, json={**BODY, "prompt": [999999]})).status_code == 400
    late = await client.post(COMPLETIONS, json={**LONG, "stream": False}, headers={"X-Request-Timeout": "0.02"})
    assert late.status_code == 504
    async with client.stream("POST", COMPLETIONS, json=LONG) as answer:
        await anext(answer.aiter_lines())
        await scraper.look()
    waiting = [asyncio.ensure_future(client.post(COMPLETIONS, json=BODY)) for _ in range(3)]
    while not all(task.done() for task in waiting):
        await scraper.look()
    await topology.idle_within()


async def test_every_metric_that_is_declared_is_moved(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("chief\n")
    path = cluster_file(tmp_path, tiny("2.0+predictable"), prefill_engine=DRAFTS, decode_engine=DRAFTS)
    config = resolve.load(path, ["model.dtype=float32", f"load_balancer.admin_key_file={tmp_path / 'admin'}"])
    async with pools(config) as pair:
        assert config.prefill is not None and config.decode is not None
        workers = [place for pool in (config.prefill, config.decode) for place in pool.instances]
        scraper = Scraper(pair.client, [pair.url, *(f"http://{place.host}:{place.http_port}" for place in workers)])
        await use(pair, scraper)
        for first in range(200, 220):  # on a busy machine a short prompt is computed before the first layer of it is sent
            if "longcat_pd_transfer_early_bytes" not in scraper.moved:
                await pair.complete([first, *BODY["prompt"]], max_tokens=1)
                await scraper.look()
        admin = {"Authorization": "Bearer chief"}
        assert (await pair.client.post("/admin/drain", headers=admin)).status_code == 202
        await scraper.look()
        assert scraper.declared - scraper.moved == BY_OTHERS
    async with standalone(tiny("2.0+predictable"), "model.dtype=float32", "engine.num_draft_tokens=2") as alone:
        scraper = Scraper(alone.client, [alone.url])
        await use(alone, scraper)
        assert scraper.declared - scraper.moved == WITHOUT_PEERS
