"""kv_cache/prefix.py: equal keys exactly where everything that an entry depends on is equal."""

from longcat_pd.kv_cache.prefix import block_keys

IDS = list(range(100, 120))


def test_only_full_blocks_have_keys_and_a_longer_sequence_has_the_same_ones_first() -> None:
    long = block_keys(IDS, 4, sees_next=False)
    assert [len(block_keys(IDS[:n], 4, sees_next=False)) for n in (0, 1, 3, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert block_keys(IDS[:9], 4, sees_next=False) == long[:2]
    assert len(set(long)) == 5


def test_a_key_is_that_of_the_whole_prefix() -> None:
    other = [*IDS[:3], 7, *IDS[4:]]
    ours, theirs = block_keys(IDS, 4, sees_next=False), block_keys(other, 4, sees_next=False)
    assert not set(ours) & set(theirs)
    assert block_keys([*IDS[:9], 7, *IDS[10:]], 4, sees_next=False)[:3] == [*ours[:2], *block_keys(
        [*IDS[:9], 7, *IDS[10:]], 4, sees_next=False)[2:3]]  # fmt: skip
    repeated = block_keys([5, 5, 5, 5, 5, 5, 5, 5], 4, sees_next=False)
    assert repeated[0] != repeated[1]


def test_entries_that_depend_on_the_next_token_have_it_in_their_key() -> None:
    ours = block_keys(IDS, 4, sees_next=True)
    assert len(ours) == 4, "the token behind the last block is not known"
    assert len(block_keys(IDS[:9], 4, sees_next=True)) == 2 and len(block_keys(IDS[:8], 4, sees_next=True)) == 1
    theirs = block_keys([*IDS[:8], 7, *IDS[9:]], 4, sees_next=True)
    assert theirs[0] == ours[0] and theirs[1] != ours[1]
    assert ours[0] != block_keys(IDS, 4, sees_next=False)[0]


def test_keys_go_on_where_known_ones_end() -> None:
    for sees_next in (False, True):
        whole = block_keys(IDS, 4, sees_next=sees_next)
        assert block_keys(IDS, 4, sees_next=sees_next, before=whole[:2]) == whole
        assert block_keys(IDS[:4], 4, sees_next=sees_next, before=whole[:2]) == whole[:2]
