"""engine/operators.py: what the configuration says of NPU is what their operators are told, and what they refuse of a
model is known before anything is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, NpuConfig, ParallelConfig, TransferConfig
from longcat_pd.engine.budget import Budget
from longcat_pd.engine.operators import most_rows, npu_settings, sizes_of
from longcat_pd.kernels import NpuSettings, check_sizes
from longcat_pd.kernels.npu.sizes import ModelSizes
from longcat_pd.kernels.refusal import Unsupported
from longcat_pd.kv_cache.layout import BlockSplit
from tests.npu import device
from tests.releases import CHAT, FULL_2_0

USUAL = npu_settings(NpuConfig(), torch.bfloat16)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"is_moe_overlapped": True}, {"is_overlapped": True}),
        ({"moe_cube_cores": 1}, {"cube_cores": 1}),
        ({"moe_vector_cores": 2}, {"vector_cores": 2}),
        ({"main_cube_cores": 3}, {"main_cube_cores": 3}),
        ({"main_vector_cores": 4}, {"main_vector_cores": 4}),
        ({"is_prefetched": True}, {"is_prefetched": True}),
        ({"comm_alg": "hierarchy"}, {"dispatch_algorithm": "hierarchy"}),
        ({"soc": "A3"}, {"is_series_a3": True}),
    ],
)
def test_every_setting_reaches_the_operators(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    told = npu_settings(NpuConfig(**ours), torch.bfloat16)
    changed = {name: getattr(told, name) for name in NpuSettings.__slots__ if getattr(told, name) != getattr(USUAL, name)}
    assert changed == theirs


def decode(**parallel: Any) -> InstanceSpec:
    return InstanceSpec(
        name="d0",
        role="decode",
        host="127.0.0.1",
        http_port=1,
        device="npu",
        model=ModelSection(path=""),
        parallel=ParallelConfig(**parallel),
        engine=EngineConfig(num_draft_tokens=3),
        transfer=TransferConfig(),
    )


def sizes(fields: dict[str, Any], *, is_int8: bool = True, **parallel: Any) -> ModelSizes:
    return sizes_of(decode(**parallel), ModelConfig.from_dict(fields), is_int8=is_int8)


POOL = {"dp_size": 16, "kvp_size": 8, "attn_tp_size": 8, "ep_size": 128}
A2, A3 = NpuSettings(), NpuSettings(is_series_a3=True)


def test_a_decode_pool_of_the_releases_fits_but_for_the_fused_pair_of_a2() -> None:
    device.install()
    for fields in (FULL_2_0, CHAT):
        for kind in ("gather", "fused"):
            check_sizes("npu", sizes(fields, **POOL, moe_dispatch=kind), npu=A3)
    check_sizes("npu", sizes(FULL_2_0, **POOL, moe_dispatch="gather"), npu=A2)
    assert check_sizes("npu", sizes(CHAT, **POOL, moe_dispatch="gather"), npu=A2) == 0
    # two rows of 6144 numbers to each of 128 ranks for each of 4 local experts, and 2 MiB, twice
    assert check_sizes("npu", sizes(CHAT, **POOL, moe_dispatch="fused"), npu=A2) == 2 * (2 * 128 * 6144 * 2 * 4 + (2 << 20))
    with pytest.raises(Unsupported, match=r"hidden size 8192, allowed are 1 to 7168\. Instead: .*Atlas A3; gather"):
        check_sizes("npu", sizes(FULL_2_0, **POOL, moe_dispatch="fused"), npu=A2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 12}, "12 heads"),
        ({"block_size": 24}, r"engine\.block_size=24"),
        ({"topk": 900}, "900 of 896 experts"),
        ({"inner_width": 2000}, "2000 wide"),
        ({"fused_ranks": 100}, "768 experts are no multiple of 100"),
        ({"fused_ranks": 128, "rows": 600}, "600 rows of a rank at once, allowed are 1 to 512"),
    ],
)
def test_sizes_that_operators_refuse_are_named(changes: dict[str, Any], text: str) -> None:
    device.install()
    asked = replace(sizes(FULL_2_0, **POOL), **changes)
    with pytest.raises(Unsupported, match=text):
        check_sizes("npu", asked, npu=A3)
    check_sizes("cpu", asked, npu=A3)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("heads", 65, "65 heads of 128"), ("width", 64, "32 heads of 64"), ("budget", 8192, "8208 candidates")],
)
def test_an_indexer_that_operators_refuse(field: str, value: int, text: str) -> None:
    device.install()
    asked = sizes(FULL_2_0, **POOL)
    assert asked.indexer is not None
    with pytest.raises(Unsupported, match=text):
        check_sizes("npu", replace(asked, indexer=replace(asked.indexer, **{field: value})), npu=A2)


def test_rows_of_a_rank() -> None:
    """64 slots in 16 groups, windows of 4, spread over 8 ranks; prompts count where they are computed."""
    assert most_rows(decode(**POOL)) == 2
    alone = replace(decode(), role="standalone", engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=100))
    assert most_rows(alone) == 100
    prompts = replace(alone, role="prefill", parallel=ParallelConfig(pp_size=2, cp_size=8))
    assert most_rows(prompts) == 100, "a block lies on one rank"


@pytest.mark.parametrize(("block_size", "tokens", "most"), [(128, 1024, 128), (128, 1536, 256), (1024, 2048, 1024)])
def test_prompts_that_begin_alike_may_give_one_rank_of_cp_whole_blocks(block_size: int, tokens: int, most: int) -> None:
    engine = EngineConfig(block_size=block_size, max_num_batched_tokens=tokens)
    prompts = replace(decode(), role="prefill", parallel=ParallelConfig(cp_size=8), engine=engine)
    budget, split = Budget(engine, prompts.parallel), BlockSplit(8, block_size)
    on_one_rank = sum(budget.take(0, block_size, split) for _ in range(tokens // block_size) if budget)
    assert on_one_rank == most == most_rows(prompts)
