"""What a plan still holds of prompts, in tokens and in rows of the fullest rank."""

from __future__ import annotations

from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.budget import Budget
from longcat_pd.kv_cache.layout import BlockSplit
from tests.unit.engine_rig import engine_config

SIZES = engine_config(block_size=16, max_num_batched_tokens=128)


def test_without_context_parallel_only_tokens_count() -> None:
    budget, split = Budget(SIZES, ParallelConfig()), BlockSplit(1, 16)
    assert [budget.take(0, 15, split) for _ in range(8)] == [15] * 8
    assert budget and budget.take(0, 15, split) == 0, "no whole block is left of eight"
    assert not budget


def test_the_fullest_rank_has_no_more_rows_than_a_level_chunk() -> None:
    layout = ParallelConfig(cp_size=4)
    budget, split = Budget(SIZES, layout), BlockSplit(4, 16, 1)
    taken = [budget.take(0, 15, split) for _ in range(3)]
    assert chunk_rows(SIZES, layout) == 32 and taken == [15, 15, 0]
    assert not budget
    spread, places = Budget(SIZES, layout), [BlockSplit(4, 16, place % 4) for place in range(8)]
    assert [spread.take(0, 15, split) for split in places] == [15] * 8


def test_a_chunk_that_starts_inside_a_round_ends_where_a_rank_is_full() -> None:
    """Blocks 2, 3 lie on ranks 2, 3, and so do 5, 4: at most two blocks of each rank are in one plan."""
    split = BlockSplit(4, 16)
    assert [split.rank_of(block) for block in range(2, 11)] == [2, 3, 3, 2, 1, 0, 0, 1, 2]
    budget = Budget(SIZES, ParallelConfig(cp_size=4))
    assert budget.take(32, 500, split) == 160, "eight blocks, up to the third of rank 2"
    assert Budget(SIZES, ParallelConfig(cp_size=4)).take(0, 500, split) == 128


def test_a_share_that_is_no_whole_block_is_rounded_up_and_one_block_always_fits() -> None:
    sizes = engine_config(block_size=16, max_num_batched_tokens=16)
    assert chunk_rows(sizes, ParallelConfig(cp_size=8)) == 16
    assert Budget(sizes, ParallelConfig(cp_size=8)).take(0, 40, BlockSplit(8, 16)) == 16
