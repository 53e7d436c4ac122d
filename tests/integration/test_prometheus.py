"""A real Prometheus scrapes a small topology with the shipped example: every query of the dashboard returns data."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from longcat_pd.config import resolve
from longcat_pd.config.schema import ClusterConfig
from tests.collector import collecting
from tests.integration.test_metrics_move import BODY, COMPLETIONS, DRAFTS, LONG
from tests.parity.conftest import MakeCheckpoint
from tests.ports import free_base
from tests.promql import RULES, SCRAPE, alerts, dashboard_queries, filled_in
from tests.topology import Topology, cluster_file, pools

PROMETHEUS = shutil.which("prometheus")
WAIT_S = 90.0  # for what Prometheus does each second
INTERVAL = "1m"  # of rates; longer than the test scrapes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")]


class Store:
    """A running Prometheus."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, path: str, **query: str) -> Any:
        answer = await self._client.get(f"/api/v1/{path}", params=query)
        answer.raise_for_status()
        return answer.json()["data"]

    async def values(self, expression: str) -> list[float]:
        """Of all series that an expression gives now."""
        return [float(series["value"][1]) for series in (await self.ask("query", query=expression))["result"]]

    async def until(self, expression: str) -> None:
        """Wait for an expression that gives something."""
        end = asyncio.get_running_loop().time() + WAIT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):  # it starts
                if await self.values(expression):
                    return
            assert asyncio.get_running_loop().time() < end, expression
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Store]:
    """With the shipped example, but for the targets and how often it looks."""
    config = yaml.safe_load(SCRAPE.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_base(10)
    arguments = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = await asyncio.create_subprocess_exec(*arguments, cwd=folder, stdout=DEVNULL, stderr=DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False) as client:
            yield Store(client)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def use(topology: Topology) -> None:
    """Requests of all kinds, one after another and together."""
    client = topology.client
    for first in range(200, 204):
        body = {**BODY, "prompt": [first, *BODY["prompt"]]}
        asked = [client.post(COMPLETIONS, json={**body, "stream": is_stream}) for is_stream in (False, True)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        async with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            await anext(answer.aiter_lines())
    await topology.idle_within(30.0)


async def test_every_query_of_the_dashboard_returns_data(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("chief\n")
    path = cluster_file(tmp_path, tiny("2.0+predictable"), prefill_engine=DRAFTS, decode_engine=DRAFTS)
    with collecting() as collector:
        settings = [f"load_balancer.admin_key_file={tmp_path / 'admin'}", f"tracing.endpoint={collector.url}"]
        config = resolve.load(path, ["model.dtype=float32", *settings])
        await check_all(config, tmp_path)


async def check_all(config: ClusterConfig, folder: Path) -> None:
    assert config.prefill is not None and config.decode is not None
    places = [place for pool in (config.prefill, config.decode) for place in pool.instances]
    async with pools(config) as pair:
        await pair.complete(BODY["prompt"])  # so that what comes with its first use has a count before the rates
        targets = [pair.url.removeprefix("http://"), *(f"{place.host}:{place.http_port}" for place in places)]
        async with prometheus(folder, targets) as store:
            await store.until('count(up{job="longcat_pd"} == 1) == 3')
            await use(pair)
            await store.until(f"sum(increase(longcat_pd_requests_total{{role='load_balancer'}}[{INTERVAL}])) > 1")
            await store.until("sum(increase(longcat_pd_trace_spans_total{outcome='exported'}[1m])) > 1")
            for query in dashboard_queries():
                values = await store.values(filled_in(query, INTERVAL))
                assert any(math.isfinite(value) for value in values), (query, values)
            await check_rules(store)
            await check_an_alert(pair, store)


async def check_rules(store: Store) -> None:
    """All are evaluated, and none fires where nothing is wrong."""
    await asyncio.sleep(2.0)
    rules = [rule for group in (await store.ask("rules"))["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


async def check_an_alert(pair: Topology, store: Store) -> None:
    """An instance that an operator takes out: the alerts on it and on the empty pool begin to wait."""
    admin = {"Authorization": "Bearer chief"}
    assert (await pair.client.post("/admin/drain", json={"instance": "d0"}, headers=admin)).status_code == 202
    await store.until('ALERTS{alertname="LongcatInstanceOut", target="d0"}')
    await store.until('ALERTS{alertname="LongcatPoolEmpty", instance="load_balancer"}')
