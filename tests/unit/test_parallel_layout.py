"""parallel/layout.py: the axes tile the world, and every rank computes the same groups."""

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.parallel.layout import ParallelLayout, layers_of_stage


def test_prefill_rank_is_stage_times_cp_plus_place() -> None:
    layout = ParallelLayout.of(ParallelConfig(pp_size=2, cp_size=3))
    assert layout.world_size == 6
    assert layout.groups("cp") == [(0, 1, 2), (3, 4, 5)]
    assert layout.groups("pp") == [(0, 3), (1, 4), (2, 5)]
    assert layout.coordinate(5, "pp") == 1 and layout.coordinate(5, "cp") == 2
    assert [rank for rank in range(6) if layout.is_reporting(rank)] == [3]


def test_decode_rank_is_group_times_kvp_plus_place() -> None:
    layout = ParallelLayout.of(ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2))
    assert layout.groups("kvp") == layout.groups("attn_tp") == [(0, 1), (2, 3)]
    assert layout.groups("dp") == [(0, 2), (1, 3)]
    assert [rank for rank in range(4) if layout.is_reporting(rank)] == [0, 2]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 2, 1, 1), (1, 1, 2, 4), (2, 2, 2, 2)])
def test_axes_tile_the_world(sizes: tuple[int, int, int, int]) -> None:
    pp, cp, dp, kvp = sizes
    layout = ParallelLayout.of(ParallelConfig(pp_size=pp, cp_size=cp, dp_size=dp, kvp_size=kvp))
    places = {tuple(layout.coordinate(r, n) for n in ("pp", "cp", "dp", "kvp")) for r in range(layout.world_size)}
    assert len(places) == layout.world_size == pp * cp * dp * kvp
    for axis in layout.axes:
        members = [rank for ranks in layout.groups(axis.name) for rank in ranks]
        assert sorted(members) == list(range(layout.world_size))
        for ranks in layout.groups(axis.name):
            assert [layout.coordinate(rank, axis.name) for rank in ranks] == list(range(axis.size))


def test_layers_of_stages() -> None:
    even = ParallelConfig(pp_size=3)
    assert [layers_of_stage(even, 7, stage) for stage in range(3)] == [range(3), range(3, 5), range(5, 7)]
    given = ParallelConfig(pp_size=2, layers_per_stage=(1, 3))
    assert layers_of_stage(given, 4, 1) == range(1, 4)
    with pytest.raises(AssertionError):
        layers_of_stage(given, 5, 0)
