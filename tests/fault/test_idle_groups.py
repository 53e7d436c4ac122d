"""Groups without work and stages with aborts between them: failures of the kind 25, and one order for all ranks.

Real rank processes; the driver is in the test, which reads the accounts that come with every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.config import resolve
from longcat_pd.engine.plan import RankAccounts, StepOutput
from longcat_pd.engine.scheduler import Scheduler
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + CHUNK + 20))
ROUNDS, MOST_ROUNDS = 30, 150  # on a busy machine less is computed before somebody leaves
WANTED, KINDS = 50, 5  # steps, and different amounts that were held


class Steps:
    """The accounts of all ranks behind every step of an instance, as its driver gets them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seen: list[tuple[RankAccounts, ...]] = []
        self._apply = scheduler.apply
        vars(scheduler)["apply"] = self._look

    def _look(self, outputs: Sequence[StepOutput], now: float) -> object:
        accounts = tuple(output.accounts for output in outputs if output.accounts is not None)
        assert len(accounts) == len(outputs)
        self.seen.append(accounts)
        return self._apply(outputs, now)


def scheduler_of(topology: Topology, name: str) -> Scheduler:
    found = vars(topology.parts[name].engine)["_scheduler"]
    assert isinstance(found, Scheduler)
    return found


async def test_one_group_works_then_none_then_all_then_one(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        decode={"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2, "ep_size": 4},
        decode_engine={"max_num_seqs": 8},
        model={"path": str(tiny("2.0")), "dtype": "float32"},
    )
    async with pools(resolve.load(path)) as topology:
        steps = Steps(scheduler_of(topology, "d0"))
        alone = (await topology.complete(PROMPT, max_tokens=12))["token_ids"]
        one = len(steps.seen)
        await topology.idle_within()
        await asyncio.sleep(1.5)  # nobody has work
        all_at_once = await asyncio.gather(*(topology.complete(PROMPT, max_tokens=12 + n) for n in range(8)))
        everyone = len(steps.seen)
        again = (await topology.complete(PROMPT, max_tokens=12))["token_ids"]
        assert again == alone and all(answer["token_ids"][:12] == alone for answer in all_at_once)
        account = await topology.idle_within()
        assert account["instances"]["d0"]["mismatch"] == []
    parts = steps.seen[:one], steps.seen[one:everyone]
    used = [[any(accounts[rank].slots_used for accounts in part) for rank in (0, 2)] for part in parts]
    assert sorted(used[0]) == [False, True] and used[1] == [True, True], "one group, then both"
    before: dict[str, int] = {}
    for accounts in steps.seen:
        ranks = [{one.axis: one for one in rank.collectives} for rank in accounts]
        assert [rank.get("kvp") for rank in ranks[::2]] == [rank.get("kvp") for rank in ranks[1::2]], "inside each group"
        rest = {tuple(one for axis, one in rank.items() if axis != "kvp") for rank in ranks}
        assert len(rest) == 1, "the same number of the same kinds on every rank"
        entered = {axis: one.entered for axis, one in ranks[0].items()}
        assert all(entered[axis] >= count for axis, count in before.items())
        before = entered
    assert set(before) == {"ep", "kvp", "attn_tp"} and min(before.values()) > 0


async def test_aborts_between_stages_never_leave_different_accounts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Requests leave at random moments while plans are on their way in a pipeline of three."""
    path = cluster_file(
        tmp_path,
        tiny("2.0"),
        prefill={"pp_size": 3},
        model={"path": str(tiny("2.0")), "dtype": "float32"},
    )
    draw = random.Random(5)
    async with pools(resolve.load(path)) as topology:
        good = (await topology.complete(PROMPT, max_tokens=3))["token_ids"]
        await topology.client.post("/flush_cache")
        steps = Steps(scheduler_of(topology, "p0"))
        for number in range(MOST_ROUNDS):
            prompt = [200 + number, *PROMPT * draw.randint(1, 4)]
            await asyncio.gather(*(_leave(topology, [300 + n, *prompt], draw.uniform(0.0, 0.25)) for n in range(3)))
            if number + 1 >= ROUNDS and len(steps.seen) > WANTED and len(held_of(steps)) > KINDS:
                break
        assert (await topology.complete(PROMPT, max_tokens=3))["token_ids"] == good
        account = await topology.idle_within(8.0)
        assert all(worker["mismatch"] == [] for worker in account["instances"].values())
    assert len(steps.seen) > WANTED
    assert len(held_of(steps)) > KINDS, "much was held, and given back"
    for accounts in steps.seen:
        assert len({(one.slots_used, one.blocks_live, one.blocks_reserved) for one in accounts}) == 1, accounts


def held_of(steps: Steps) -> set[tuple[int, int]]:
    """What the first rank had behind each of them: slots and blocks."""
    return {(accounts[0].slots_used, accounts[0].blocks_live) for accounts in steps.seen}


async def _leave(topology: Topology, prompt: list[int], seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(topology.complete(prompt, max_tokens=3), seconds)
