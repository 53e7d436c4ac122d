"""Lanes with faults over a loopback: late, broken, half a message. Changed messages and silence: ``test_push.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from longcat_pd.faults import Fault
from longcat_pd.kv_transfer.sides import LaneOptions
from tests.unit.transfer_rig import BLOCK, Handover, Rig


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.switches.clear()
        rig.close()


def sent(rig: Rig, name: str, first_block_id: int = 1) -> Handover:
    handover = Handover(rig, name, 2 * BLOCK, first_block_id=first_block_id)
    handover.announce()
    handover.begin()
    handover.compute()
    return handover


def test_a_slow_message_is_late_and_complete(rigs: list[Rig]) -> None:
    rig = Rig(stages=(3,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_slow", seconds=0.2, times=2))
    began = time.monotonic()
    handover = sent(rig, "t")
    assert rig.arrived.wait(1)[0].ok and time.monotonic() - began >= 0.4
    assert handover.mismatches() == []


def test_a_slow_message_does_not_hold_up_the_end_of_its_lane(rigs: list[Rig]) -> None:
    rig = Rig(stages=(3,))
    rig.switches.set(Fault(name="lane_slow", seconds=60.0))
    sent(rig, "t")
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < 30.0


def test_a_lane_that_breaks_ends_its_transfer_and_the_next_one_gets_another(rigs: list[Rig]) -> None:
    rig = Rig(stages=(3,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_cut", after=1))
    sent(rig, "t")
    assert rig.pushed.wait(1)[0].reason.startswith("peer_lost")
    assert rig.arrived.wait(1)[0].reason.startswith("peer_lost")
    following = sent(rig, "u", first_block_id=20)
    assert rig.arrived.wait(2)[1].ok and following.mismatches() == []


def test_half_a_message_times_out_on_both_sides_and_touches_no_block(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,), options=LaneOptions(timeout_s=1.5))
    rigs.append(rig)
    cache = rig.target_caches[0]
    for entry in cache.spec.entries:
        cache.tensor(entry.name).fill_(7.0)
    rig.switches.set(Fault(name="lane_half"))
    sent(rig, "t")
    assert rig.pushed.wait(1)[0].reason.startswith(("timed_out", "peer_lost"))  # whoever of the two is first
    assert not rig.pushed.all[0].ok
    for lanes in rig.arrival:
        lanes.drop("t")
    assert not rig.arrived.wait(1)[0].ok
    for entry in cache.spec.entries:
        assert torch.equal(cache.tensor(entry.name), torch.full_like(cache.tensor(entry.name), 7.0)), entry.name
    rig.switches.clear()
    assert sent(rig, "u", first_block_id=20).mismatches() or rig.arrived.wait(2)[1].ok


def test_half_a_message_that_goes_on_is_whole(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_half", seconds=0.2))
    handover = sent(rig, "t")
    assert rig.arrived.wait(1)[0].ok and handover.mismatches() == []
