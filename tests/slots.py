"""Shared by tests of the rank side: admissions with blocks from real pools, and the plans around them."""

from __future__ import annotations

from longcat_pd.engine.plan import Admit, SlotSampling
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Push
from longcat_pd.wire import pack

GREEDY = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)


def admit(
    pool: GroupPool,
    slot: int,
    token_ids: list[int],
    *,
    block_size: int,
    room: int,
    num_computed: int = 0,
    sampling: SlotSampling = GREEDY,
    push: Push | None = None,
    arrival: str | None = None,
) -> Admit:
    """An admission that reserves ``room`` more tokens than it knows."""
    split = BlockSplit.for_prompt(len(pool.shards), block_size, token_ids)
    table = pool.allocate(split, split.num_blocks(len(token_ids) + room))
    assert table is not None
    return Admit(
        slot=slot,
        group=pool.group,
        token_ids=pack(token_ids),
        prompt_len=len(token_ids) if num_computed == 0 else num_computed,
        num_computed=num_computed,
        blocks=pack(table.blocks),
        split_start=split.start,
        sampling=sampling,
        push=push,
        arrival=arrival,
    )
