"""A prefill pool whose n-gram tables are in the memory of the host says what one engine says. Here host and device are one:
that rows are found elsewhere is shown where there are two (unit tests)."""

from __future__ import annotations

from pathlib import Path

import httpx

from longcat_pd.config import resolve
from tests.integration.test_groups import SLOTS, ask, expected_of
from tests.parity.conftest import MakeCheckpoint
from tests.topology import cluster_file, pools

PREFILL = {"pp_size": 2, "cp_size": 2, "layers_per_stage": [1, 2], "ngram_embed_tp_size": 2, "ngram_tables": "host"}
DECODE = {"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2, "ngram_embed_tp_size": 4}


async def test_tokens(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    model = tiny("2.0")
    expected = await expected_of(model)
    path = cluster_file(tmp_path, model, prefill=PREFILL, decode=DECODE, decode_engine={"max_num_seqs": SLOTS})
    config = resolve.load(path, ["model.dtype=float32"])
    async with pools(config) as topology:
        assert await ask(topology, 2 * SLOTS) == expected
        assert config.prefill is not None
        place = config.prefill.instances[0]
        async with httpx.AsyncClient(trust_env=False) as client:
            info = (await client.get(f"http://{place.host}:{place.http_port}/server_info")).json()
    assert info["parallel"]["ngram_tables"] == "host"
    memory = [(rank["bytes"]["n-gram tables"] > 0, rank["bytes"]["n-gram tables on host"]) for rank in info["memory"]]
    assert memory == [(True, 0), (True, 0), (False, 0), (False, 0)]
