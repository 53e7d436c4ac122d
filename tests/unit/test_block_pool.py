"""kv_cache/block_pool.py and block_table.py: nothing is handed out twice, all or nothing, what is shared is found, stale
tables fail."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from longcat_pd.kv_cache.block_pool import BlockPool, BlockState, GroupPool
from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit

SHARDS, NUM_BLOCKS = 3, 9


@dataclass
class Tenant:
    """One reservation of the naive model: everything that a pool must know about it, in the simplest form."""

    table: BlockTable
    keys: list[bytes]
    state: BlockState
    num_published: int


@dataclass
class Naive:
    """The pool's books, kept by looking at all tenants each time. ``known``: key -> (shard, block)."""

    pool: GroupPool
    tenants: list[Tenant] = field(default_factory=list)
    known: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    is_cached_before: dict[bytes, bool] = field(default_factory=dict)

    def places(self, tenant: Tenant) -> list[tuple[int, int]]:
        table = tenant.table
        return [(table.split.rank_of(n), block) for n, block in enumerate(table.blocks)]

    def held(self) -> dict[tuple[int, int], set[BlockState]]:
        states: dict[tuple[int, int], set[BlockState]] = {}
        for tenant in self.tenants:
            for number, place in enumerate(self.places(tenant)):
                is_live = number < tenant.table.num_shared and tenant.state is BlockState.RESERVED
                states.setdefault(place, set()).add(BlockState.LIVE if is_live else tenant.state)
        return states

    def check(self) -> None:
        held, cached = self.held(), set(self.known.values())
        for rank, shard in enumerate(self.pool.shards):
            for block in range(1, shard.num_blocks):
                found, states = shard.state_of(block), held.get((rank, block))
                if states is None:
                    assert found is (BlockState.CACHED if (rank, block) in cached else BlockState.FREE)
                else:
                    order = (BlockState.LIVE, BlockState.RESERVED, BlockState.QUARANTINED)
                    assert found is next(state for state in order if state in states)
            for state in BlockState:
                assert shard.count(state) == sum(shard.state_of(b) is state for b in range(1, shard.num_blocks))
            assert shard.num_available == shard.count(BlockState.FREE) + shard.count(BlockState.CACHED)
        for tenant in self.tenants:
            assert all(block > 0 for block in tenant.table.blocks)
            own = self.places(tenant)[max(tenant.table.num_shared, tenant.num_published) :]
            others = {place for other in self.tenants if other is not tenant for place in self.places(other)}
            assert not set(own) & others, "what is still to be written belongs to one alone"
        for key, (rank, block) in self.known.items():
            assert self.pool.shards[rank].find(key) == block

    def forget_lost(self) -> None:
        """What was given away is not known any more; nothing is given away that somebody holds."""
        for key, (rank, _) in list(self.known.items()):
            if self.pool.shards[rank].find(key) is None:
                assert self.is_cached_before[key], "a block that somebody held was given away"
                del self.known[key]

    def note_cached(self) -> None:
        held = self.held()
        self.is_cached_before = {key: place not in held for key, place in self.known.items()}


def test_random_lives_against_naive_books() -> None:
    rng = random.Random(3)
    pool = GroupPool(0, SHARDS, NUM_BLOCKS)
    naive = Naive(pool)
    splits = {letter: BlockSplit(SHARDS, 4, i) for i, letter in enumerate("abc")}
    generations, num_hits, num_evicted = set(), 0, 0
    for _ in range(4000):
        naive.note_cached()
        action = rng.choice(("allocate", "allocate", "publish", "more", "activate", "quarantine", "release", "forget"))
        tenant = rng.choice(naive.tenants) if naive.tenants else None
        if action == "allocate":
            letter, size = rng.choice("abc"), rng.randrange(1, 12)
            fork = rng.randrange(0, size + 1)
            keys = [f"{letter}{n}{'x' if n >= fork else ''}".encode() for n in range(size)]
            found = 0
            while found < size - 1 and keys[found] in naive.known:
                found += 1
            table = pool.allocate(splits[letter], size, BlockState.RESERVED, keys[: size - 1])
            before = len(naive.known)
            naive.forget_lost()
            num_evicted += before - len(naive.known)
            if table is not None:
                assert table.num_shared == found and table.generation not in generations
                generations.add(table.generation)
                num_hits += found
                assert [naive.known[k][1] for k in keys[:found]] == list(table.blocks[:found])
                naive.tenants.append(Tenant(table, keys, BlockState.RESERVED, 0))
        elif action == "forget":
            if rng.random() < 0.05:
                pool.forget_all()
                naive.known.clear()
        elif tenant is None:
            continue
        elif action == "publish" and tenant.state in (BlockState.RESERVED, BlockState.LIVE):
            end = rng.randrange(tenant.num_published, len(tenant.keys) + 1)
            pool.publish(tenant.table, tenant.num_published, tenant.keys[tenant.num_published : end])
            places, taken = naive.places(tenant), set(naive.known.values())
            for number in range(tenant.num_published, end):
                if tenant.keys[number] not in naive.known and places[number] not in taken:
                    naive.known[tenant.keys[number]] = places[number]
            tenant.num_published = end
        elif action == "more" and tenant.state is BlockState.RESERVED and not tenant.num_published:
            before_shared = tenant.table.num_shared
            tenant.table = pool.share_more(tenant.table, tenant.keys[:-1])
            assert tenant.table.num_shared >= before_shared
            num_hits += tenant.table.num_shared - before_shared
        elif action == "activate" and tenant.state is BlockState.RESERVED:
            pool.activate(tenant.table)
            tenant.state = BlockState.LIVE
        elif action == "quarantine" and tenant.state is BlockState.LIVE:
            pool.quarantine(tenant.table)
            tenant.state = BlockState.QUARANTINED
        elif action == "release":
            pool.release(tenant.table)
            naive.tenants.remove(tenant)
        naive.check()
    assert num_hits > 200 and num_evicted > 100 and len(generations) > 200
    for tenant in naive.tenants:
        pool.release(tenant.table)
    naive.tenants.clear()
    naive.check()
    assert pool.count(BlockState.FREE) + pool.count(BlockState.CACHED) == SHARDS * (NUM_BLOCKS - 1)


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


KEYS = [b"a", b"b", b"c"]


def kept(pool: GroupPool, num_blocks: int, keys: list[bytes]) -> BlockTable:
    table = pool.allocate(BlockSplit(1, 8), num_blocks, BlockState.LIVE, keys[: num_blocks - 1])
    assert table is not None
    pool.publish(table, 0, keys[:num_blocks])
    pool.release(table)
    return table


def test_of_a_chain_the_end_is_given_away_first_and_what_was_used_last_stays_longest() -> None:
    pool = GroupPool(0, 1, 7)
    kept(pool, 3, KEYS)
    kept(pool, 2, [b"y", b"z"])
    assert kept(pool, 2, KEYS).num_shared == 1  # a: used again; its second block is not its own prompt's b
    order = []
    while pool.count(BlockState.CACHED):
        before = {key for key in (*KEYS, b"y", b"z") if pool.shards[0].find(key) is not None}
        assert pool.allocate(BlockSplit(1, 8), 1) is not None
        after = {key for key in before if pool.shards[0].find(key) is not None}
        order += sorted(before - after)
    assert order == [b"c", b"b", b"z", b"y", b"a"]


def test_what_nobody_holds_is_room_but_not_what_the_newcomer_shares_itself() -> None:
    pool = GroupPool(0, 1, 6)
    kept(pool, 3, KEYS)
    other = pool.allocate(BlockSplit(1, 8), 2)
    assert other is not None and pool.count(BlockState.CACHED) == 3
    assert pool.allocate(BlockSplit(1, 8), 4, BlockState.LIVE, [b"a"]) is None, "one shared, two cached, three wanted"
    assert pool.count(BlockState.CACHED) == 3 and pool.shards[0].find(b"c") is not None
    table = pool.allocate(BlockSplit(1, 8), 3, BlockState.LIVE, [b"a"])
    assert table is not None and table.num_shared == 1 and pool.count(BlockState.CACHED) == 0


def test_what_a_quarantined_sequence_computed_can_be_shared_and_outlives_it() -> None:
    pool = GroupPool(0, 1, 6)
    first = pool.allocate(BlockSplit(1, 8), 3)
    assert first is not None
    pool.publish(first, 0, KEYS)
    pool.quarantine(first)
    second = pool.allocate(BlockSplit(1, 8), 3, BlockState.RESERVED, KEYS[:2])
    assert second is not None and second.blocks[:2] == first.blocks[:2]
    states = [pool.shards[0].state_of(block) for block in first.blocks]
    assert states == [BlockState.LIVE, BlockState.LIVE, BlockState.QUARANTINED]
    pool.release(first)
    assert [pool.shards[0].state_of(b) for b in second.blocks] == [BlockState.LIVE, BlockState.LIVE, BlockState.RESERVED]
    pool.release(second)
    assert pool.count(BlockState.CACHED) == 3 and pool.count(BlockState.FREE) == 2


def test_nothing_is_found_after_forgetting_and_nothing_is_taken_from_its_holder() -> None:
    pool = GroupPool(0, 1, 6)
    kept(pool, 2, [b"y", b"z"])
    table = pool.allocate(BlockSplit(1, 8), 2, BlockState.LIVE, [b"y"])
    assert table is not None and table.num_shared == 1
    pool.forget_all()
    assert pool.count(BlockState.CACHED) == 0 and pool.count(BlockState.LIVE) == 2
    again = pool.allocate(BlockSplit(1, 8), 2, BlockState.LIVE, [b"y"])
    assert again is not None and again.num_shared == 0 and not set(again.blocks) & set(table.blocks)
    pool.release(table)
    assert pool.count(BlockState.FREE) == 3


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
    with pytest.raises(AssertionError, match="generation"):
        pool.publish(old, 0, [b"a"])


def test_live_blocks_do_not_go_back_to_reserved() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1, BlockState.LIVE)
    with pytest.raises(AssertionError, match="live -> reserved"):
        pool.move(block, BlockState.LIVE, BlockState.RESERVED)
    assert pool.state_of(block) is BlockState.LIVE


def test_slot_of_a_position() -> None:
    table = BlockTable(BlockSplit(2, 4, 1), (3, 5, 6), 0, 1, num_shared=1)
    assert table.slot(0) == (1, 12)
    assert table.slot(6) == (0, 22)
    assert table.slot(8) == (0, 24)
    assert table.shard(0) == [5, 6] and table.shard(1) == [3]
    assert table.unshared(0) == [5, 6] and table.unshared(1) == []
