"""int8 against int8: pools and one engine say the same token for token, alone and in company, through HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd.config import resolve
from longcat_pd.quantize import quantize
from tests.integration.test_same_tokens import ask_one_by_one, ask_staggered, assert_same, expected_of, prompts
from tests.parity.conftest import MakeCheckpoint
from tests.topology import cluster_file, pools, standalone


@pytest.mark.parametrize("variant", ["2.0", pytest.param("chat", marks=pytest.mark.slow)])
async def test_pools_say_what_one_engine_says(tiny: MakeCheckpoint, tmp_path: Path, variant: str) -> None:
    model = tmp_path / "int8"
    quantize(tiny(variant), model)
    expected = await expected_of(model)
    async with standalone(tiny(variant), "model.dtype=float32") as topology:
        plain = await ask_one_by_one(topology, prompts())
    assert [a["token_ids"] for a in plain] != [a["token_ids"] for a in expected], "it is another model"
    async with standalone(model, "model.dtype=float32") as topology:
        assert_same(await ask_staggered(topology, prompts()), expected)
    prefill = {"pp_size": 2, "cp_size": 2, "layers_per_stage": [2, 1]}
    path = cluster_file(
        tmp_path, model, prefill=prefill, decode={"kvp_size": 2, "attn_tp_size": 2}, transfer={"digest": "all"}
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        assert_same(await ask_staggered(topology, prompts()), expected)
        assert_same(await ask_one_by_one(topology, prompts()), expected)
        await topology.idle_within()
