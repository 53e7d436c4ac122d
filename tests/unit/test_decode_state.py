"""engine/decode_state.py: where windows stand, what they write and see on each rank of a group, what they look back to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longcat_pd.engine.decode_state import DecodeShape, DecodeState, put
from longcat_pd.engine.inputs import NOWHERE
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.slots import SlotState
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.layout import CacheShard
from tests.slots import admit

BLOCK, ROOM = 4, 30
CPU = torch.device("cpu")
LENGTHS = (1, 3, 4, 5, 17, 30)


def shard(num_ranks: int, rank: int) -> CacheShard:
    return CacheShard("local" if num_ranks == 1 else "partitioned", num_ranks, rank)


class Group:
    """The state of every rank of one group, with sequences of many lengths."""

    def __init__(self, num_ranks: int, *, ngram_order: int = 0, num_drafts: int = 3) -> None:
        self.pool = GroupPool(0, num_ranks, 128)
        shape = DecodeShape(
            num_slots=len(LENGTHS),
            num_columns=-(-16 // num_ranks),
            block_size=BLOCK,
            num_drafts=num_drafts,
            ngram_order=ngram_order,
            hidden_size=2,
            vocab_size=60,
        )
        self.ranks = [DecodeState(shape, shard(num_ranks, r), dtype=torch.float32, device=CPU) for r in range(num_ranks)]
        self.ids = [[(7 * i + length) % 50 for i in range(length + 1)] for length in LENGTHS]
        rule = SlotSampling(temperature=0.5, top_p=0.9, top_k=7, seed=-3, choice=1, num_logprobs=None)
        self.admits = [
            admit(self.pool, slot, ids, block_size=BLOCK, room=ROOM - 2, num_computed=len(ids) - 1, sampling=rule)
            for slot, ids in enumerate(self.ids)
        ]
        self.states = [SlotState(record, num_ranks, BLOCK) for record in self.admits]
        for state in self.ranks:
            for slot, known in enumerate(self.states):
                state.seat(slot, known, torch.full((1, 2), float(slot)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_row_is_written_once_and_sees_its_own_past(num_ranks: int) -> None:
    group = Group(num_ranks)
    slots = torch.tensor([4, 0, 5, 2, 1, 3])
    written: list[set[tuple[int, int]]] = [set() for _ in slots]
    for rank, state in enumerate(group.ranks):
        newest = state.num_tokens[slots] - 1
        positions = newest.unsqueeze(1) + torch.arange(4)
        inputs = state.inputs(slots, positions, lengths=tuple((newest + 4).tolist()), token_ids=positions)
        assert inputs.positions.tolist() == positions.flatten().tolist()
        for row, (seq, position) in enumerate(zip(inputs.row_seqs.tolist(), inputs.positions.tolist(), strict=True)):
            known = group.states[int(slots[seq])]
            block, offset = divmod(int(inputs.slot_mapping[row]), BLOCK)
            assert offset == position % BLOCK
            if block:
                assert known.block_ranks[position // BLOCK] == rank and known.blocks[position // BLOCK] == block
                written[seq].add((position, rank))
        for seq, slot in enumerate(slots.tolist()):
            held = group.states[slot].held_by(rank)
            count = len(held)
            assert inputs.block_tables[seq, :count].tolist() == group.states[slot].blocks[held].tolist()
            assert inputs.block_starts[seq, :count].tolist() == (held * BLOCK).tolist()
            assert (inputs.block_starts[seq, count:] == NOWHERE).all()
    for seq, slot in enumerate(slots.tolist()):
        assert sorted(position for position, _ in written[seq]) == [LENGTHS[slot] + i for i in range(4)]


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_ngram_windows_are_those_of_all_ids(num_drafts: int) -> None:
    group = Group(1, ngram_order=3, num_drafts=num_drafts)
    state = group.ranks[0]
    slots = torch.arange(len(LENGTHS))
    drafts = torch.full((len(LENGTHS), num_drafts), 49) - torch.arange(num_drafts)
    windows = state.windows(torch.cat((state.recent[slots], drafts), 1)).view(len(LENGTHS), 1 + num_drafts, 3)
    for slot, ids in enumerate(group.ids):
        line = ids + drafts[slot].tolist()
        for row in range(1 + num_drafts):
            back = [len(ids) - 1 + row - j for j in range(3)]
            assert windows[slot, row].tolist() == [line[place] if place >= 0 else -1 for place in back]


def test_rows_that_are_not_real_write_into_block_0() -> None:
    state = Group(2).ranks[1]
    positions = torch.tensor([[16, 17], [2, 3]])
    real = torch.tensor([[True, False], [False, False]])
    inputs = state.inputs(torch.tensor([4, 2]), positions, lengths=(20, 8), token_ids=positions, is_real=real)
    assert (inputs.slot_mapping[1:] // BLOCK == 0).all()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_lies_behind_the_reservation_is_written_to_block_0_and_stays_inside_the_tables(num_ranks: int) -> None:
    group = Group(num_ranks)
    for state in group.ranks:
        positions = torch.tensor([[state.capacity - 1, state.capacity, state.capacity + 9], [58, 59, 60]])
        inputs = state.inputs(torch.tensor([5, 0]), positions, lengths=(), token_ids=positions)
        assert inputs.positions.max() < state.capacity
        assert (inputs.slot_mapping[1:3] // BLOCK == 0).all()
        assert (inputs.slot_mapping[3:] // BLOCK == 0).all()  # of a sequence that has no such blocks
        assert inputs.is_whole and inputs.kv_lens == (state.capacity,) * 2


def test_how_a_slot_is_sampled_is_kept_for_each_row() -> None:
    places = torch.zeros((2, 4), dtype=torch.int64)
    slots = torch.tensor([1, 3])
    sampling = Group(1).ranks[0].sampling
    rows = sampling.rows(slots, places, places[:, 1:], sampling.grammars(slots, places[:, 1:]))
    assert rows.temperature.tolist() == [0.5] * 8 and rows.top_p.tolist() == [0.9] * 8
    assert rows.top_k.tolist() == [7] * 8 and rows.seed.tolist() == [-3] * 8 and rows.choice.tolist() == [1] * 8


def test_a_slot_forgets_its_former_tenant() -> None:
    group = Group(1)
    state = group.ranks[0]
    state.seat(4, group.states[0], None)
    held = len(group.states[0].blocks)
    assert (state.blocks[4, held:] == 0).all() and (state.starts[4, held:] == NOWHERE).all()
    assert state.recent[4].tolist() == [-1, -1, *group.ids[0]] and int(state.num_tokens[4]) == 2


def test_put_writes_these_rows_only() -> None:
    rows = torch.arange(12).view(4, 3)
    put(rows, torch.tensor([2, 0]), torch.tensor([[9, 9, 9], [8, 8, 8]]))
    assert rows.tolist() == [[8, 8, 8], [3, 4, 5], [9, 9, 9], [9, 10, 11]]


def test_who_asks_for_something_is_known_to_the_host() -> None:
    group = Group(1)
    state, pool = group.ranks[0], GroupPool(0, 1, 128)
    assert not state.asks(range(len(LENGTHS)))
    rule = replace(group.admits[0].sampling, min_tokens=1)
    record = admit(pool, 2, group.ids[2], block_size=BLOCK, room=5, num_computed=len(group.ids[2]) - 1, sampling=rule)
    state.seat(2, SlotState(record, 1, BLOCK), torch.zeros(1, 2))
    assert state.asks([0, 2]) and not state.asks([0, 1])
    state.seat(2, group.states[2], torch.zeros(1, 2))
    assert not state.asks([2])
    state.seat(2, SlotState(record, 1, BLOCK), torch.zeros(1, 2))
    state.leave(2)
    assert not state.asks([2])
