"""kv_cache/block_pool.py and block_table.py: nothing is handed out twice, all or nothing, stale tables fail."""

import random

import pytest

from longcat_pd.kv_cache.block_pool import BlockPool, BlockState, GroupPool
from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit


def check(pool: GroupPool, tables: list[BlockTable]) -> None:
    for rank, shard in enumerate(pool.shards):
        held = [block for table in tables for block in table.shard(rank)]
        assert len(held) == len(set(held))
        assert 0 not in held
        assert shard.count(BlockState.FREE) == shard.num_usable - len(held)
        assert sum(shard.count(state) for state in BlockState) == shard.num_usable


def test_random_life_keeps_the_books() -> None:
    rng = random.Random(3)
    pool = GroupPool(0, 3, 9)
    tables: list[BlockTable] = []
    generations = set()
    for _ in range(400):
        if tables and rng.random() < 0.5:
            table = tables.pop(rng.randrange(len(tables)))
            if rng.random() < 0.5:
                pool.quarantine(table)
                assert pool.count(BlockState.QUARANTINED) == len(table.blocks)
            pool.release(table)
        else:
            split = BlockSplit(3, 4, rng.randrange(3))
            size = rng.randrange(1, 14)
            room = pool.can_allocate(split, size)
            table = pool.allocate(split, size)
            assert (table is not None) == room
            if table is not None:
                tables.append(table)
                assert table.generation not in generations
                generations.add(table.generation)
        check(pool, tables)


def test_all_shards_or_nothing() -> None:
    pool = GroupPool(0, 2, 3)
    split = BlockSplit(2, 4, 0)
    first = pool.allocate(split, 3)  # shard 0 holds number 0, shard 1 holds 1 and 2
    assert first is not None and first.split.blocks_of(1, 3) == [1, 2]
    assert pool.allocate(split, 2) is None
    assert pool.count(BlockState.FREE) == 1
    assert pool.allocate(split, 1) is not None
    assert not pool.can_ever_hold(split, 5)
    assert pool.can_ever_hold(split, 4)


def test_reserved_then_live_then_free() -> None:
    pool = GroupPool(4, 1, 5)
    table = pool.allocate(BlockSplit(1, 8), 3, BlockState.RESERVED)
    assert table is not None and table.group == 4 and table.num_tokens == 24
    assert pool.count(BlockState.RESERVED) == 3
    pool.activate(table)
    assert pool.count(BlockState.LIVE) == 3
    pool.release(table)
    assert pool.count(BlockState.FREE) == 4


def test_stale_tables_fail() -> None:
    pool = GroupPool(0, 1, 3)
    split = BlockSplit(1, 8)
    old = pool.allocate(split, 2)
    assert old is not None
    pool.release(old)
    with pytest.raises(AssertionError, match="generation"):
        pool.release(old)
    assert pool.allocate(split, 2) is not None  # the same blocks, another generation
    with pytest.raises(AssertionError, match="generation"):
        pool.release(old)


def test_live_blocks_do_not_go_back_to_reserved() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1, 1, BlockState.LIVE)
    with pytest.raises(AssertionError, match="live -> reserved"):
        pool.move(blocks, 1, BlockState.RESERVED)
    assert pool.state_of(blocks[0]) is BlockState.LIVE


def test_slot_of_a_position() -> None:
    table = BlockTable(BlockSplit(2, 4, 1), (3, 5, 6), 0, 1)
    assert table.slot(0) == (1, 12)
    assert table.slot(6) == (0, 22)
    assert table.slot(8) == (0, 24)
    assert table.shard(0) == [5, 6]
