"""What arrives is not what was sent: never text from an incomplete cache. Failures of kind 26, between real processes.

The first request of each cluster meets the fault in one rank of the prefill pool; the next one does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + CHUNK + 20))


async def first_answer(topology: Topology) -> tuple[int, str]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    answer = await topology.client.post("/v1/completions", json=body)
    if answer.status_code == 200:
        return 200, str(answer.json()["choices"][0]["token_ids"])
    return answer.status_code, str(answer.json()["error"]["code"])


@pytest.mark.parametrize(
    "fault, digest, retry, is_found",
    [
        ("altered", "all", 0, True),
        ("altered", "all", 1, True),
        ("lost", "off", 0, True),
        ("repeated", "off", 0, True),
        ("late", "off", 0, False),
    ],
)
async def test_a_message_between_the_pools(
    tiny: MakeCheckpoint, tmp_path: Path, fault: str, digest: str, retry: int, is_found: bool
) -> None:
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        decode={"kvp_size": 2, "attn_tp_size": 2},
        transfer={"digest": digest},
        load_balancer_settings={"retry": retry},
    )
    entries = {"prefill": f"tests.fault.faulty_lanes:{fault}"}
    async with pools(resolve.load(path, ["model.dtype=float32"]), entries=entries) as topology:
        status, said = await first_answer(topology)
        right = (await topology.complete(PROMPT))["token_ids"]
        if is_found and not retry:
            assert (status, said) == (502, "transfer_failed")
        else:
            assert (status, said) == (200, str(right))
        failed = 'leg_failures_total{cause="self",instance="load_balancer",leg="decode"'
        metrics = (await topology.client.get("/metrics")).text
        assert (failed in metrics) == is_found, "the side that found it says so"
        await topology.idle_within()
