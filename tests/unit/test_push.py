"""The rank side of a hand-over over a loopback: what leaves, when, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longcat_pd.config.schema import TransferConfig
from longcat_pd.faults import Fault
from longcat_pd.kv_transfer.frames import Header, block_digest
from longcat_pd.kv_transfer.loopback import LoopbackCaller
from longcat_pd.kv_transfer.push import _PushLane
from longcat_pd.kv_transfer.sides import LaneCounts, LaneOptions
from longcat_pd.kv_transfer.transport import LaneEnd
from tests.unit.transfer_rig import BLOCK, Handover, Rig

AT_ONCE_S = 15.0  # less than the thirty after which a lane would give up


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.switches.clear()
        rig.close()


SIZES = [((2,), 1, 1), ((1, 2), 3, 4), ((3,), 2, 1), ((1, 1, 1), 1, 3), ((2, 1), 2, 2), ((1, 1), 4, 3)]


@pytest.mark.parametrize(("stages", "cp", "kvp"), SIZES)
@pytest.mark.parametrize("prompt_len", [1, BLOCK, 5 * BLOCK + 1])
def test_everything_arrives(rigs: list[Rig], stages: tuple[int, ...], cp: int, kvp: int, prompt_len: int) -> None:
    rig = Rig(stages=stages, cp=cp, kvp=kvp, options=LaneOptions(digest="all", timeout_s=30.0))
    rigs.append(rig)
    handover = Handover(rig, "t", prompt_len, source_start=cp - 1, target_start=kvp // 2)
    handover.announce()
    handover.begin()
    handover.compute(chunk_blocks=2)
    sent, arrived = rig.pushed.wait(len(rig.push)), rig.arrived.wait(kvp)
    assert all(c.ok for c in sent + arrived), (sent, arrived)
    assert {c.rank for c in sent} == set(range(len(rig.push)))
    assert {c.rank for c in arrived} == set(range(kvp))
    assert handover.mismatches() == []
    assert sum(c.num_bytes for c in arrived) <= sum(c.num_bytes for c in sent)
    assert all(lanes.counts().unsent == 0 for lanes in rig.push)
    assert all(lanes.counts().posted == 0 for lanes in rig.arrival)
    assert sum(lanes.counts().reserved_blocks for lanes in rig.arrival) == len(handover.target_blocks)
    for lanes in rig.arrival:
        lanes.adopt("t")
    assert sum(lanes.counts().reserved_blocks for lanes in rig.arrival) == 0


@pytest.mark.parametrize(("stages", "cp", "kvp"), SIZES)
@pytest.mark.parametrize(("num_held", "num_found"), [(1, 0), (3, 0), (5, 0), (0, 5), (2, 4), (4, 2), (5, 5)])
def test_what_the_target_holds_is_not_sent_and_what_the_source_had_is(
    rigs: list[Rig], stages: tuple[int, ...], cp: int, kvp: int, num_held: int, num_found: int
) -> None:
    rig = Rig(stages=stages, cp=cp, kvp=kvp, options=LaneOptions(digest="all", timeout_s=30.0))
    rigs.append(rig)
    handover = Handover(rig, "t", 5 * BLOCK + 1, source_start=cp - 1, target_start=kvp // 2, num_held=num_held)
    before = [{e.name: cache.tensor(e.name).clone() for e in cache.spec.entries} for cache in rig.target_caches]
    handover.announce()
    assert sum(lanes.counts().reserved_blocks for lanes in rig.arrival) == len(handover.target_blocks) - num_held
    handover.begin()
    handover.compute(chunk_blocks=2, num_found=num_found)
    sent, arrived = rig.pushed.wait(len(rig.push)), rig.arrived.wait(kvp)
    assert all(c.ok for c in sent + arrived) and len(sent) == len(rig.push) and len(arrived) == kvp, (sent, arrived)
    assert handover.mismatches(num_held) == []
    for block in range(num_held):
        rank = handover.target_split.rank_of(block)
        for name, old in before[rank].items():
            place = handover.target_blocks[block]
            assert torch.equal(rig.target_caches[rank].tensor(name)[place], old[place]), f"{name} block {block} was written"


def test_a_block_that_the_target_holds_breaks_its_transfer_if_it_comes(rigs: list[Rig]) -> None:
    rig = Rig()
    rigs.append(rig)
    announced = Handover(rig, "t", 3 * BLOCK, num_held=2)
    announced.announce()
    sending = Handover(rig, "t", 3 * BLOCK, num_held=1)  # of a source that reads its grant wrongly
    sending.begin()
    sending.compute()
    assert "which is not its own" in rig.arrived.wait(1)[0].reason


def test_a_group_that_is_not_meant_has_nothing_to_do(rigs: list[Rig]) -> None:
    rig = Rig(kvp=2, groups=2)
    rigs.append(rig)
    handover = Handover(rig, "t", 9, group=1)
    handover.announce()
    assert {c.rank for c in rig.arrived.wait(2)} == {0, 1}
    for lanes in rig.arrival[:2]:
        assert lanes.counts() == LaneCounts() and not lanes._by_id, "nothing is kept of it"
    assert sum(lanes.counts().reserved_blocks for lanes in rig.arrival[2:]) == len(handover.target_blocks)
    handover.begin()
    handover.compute()
    assert all(c.ok for c in rig.arrived.wait(4))
    assert handover.mismatches() == []


def test_a_layer_leaves_before_the_next_is_pushed(rigs: list[Rig]) -> None:
    rig = Rig(stages=(4,))
    rigs.append(rig)
    left: list[int] = []
    has_left = threading.Event()

    def watch(header: Header) -> None:
        if not header.is_end:
            left.append(header.layer)
        has_left.set()

    rig.on_message = watch
    handover = Handover(rig, "t", 8 * BLOCK)
    handover.announce()
    handover.begin()
    for first in (0, 2, 4, 6):
        for layer in range(4):
            has_left.clear()
            rig.push[0].push_layer("t", layer, first, first + 2, is_last_chunk=first == 6)
            assert has_left.wait(60.0)
            assert left[-1] == layer  # nothing of layer + 1 is known to the lanes yet
    assert left == [0, 1, 2, 3] * 4
    (closed,) = rig.pushed.wait(1)
    assert rig.arrived.wait(1)[0].ok
    assert closed.bytes_before_last_layer / closed.num_bytes >= 0.8


@pytest.mark.parametrize("kind", ["lose", "repeat", "alter"])
@pytest.mark.parametrize("digest", ["off", "all"])
def test_a_fault_of_one_block(rigs: list[Rig], kind: str, digest: str) -> None:
    rig = Rig(stages=(3,), options=LaneOptions(digest=digest, timeout_s=30.0))  # type: ignore[arg-type]
    rigs.append(rig)
    rig.switches.set(Fault(name=f"lane_{kind}", layer=1))
    handover = Handover(rig, "t", 3 * BLOCK)
    handover.announce()
    handover.begin()
    handover.compute()
    (closed,) = rig.arrived.wait(1)
    if kind == "alter" and digest == "off":
        assert closed.ok  # one flipped bit is what the digest is for
        assert len(handover.mismatches()) == 1
        return
    assert not closed.ok
    wanted = {"lose": "aborted: incomplete, 1 ", "repeat": "twice", "alter": "digest_mismatch"}
    assert wanted[kind] in closed.reason
    assert rig.arrival[0].counts().posted == 0


def test_a_flipped_bit_behind_the_prompt_is_no_fault(rigs: list[Rig]) -> None:
    rig = Rig(stages=(1,), options=LaneOptions(digest="all", timeout_s=30.0))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_alter"))  # last byte: last row of the last block
    handover = Handover(rig, "t", 2 * BLOCK + 1)
    handover.announce()
    handover.begin()
    handover.compute()
    assert rig.arrived.wait(1)[0].ok


def test_reordered_messages_are_still_complete(rigs: list[Rig]) -> None:
    rig = Rig(stages=(3,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_reorder"))
    handover = Handover(rig, "t", 3 * BLOCK)
    handover.announce()
    handover.begin()
    handover.compute()
    assert rig.arrived.wait(1)[0].ok
    assert handover.mismatches() == []


def test_an_end_that_overtakes_its_blocks_is_a_loss(rigs: list[Rig]) -> None:
    rig = Rig(stages=(1,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_reorder"))  # the only data message and the end change places
    handover = Handover(rig, "t", BLOCK)
    handover.announce()
    handover.begin()
    handover.compute()
    closed = rig.arrived.wait(1)[0]
    assert not closed.ok
    assert "incomplete" in closed.reason


def test_late_bytes_never_reach_the_next_owner(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,))
    rigs.append(rig)
    rig.switches.set(Fault(name="lane_stall"))
    late = Handover(rig, "late", 3 * BLOCK)
    late.announce()
    late.begin()
    late.compute()
    for lanes in rig.arrival:
        lanes.drop("late")
    assert rig.arrived.wait(1)[0].reason.startswith("aborted")
    assert rig.arrival[0].counts().posted == 0
    cache = rig.target_caches[0]
    for entry in cache.spec.entries:  # the blocks are another request's now, which writes them
        cache.tensor(entry.name).fill_(7.0)
    rig.switches.clear()
    assert rig.pushed.wait(1)[0].ok  # the bytes have passed the wire
    for entry in cache.spec.entries:
        assert torch.equal(cache.tensor(entry.name), torch.full_like(cache.tensor(entry.name), 7.0)), entry.name
    # the same transfer and blocks in another generation are served by the same lane
    again = Handover(rig, "late", 3 * BLOCK, generation=2)
    again.announce()
    again.begin()
    again.compute()
    assert rig.arrived.wait(2)[1].ok
    assert again.mismatches() == []


def test_a_drop_between_check_and_copy_leaves_the_blocks_alone(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    checking, is_dropped = threading.Event(), threading.Event()

    def slow_digest(block: torch.Tensor, num_tokens: int) -> int:
        checking.set()
        assert is_dropped.wait(20.0)
        return block_digest(block, num_tokens)

    monkeypatch.setattr("longcat_pd.kv_transfer.arrival.block_digest", slow_digest)
    rig = Rig(stages=(1,), options=LaneOptions(digest="all", timeout_s=30.0))
    rigs.append(rig)
    handover = Handover(rig, "t", 2 * BLOCK)
    handover.announce()
    handover.begin()
    handover.compute()
    assert checking.wait(60.0)
    rig.arrival[0].drop("t")
    is_dropped.set()
    assert rig.pushed.wait(1)[0].ok
    following = Handover(rig, "u", 2 * BLOCK, first_block_id=20)  # its end says that the lane is done with the dropped one
    following.announce()
    following.begin()
    following.compute()
    assert rig.arrived.wait(2)[1].ok
    for entry in rig.target_caches[0].spec.entries:
        assert not rig.target_caches[0].tensor(entry.name)[handover.target_blocks].any()


def test_bytes_may_be_quicker_than_their_announcement(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,))
    rigs.append(rig)
    handover = Handover(rig, "t", BLOCK)
    handover.begin()
    handover.compute()
    assert rig.arrived.all == []
    handover.announce()
    assert rig.arrived.wait(1)[0].ok
    assert handover.mismatches() == []


def test_what_was_never_announced_holds_up_nobody(rigs: list[Rig]) -> None:
    rig = Rig(stages=(1, 1), cp=2)
    rigs.append(rig)
    given_up = Handover(rig, "never", 6 * BLOCK)
    given_up.begin()
    for rank, lanes in enumerate(rig.push):
        lanes.push_layer("never", rank // 2, 0, 6, is_last_chunk=False)
    following = Handover(rig, "t", 6 * BLOCK)
    following.announce()
    following.begin()
    following.compute()
    assert rig.arrived.wait(1, AT_ONCE_S)[0].ok
    for lanes in rig.push:
        lanes.cancel("never")
    # all four sources say that they have given up; each of them is understood, and the next transfer is served at once
    again = Handover(rig, "again", 6 * BLOCK, first_block_id=20)
    again.announce()
    again.begin()
    again.compute()
    assert rig.arrived.wait(2, AT_ONCE_S)[1].ok
    assert again.mismatches() == []
    assert not rig.arrival[0]._early


def test_all_sources_end_a_dropped_transfer_and_the_next_is_served_at_once(rigs: list[Rig]) -> None:
    rig = Rig(stages=(1, 1), cp=2)
    rigs.append(rig)
    dropped = Handover(rig, "dropped", 6 * BLOCK)
    dropped.announce()
    dropped.begin()
    for rank, lanes in enumerate(rig.push):
        lanes.push_layer("dropped", rank // 2, 0, 6, is_last_chunk=False)
    rig.arrival[0].drop("dropped")
    for lanes in rig.push:
        lanes.cancel("dropped")
    following = Handover(rig, "t", 6 * BLOCK)
    following.announce()
    following.begin()
    following.compute()
    assert rig.arrived.wait(2, AT_ONCE_S)[1].ok
    assert following.mismatches() == []


def test_early_bytes_have_a_limit(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longcat_pd.kv_transfer.arrival._EARLY_BYTES", 1000)
    rig = Rig(stages=(4,))
    rigs.append(rig)
    handover = Handover(rig, "t", 4 * BLOCK)
    handover.begin()
    handover.compute()
    while not rig.arrival[0]._early:
        threading.Event().wait(0.01)
    assert sum(len(m.body) for m in next(iter(rig.arrival[0]._early.values()))) < 3000
    handover.announce()
    assert rig.arrived.wait(1)[0].ok
    assert handover.mismatches() == []


def test_cancel_frees_at_once_and_tells_the_other_side(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,), kvp=2)
    rigs.append(rig)
    handover = Handover(rig, "t", 4 * BLOCK)
    handover.announce()
    handover.begin()
    rig.push[0].push_layer("t", 0, 0, 4, is_last_chunk=False)
    rig.push[0].cancel("t")
    closed = rig.pushed.wait(1)[0]
    assert not closed.ok
    assert closed.reason.startswith("aborted")
    assert rig.push[0].counts().unsent == 0
    rig.push[0].push_layer("t", 0, 0, 4, is_last_chunk=True)  # a chunk that was already planned
    rig.push[0].cancel("t")
    for lanes in rig.arrival:
        lanes.drop("t")
    assert len(rig.arrived.wait(2)) == 2
    following = Handover(rig, "u", 4 * BLOCK, first_block_id=20)
    following.announce()
    following.begin()
    following.compute()
    assert [c.ok for c in rig.arrived.wait(4)[2:]] == [True, True]
    assert len(rig.pushed.wait(2)) == 2
    assert following.mismatches() == []


@pytest.mark.parametrize("num_layers", range(9))
def test_a_push_given_up_behind_any_layer_frees_both_sides(rigs: list[Rig], num_layers: int) -> None:
    """Two chunks of four layers each; D's blocks are another request's at once, and get nothing but that one's bytes."""
    rig = Rig(stages=(4,), kvp=2)
    rigs.append(rig)
    handover = Handover(rig, "t", 4 * BLOCK)
    handover.announce()
    handover.begin()
    for number in range(num_layers):
        first = 0 if number < 4 else 2
        rig.push[0].push_layer("t", number % 4, first, first + 2, is_last_chunk=first == 2)
    rig.push[0].cancel("t")
    for lanes in rig.arrival:
        lanes.drop("t")
    assert num_layers == 8 or not rig.pushed.wait(1)[0].ok
    assert rig.push[0].counts().unsent == 0
    following = Handover(rig, "u", 4 * BLOCK)
    following.announce()
    following.begin()
    following.compute()
    rig.pushed.wait(2)
    assert [c.ok for c in rig.arrived.wait(4) if c.transfer_id == "u"] == [True, True]
    assert following.mismatches() == []
    assert len(rig.pushed.all) == 2, "each push has one end"
    assert all(lanes.counts().posted == 0 for lanes in rig.arrival)


def test_blocks_are_in_quarantine_from_the_end_of_their_slot_until_no_lane_reads_them(
    rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(stages=(2,))
    rigs.append(rig)
    is_reading, may_go_on = threading.Event(), threading.Event()
    stage = _PushLane._stage

    def slow_stage(lane: _PushLane, item: Any) -> Any:
        is_reading.set()
        may_go_on.wait(20.0)
        return stage(lane, item)

    monkeypatch.setattr(_PushLane, "_stage", slow_stage)
    handover = Handover(rig, "t", 4 * BLOCK)
    handover.announce()
    handover.begin()
    pushing = rig.push[0]
    pushing.push_layer("t", 0, 0, 4, is_last_chunk=False)
    assert is_reading.wait(60.0)
    rig.network.lose_peers()
    pushing.cancel("t")  # a lane that gives up by itself does the same
    assert not pushing.counts().quarantined, "they are the sequence's, and live, as long as it has its slot"
    pushing.push_layer("t", 1, 0, 4, is_last_chunk=True)  # computed before the plan that cancels it
    assert pushing.counts().unsent == 0, "nothing of it leaves any more, its end neither"
    pushing.retire("t")
    assert len(pushing.counts().quarantined) == 4 and rig.pushed.all == []
    may_go_on.set()
    assert not rig.pushed.wait(1)[0].ok
    assert not pushing.counts().quarantined
    pushing.retire("t")


def test_a_push_given_up_between_copy_and_send_sends_nothing_or_its_end(
    rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(stages=(2,))
    rigs.append(rig)
    send = _PushLane._send

    def late_send(lane: _PushLane, transfer: Any, message: Any, **options: Any) -> None:
        lane._owner.cancel("t")
        send(lane, transfer, message, **options)

    monkeypatch.setattr(_PushLane, "_send", late_send)
    handover = Handover(rig, "t", 4 * BLOCK)  # never announced: the decode side has ended it before it told its ranks
    handover.begin()
    rig.push[0].push_layer("t", 0, 0, 4, is_last_chunk=False)
    assert not rig.pushed.wait(1)[0].ok
    monkeypatch.setattr(_PushLane, "_send", send)
    following = Handover(rig, "u", 4 * BLOCK, first_block_id=20)
    following.announce()
    following.begin()
    following.compute()
    assert rig.arrived.wait(1)[0].ok
    assert rig.arrival[0]._early == {}


def test_a_stopped_peer_ends_after_the_time_limit(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,), options=LaneOptions(timeout_s=1.5))
    rigs.append(rig)
    handover = Handover(rig, "t", BLOCK)
    handover.announce()
    handover.begin()
    rig.switches.set(Fault(name="lane_stall"))
    handover.compute()
    assert rig.pushed.wait(1)[0].reason.startswith("timed_out")
    rig.switches.clear()
    for lanes in rig.arrival:
        lanes.drop("t")
    following = Handover(rig, "u", BLOCK)
    following.announce()
    following.begin()
    following.compute()
    assert rig.arrived.wait(2)[1].ok
    assert following.mismatches() == []


def test_a_lost_peer_is_noticed_by_both_and_the_next_transfer_gets_new_lanes(rigs: list[Rig]) -> None:
    rig = Rig(stages=(2,), cp=2, kvp=2)
    rigs.append(rig)
    handover = Handover(rig, "t", 8 * BLOCK)
    handover.announce()
    handover.begin()
    under_way = threading.Semaphore(0)

    def watch(_header: Header) -> None:
        under_way.release()

    rig.on_message = watch
    for lanes in rig.push:
        lanes.push_layer("t", 0, 0, 4, is_last_chunk=False)
    assert all(under_way.acquire(timeout=60.0) for _ in rig.push)
    rig.network.lose_peers()
    for lanes in rig.push:
        lanes.push_layer("t", 1, 0, 4, is_last_chunk=False)
    assert all(not c.ok for c in rig.pushed.wait(2))
    for lanes in rig.arrival:
        lanes.drop("t")
    assert all(not c.ok for c in rig.arrived.wait(2))
    following = Handover(rig, "u", 8 * BLOCK, first_block_id=20)
    following.announce()
    following.begin()
    following.compute(chunk_blocks=3)
    assert [c.ok for c in rig.arrived.wait(4)[2:]] == [True, True]
    assert following.mismatches() == []


def test_an_idle_lane_that_broke_is_made_anew(rigs: list[Rig]) -> None:
    rig = Rig()
    rigs.append(rig)
    for name in ("a", "b", "c"):
        handover = Handover(rig, name, 2 * BLOCK)
        handover.announce()
        handover.begin()
        handover.compute()
        assert rig.arrived.wait(ord(name) - ord("a") + 1)[-1].ok
        for lanes in rig.arrival:
            lanes.adopt(name)
        rig.network.lose_peers()


def test_the_sample_carries_digests_for_some(rigs: list[Rig]) -> None:
    rig = Rig(stages=(3,), options=LaneOptions(digest="sample", timeout_s=30.0))
    rigs.append(rig)
    handover = Handover(rig, "t", 20 * BLOCK)
    handover.announce()
    handover.begin()
    handover.compute(chunk_blocks=4)
    assert rig.arrived.wait(1)[0].ok
    assert handover.mismatches() == []


def test_a_lane_has_the_configured_time_to_stand(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    connect = LoopbackCaller.open

    def open_lane(self: LoopbackCaller, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> Any:
        asked.append(timeout_s)
        return connect(self, target, address, timeout_s)

    monkeypatch.setattr(LoopbackCaller, "open", open_lane)
    rig = Rig(options=LaneOptions.of(TransferConfig(timeout_s=300.0, connect_timeout_s=120.0)))
    rigs.append(rig)
    handover = Handover(rig, "t", 1)
    handover.announce()
    handover.begin()
    handover.compute(chunk_blocks=1)
    assert all(closed.ok for closed in rig.pushed.wait(1)) and asked == [120.0]
