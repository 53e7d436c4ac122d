"""kv_cache/layout.py: rank_of, local_index and blocks_of agree for every block, and the split is level."""

import zlib

import pytest

from longcat_pd.kv_cache.layout import BlockSplit, first_block_digest


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [0, 1, 5, 24])
def test_every_block_has_one_place(num_ranks: int, num_blocks: int) -> None:
    for start in range(num_ranks):
        split = BlockSplit(num_ranks, 4, start)
        seen = [number for rank in range(num_ranks) for number in split.blocks_of(rank, num_blocks)]
        assert sorted(seen) == list(range(num_blocks))
        for number in range(num_blocks):
            assert split.block_at(split.rank_of(number), split.local_index(number)) == number
        for rank in range(num_ranks):
            numbers = split.blocks_of(rank, num_blocks)
            assert numbers == sorted(numbers)
            assert [split.local_index(number) for number in numbers] == list(range(len(numbers)))


def test_serpentine_by_hand() -> None:
    split = BlockSplit(3, 16, start=1)
    assert [split.rank_of(number) for number in range(9)] == [1, 2, 0, 0, 2, 1, 1, 2, 0]
    assert split.blocks_of(0, 7) == [2, 3]
    assert split.num_blocks(0) == 0
    assert split.num_blocks(16) == 1
    assert split.num_blocks(17) == 2
    assert split.num_rounds(7) == 3


def test_causal_work_is_level() -> None:
    split = BlockSplit(4, 1)
    work = [sum(split.blocks_of(rank, 64)) for rank in range(4)]
    assert max(work) == min(work)


def test_start_follows_the_first_block_only() -> None:
    ids = [5, 6, 7, 8, 9]
    assert first_block_digest([1, 2]) == zlib.crc32(b"\x01\0\0\0\x02\0\0\0")
    assert BlockSplit.for_prompt(3, 4, ids) == BlockSplit.for_prompt(3, 4, [*ids[:4], 1, 2, 3])
    starts = {BlockSplit.for_prompt(3, 4, [n]).start for n in range(20)}
    assert starts == {0, 1, 2}
