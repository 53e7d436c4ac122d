"""The leak invariant: what the ranks hold by their own count, against what the driver believes they hold.

Pure. The form is that of ``/debug/accounting`` at a worker, without the lines that say who answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longcat_pd.engine.executor import RankState
from longcat_pd.engine.plan import RankAccounts
from longcat_pd.engine.room import RankFigures


def report(
    driver: Mapping[str, int],
    states: Sequence[RankState],
    *,
    fresh: Mapping[int, RankAccounts],
    expected: Sequence[RankFigures],
) -> dict[str, Any]:
    """The account of an instance.

    Args:
        driver: counts of the driver itself; all of them are outstanding.
        states: what is known of each rank; its last figures stand in for a rank that did not answer.
        fresh: answers of the ranks to one and the same plan.
        expected: by rank, what they must hold after that plan.
    """
    ranks, mismatch = [], []
    outstanding = sum(driver.values())
    for state in states:
        accounts = fresh.get(state.rank, state.accounts)
        ranks.append(_rank(accounts, is_silent=state.state != "ok"))
        outstanding += accounts.blocks_reserved + accounts.blocks_live + accounts.blocks_quarantined
        outstanding += accounts.slots_used + accounts.lanes_posted + accounts.lanes_unsent
        if state.rank in fresh:
            mismatch += _differences(accounts, expected[state.rank])
    is_silent = any(state.state != "ok" for state in states)
    return {
        "idle": not outstanding and not mismatch and not is_silent,
        "outstanding": outstanding,
        "mismatch": mismatch,
        "driver": dict(driver),
        "ranks": ranks,
    }


def _rank(accounts: RankAccounts, *, is_silent: bool) -> dict[str, Any]:
    return {
        "rank": accounts.rank,
        "silent": is_silent,
        "blocks": {
            "total": accounts.blocks_total,
            "free": accounts.blocks_free,
            "cached": 0,
            "reserved": accounts.blocks_reserved,
            "live": accounts.blocks_live,
            "quarantined": accounts.blocks_quarantined,
        },
        "slots": {"total": accounts.slots_total, "used": accounts.slots_used},
        "lanes": {"posted": accounts.lanes_posted, "unsent": accounts.lanes_unsent},
    }


def _differences(accounts: RankAccounts, expected: RankFigures) -> list[str]:
    pairs = (
        ("blocks.live", accounts.blocks_live, expected.live),
        ("blocks.reserved", accounts.blocks_reserved, expected.reserved),
        ("slots.used", accounts.slots_used, expected.slots),
    )
    found = [
        f"rank {accounts.rank}: {name} is {has}, the driver says {wants}" for name, has, wants in pairs if has != wants
    ]
    if accounts.blocks_quarantined > expected.quarantined:
        found.append(
            f"rank {accounts.rank}: blocks.quarantined is {accounts.blocks_quarantined}, "
            f"the driver says at most {expected.quarantined}"
        )
    return found
