"""Two prefill and two decode instances: every pair hands over, and nobody's answer depends on which pair made it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import cluster_file, pools

PROMPT = list(range(20, 120))


async def test_every_pair_gives_the_same_answer(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    path = cluster_file(tmp_path, tiny("2.0"), decode={"kvp_size": 2, "attn_tp_size": 2})
    first = resolve.load(path).load_balancer.port + 100
    settings = ["model.dtype=float32"]
    for place, (role, names) in enumerate({"prefill": ("p0", "p1"), "decode": ("d0", "d1")}.items()):
        ports = [first + 100 * place + 20 * number for number in range(2)]
        instances = [{"name": name, "http_port": port} for name, port in zip(names, ports, strict=True)]
        settings.append(f"{role}.instances={json.dumps(instances)}")
    async with pools(resolve.load(path, settings)) as topology:
        (expected,) = {tuple((await topology.complete(PROMPT))["token_ids"])}
        for _ in range(2):
            answers = await asyncio.gather(*(topology.complete(PROMPT) for _ in range(8)))
            assert {tuple(answer["token_ids"]) for answer in answers} == {expected}
        account = await topology.idle_within()
        assert sorted(account["instances"]) == ["d0", "d1", "p0", "p1"]
        for name, parts in topology.parts.items():
            committed = parts.metrics.transfers.transfers_total("committed")
            assert sum(sample.value for family in committed.collect() for sample in family.samples[:1]) >= 4, name
        ready = (await topology.client.get("/ready")).json()
        assert ready["peers"] == dict.fromkeys(("p0", "p1", "d0", "d1"), "up")
