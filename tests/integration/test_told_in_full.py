"""Answers that are complete before the prefill leg has ended: nobody has left, and no leg stays open."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from longcat_pd.config import resolve
from longcat_pd.tiny.make import write_tiny
from tests.topology import cluster_file, pools

NUM = 12


async def test_who_was_told_everything_has_not_cancelled(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m", "2.0", dtype="float32")
    path = cluster_file(tmp_path, tmp_path / "m")
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        gc.disable()  # a leg that only the collector would close stays to be seen
        try:
            for is_stream in (False, True):
                body = {"prompt": list(range(30, 70)), "max_tokens": 1, "temperature": 0, "stream": is_stream}
                asked = [topology.client.post("/v1/completions", json=body) for _ in range(NUM)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
                await topology.idle_within()
        finally:
            gc.enable()
        text = (await topology.client.get("/metrics")).text
        outcomes = [line for line in text.splitlines() if line.startswith("longcat_pd_requests_total{")]
        assert len(outcomes) == 1 and 'outcome="length"' in outcomes[0] and outcomes[0].endswith(f" {2 * NUM}.0")
        cancels = [line for line in text.splitlines() if line.startswith("longcat_pd_cancels_total{")]
        assert cancels and all(line.endswith(" 0.0") for line in cancels)
