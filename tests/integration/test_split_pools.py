"""The whole topology with everything split says what one engine says: P(pp 2, cp 2, ep 2) feeds D(dp 2, kvp 2, ep 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config import resolve
from longcat_pd.quantize import quantize
from tests.integration.test_groups import SLOTS, ask, expected_of
from tests.parity.conftest import MakeCheckpoint
from tests.topology import cluster_file, pools

PREFILL = {
    "pp_size": 2,
    "cp_size": 2,
    "layers_per_stage": [1, 2],
    "ep_size": 2,
    "dense_tp_size": 2,
    "embed_tp_size": 2,
    "lmhead_tp_size": 2,
}
DECODE = {
    "dp_size": 2,
    "kvp_size": 2,
    "attn_tp_size": 2,
    "ep_size": 4,
    "dense_tp_size": 2,
    "embed_tp_size": 2,
    "lmhead_tp_size": 4,
    "ngram_embed_tp_size": 4,
}


@pytest.mark.parametrize(
    ("num_drafts", "is_int8", "dispatch"),
    [pytest.param(0, False, "gather", marks=pytest.mark.slow), (3, False, "all_to_all"), (3, True, "gather")],
)
async def test_tokens(tiny: MakeCheckpoint, tmp_path: Path, num_drafts: int, is_int8: bool, dispatch: str) -> None:
    model = tiny("2.0+predictable")
    if is_int8:
        quantize(model, tmp_path / "int8")
        model = tmp_path / "int8"
    expected = await expected_of(model)
    engine: dict[str, Any] = {"num_draft_tokens": num_drafts}
    path = cluster_file(
        tmp_path,
        model,
        prefill={**PREFILL, "moe_dispatch": dispatch},
        decode={**DECODE, "moe_dispatch": dispatch},
        prefill_engine=engine,
        decode_engine={**engine, "max_num_seqs": SLOTS},
        transfer={"digest": "all"},
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        for at_once in (1, 2 * SLOTS):
            assert await ask(topology, at_once) == expected
        account = await topology.idle_within()
        assert all(worker["mismatch"] == [] for worker in account["instances"].values())
