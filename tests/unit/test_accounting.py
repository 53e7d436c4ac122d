"""engine/accounting.py: ranks that have parted in their collectives are told, with their counts."""

from __future__ import annotations

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.accounting import report
from longcat_pd.engine.plan import AxisCollectives, RankAccounts
from longcat_pd.engine.room import RankFigures
from longcat_pd.engine.roster import RankState
from longcat_pd.engine.standing import groups_of

GROUPS = groups_of(ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, ep_size=4))


def mismatch(*entered: dict[str, tuple[int, int]]) -> list[str]:
    """What is told of ranks that have entered so many collectives of an axis, of kinds with that digest."""
    fresh = {
        rank: RankAccounts(
            rank=rank,
            collectives=tuple(AxisCollectives(axis=axis, entered=n, digest=digest) for axis, (n, digest) in axes.items()),
        )
        for rank, axes in enumerate(entered)
    }
    states = [RankState(rank, "ok", 0.0, None, accounts) for rank, accounts in fresh.items()]
    nothing = [RankFigures(live=0, reserved=0, quarantined=0, slots=0, cached=0)] * len(fresh)
    found = report({}, states, fresh=fresh, expected=nothing, groups=GROUPS)
    assert found["idle"] == (not found["mismatch"])
    return list(found["mismatch"])


def test_ranks_of_a_group_enter_the_same_collectives() -> None:
    first, second = {"ep": (9, 77), "kvp": (4, 1)}, {"ep": (9, 77), "kvp": (6, 5)}
    assert mismatch(first, first, second, second) == []
    assert mismatch(first, first, second, {**second, "kvp": (5, 5)}) == [
        "collectives of kvp differ between ranks (2: 6, 3: 5)"
    ]
    assert mismatch(first, {**first, "ep": (9, 78)}, second, second) == [
        "collectives of ep differ between ranks (0: 9, 1: 9, 2: 9, 3: 9)"
    ]
    assert mismatch(first, {"kvp": (4, 1)}, second, second) == [
        "collectives of ep differ between ranks (0: 9, 1: 0, 2: 9, 3: 9)"
    ]
