"""What an instance says of itself: whether it is fit, how its drafts do, and the leak invariant.

The invariant compares what the ranks hold by their own count with what the driver believes they hold; its form is that of
``/debug/accounting`` at a worker, without the lines that say who answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longcat_pd.clock import Clock
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.loop import StepLoop
from longcat_pd.engine.plan import RankAccounts, SlotOutput
from longcat_pd.engine.room import RankFigures
from longcat_pd.engine.roster import RankState
from longcat_pd.engine.standing import Groups, groups_of, parted
from longcat_pd.errors import LongcatError
from longcat_pd.log import logger
from longcat_pd.metrics import EngineMetrics

ANSWER_LIMIT_S = 2.0
ROWS_KEPT = 4096  # of the mean accepted length


class Acceptance:
    """How well drafts do: counters, and a mean over the latest rows of decode steps."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._lengths: deque[int] = deque(maxlen=ROWS_KEPT)

    def add(self, slots: Iterable[SlotOutput]) -> None:
        """What one decode step brings to sequences that had not ended before it.

        What one does not take because it ends inside the run counts like the rest.
        """
        for slot in slots:
            self._lengths.append(len(slot.token_ids))
            self._metrics.draft_tokens_total.inc(slot.num_drafts)
            self._metrics.accepted_tokens_total.inc(len(slot.token_ids) - 1)

    def mean(self) -> float | None:
        """Tokens for each row and step, the target's own included; None before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def restart(self) -> None:
        """Begin a new mean; the counters go on."""
        self._lengths.clear()


class Glance:
    """What an instance shows of itself without asking a rank for it: as of the ranks' last heartbeats."""

    def __init__(self, loop: StepLoop, acceptance: Acceptance) -> None:
        self._loop = loop
        self._acceptance = acceptance

    def facts(self, *, transfers: int) -> dict[str, Any]:
        """Load, pace (mean milliseconds of the latest steps; None before the first) and every rank."""
        room = self._loop.scheduler.room
        figures, cached = room.figures(), room.cached_by_rank()
        states = self._loop.executor.rank_states()
        return {
            "waiting": figures.waiting,
            "running": figures.running,
            "slots": figures.slots,
            "transfers": transfers,
            "step_ms": {phase: 1000 * sum(took) / len(took) if took else None for phase, took in self._loop.pace.items()},
            "accepted": self._acceptance.mean(),
            "ranks": [_seen(state, cached[state.rank]) for state in states],
        }


def _seen(state: RankState, cached: int) -> dict[str, Any]:
    accounts = state.accounts
    told = _rank(accounts, cached=min(cached, accounts.blocks_free), is_silent=state.state != "ok")
    return {
        **{key: told[key] for key in ("rank", "blocks", "slots", "lanes")},
        "state": state.state,
        "silent_s": state.silent_s,
        "missed": state.missed,
        "waits_for": state.waits_for,
        "stands_in": accounts.stands_in,
    }


@dataclass(frozen=True, slots=True)
class Health:
    """``reasons`` (dicts with code, detail, rank): why the instance is not ready; ``is_lost``: it cannot recover."""

    busy: bool
    ranks_total: int
    ranks_ok: int
    reasons: tuple[dict[str, Any], ...]
    is_lost: bool
    states: tuple[RankState, ...] = ()


def health(loop: StepLoop) -> Health:
    """Judge what is known already."""
    failure, states, figures = loop.failure, loop.executor.rank_states(), loop.scheduler.room.figures()
    reasons: list[dict[str, Any]] = []
    if failure is not None:
        code = "draining" if failure.code == "draining" else "rank_lost"
        lost = next((s.rank for s in states if s.state == "lost"), None)
        reasons.append({"code": code, "detail": failure.message, "rank": lost})
    elif not loop.is_running:
        absent = ", ".join(dict.fromkeys(state.waits_for for state in states if state.waits_for))
        detail = f"waits for {absent}" if absent else "the ranks are not ready yet"
        reasons.append({"code": "starting", "detail": detail, "rank": None})
    for state in states:
        if state.state == "silent":
            detail = f"no heartbeat for {state.silent_s:.1f} s"
            reasons.append({"code": "rank_silent", "detail": detail, "rank": state.rank})
        if state.missed:
            reasons.append({"code": "step_overdue", "detail": state.missed, "rank": state.rank})
    return Health(
        busy=figures.waiting > 0 or figures.running == figures.slots,
        ranks_total=len(states),
        ranks_ok=sum(s.state == "ok" for s in states),
        reasons=tuple(reasons),
        is_lost=failure is not None and failure.code != "draining",
        states=states,
    )


async def account(
    loop: StepLoop, clock: Clock, *, parallel: ParallelConfig, transfers: int, request_sockets: int
) -> dict[str, Any]:
    """The account of an instance, with the figures of all ranks that answer in time."""
    fresh: dict[int, RankAccounts] = {}
    if loop.is_running:
        outputs = loop.checkpoint()
        expected = loop.scheduler.room.by_rank()
        try:
            answers = await clock.within(ANSWER_LIMIT_S, asyncio.shield(outputs))
            fresh = {o.rank: o.accounts for o in answers if o.accounts is not None}
        except (TimeoutError, LongcatError) as error:
            logger().warning("accounting_without_answer", reason=str(error))
    else:
        expected = loop.scheduler.room.by_rank()
    figures = loop.scheduler.room.figures()
    driver = {
        "requests_waiting": figures.waiting,
        "requests_running": figures.running,
        "transfers": transfers,
        "request_sockets": request_sockets,
    }
    return report(driver, loop.executor.rank_states(), fresh=fresh, expected=expected, groups=groups_of(parallel))


def set_gauges(loop: StepLoop, metrics: EngineMetrics) -> None:
    """Bring the gauges up to date."""
    figures = loop.scheduler.room.figures()
    metrics.sequences("waiting").set(figures.waiting)
    metrics.sequences("running").set(figures.running)
    metrics.slots("used").set(figures.running)
    metrics.slots("free").set(figures.slots - figures.running)
    for state, count in figures.blocks.items():
        metrics.blocks(state).set(count)
    metrics.compilations.set(sum(s.accounts.compilations for s in loop.executor.rank_states()))
    states = [s.state for s in loop.executor.rank_states()]
    for name in ("ok", "silent", "lost"):
        metrics.ranks(name).set(states.count(name))


def report(
    driver: Mapping[str, int],
    states: Sequence[RankState],
    *,
    fresh: Mapping[int, RankAccounts],
    expected: Sequence[RankFigures],
    groups: Groups,
) -> dict[str, Any]:
    """The account of an instance.

    Args:
        driver: counts of the driver itself; all of them are outstanding.
        states: what is known of each rank; its last figures stand in for a rank that did not answer.
        fresh: answers of the ranks to one and the same plan.
        expected: by rank, what they must hold after that plan.
        groups: ranks that take part in the same collectives.
    """
    ranks, mismatch = [], []
    outstanding = sum(driver.values())
    for state in states:
        accounts = fresh.get(state.rank, state.accounts)
        cached = min(expected[state.rank].cached, accounts.blocks_free)  # of a rank that did not answer: as far as it fits
        ranks.append(_rank(accounts, cached=cached, is_silent=state.state != "ok"))
        outstanding += accounts.blocks_reserved + accounts.blocks_live + accounts.blocks_quarantined
        outstanding += accounts.slots_used + accounts.lanes_posted + accounts.lanes_unsent
        if state.rank in fresh:
            mismatch += _differences(accounts, expected[state.rank])
    mismatch += [str(found) for found in parted(fresh, groups)]
    is_silent = any(state.state != "ok" for state in states)
    return {
        "idle": not outstanding and not mismatch and not is_silent,
        "outstanding": outstanding,
        "mismatch": mismatch,
        "driver": dict(driver),
        "ranks": ranks,
    }


def _rank(accounts: RankAccounts, *, cached: int, is_silent: bool) -> dict[str, Any]:
    return {
        "rank": accounts.rank,
        "silent": is_silent,
        "blocks": {
            "total": accounts.blocks_total,
            "free": accounts.blocks_free - cached,
            "cached": cached,
            "reserved": accounts.blocks_reserved,
            "live": accounts.blocks_live,
            "quarantined": accounts.blocks_quarantined,
        },
        "slots": {"total": accounts.slots_total, "used": accounts.slots_used},
        "lanes": {"posted": accounts.lanes_posted, "unsent": accounts.lanes_unsent},
        "collectives": {one.axis: one.entered for one in accounts.collectives},
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
