"""engine/inputs.py: whatever the split, the ranks together write every position once and every row sees its own past."""

import numpy as np
import pytest
import torch

from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import Segment
from longcat_pd.engine.slots import GroupSlots, Load, SlotState, Span
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.parallel.layout import CacheShard, KVAccess
from tests.slots import admit

BLOCK = 4
CPU = torch.device("cpu")
LENGTHS = (1, 3, 4, 5, 17, 30)
SHARDS: list[tuple[KVAccess, int]] = [
    ("local", 1),
    ("gathered", 2),
    ("gathered", 3),
    ("partitioned", 2),
    ("partitioned", 4),
]


class Group:
    """All ranks of one group, in this process: their slots, builders, and a cache that holds (sequence, position)."""

    def __init__(self, access: KVAccess, num_ranks: int, ngram_order: int = 0) -> None:
        self.access = access
        self.num_ranks = num_ranks
        self.pool = GroupPool(0, num_ranks, 64)
        self.builders = [
            InputsBuilder(CacheShard(access, num_ranks, rank), BLOCK, ngram_order, CPU) for rank in range(num_ranks)
        ]
        self.caches = np.full((num_ranks, 64 * BLOCK, 2), -1)
        self.slots: list[dict[int, SlotState]] = [{} for _ in range(num_ranks)]

    def admit(self, slot: int, ids: list[int], num_computed: int = 0) -> None:
        record = admit(self.pool, slot, ids, block_size=BLOCK, room=9, num_computed=num_computed)
        for slots in self.slots:
            slots[slot] = SlotState(record, self.num_ranks, BLOCK)

    def step(self, segments: list[Segment]) -> list[ForwardInputs]:
        """Builds every rank's batch and writes what its model would write."""
        batches = []
        for rank, slots in enumerate(self.slots):
            spans = [Span.of(segment, slots[segment.slot]) for segment in segments]
            inputs = self.builders[rank].build(spans)
            for row, (seq, position) in enumerate(zip(inputs.row_seqs.tolist(), inputs.positions.tolist(), strict=True)):
                slot = int(inputs.slot_mapping[row])
                assert self.access == "gathered" or slot >= BLOCK or self.num_ranks > 1
                self.caches[rank, slot] = (segments[seq].slot, position)
            batches.append(inputs)
            for span in spans:
                span.state.num_computed = span.end
        return batches

    def visible(self, rank: int, inputs: ForwardInputs) -> np.ndarray:
        """The tokens that the block tables of this rank speak of: [blocks, BLOCK, 2]."""
        shards = self.caches.reshape(self.num_ranks, -1, BLOCK, 2)
        if inputs.gather_blocks is None:
            return shards[rank]
        return np.concatenate([shards[r][b.gather_blocks.numpy()] for r, b in enumerate(self.last)])

    def check(self, batches: list[ForwardInputs], segments: list[Segment]) -> None:
        self.last = batches
        for rank, inputs in enumerate(batches):
            cache = self.visible(rank, inputs)
            for seq, segment in enumerate(segments):
                seen = []
                table, starts = inputs.block_tables[seq].tolist(), inputs.block_starts[seq].tolist()
                for column, (block, start) in enumerate(zip(table, starts, strict=True)):
                    for offset in range(BLOCK):
                        if start + offset < inputs.kv_lens[seq]:
                            assert start // BLOCK // inputs.table_stride == column
                            assert cache[block, offset].tolist() == [segment.slot, start + offset]
                            seen.append(start + offset)
                if self.access != "partitioned":
                    assert seen == list(range(inputs.kv_lens[seq]))
                else:
                    self.shares.setdefault(segment.slot, []).extend(seen)
        if self.access == "partitioned":
            for seq, segment in enumerate(segments):
                assert sorted(self.shares.pop(segment.slot)) == list(range(batches[0].kv_lens[seq]))

    shares: dict[int, list[int]] = {}  # noqa: RUF012 - emptied by every check


def prompt(length: int) -> list[int]:
    return [(7 * i + length) % 50 for i in range(length)]


@pytest.mark.parametrize(("access", "num_ranks"), SHARDS)
def test_chunks(access: KVAccess, num_ranks: int) -> None:
    group = Group(access, num_ranks)
    for slot, length in enumerate(LENGTHS):
        group.admit(slot, prompt(length))
    for start in range(0, max(LENGTHS), 8):
        segments = [
            Segment(slot=slot, start=start, num_tokens=min(8, length - start), is_last=start + 8 >= length)
            for slot, length in enumerate(LENGTHS)
            if start < length
        ]
        batches = group.step(segments)
        rows = [(s, p) for b in batches for s, p in zip(b.row_seqs.tolist(), b.positions.tolist(), strict=True)]
        expected = [(i, p) for i, s in enumerate(segments) for p in range(s.start, s.start + s.num_tokens)]
        assert sorted(rows) == sorted(expected * (num_ranks if access == "partitioned" else 1))
        group.check(batches, segments)


@pytest.mark.parametrize(("access", "num_ranks"), SHARDS)
def test_output_rows_lie_on_one_rank_or_on_all(access: KVAccess, num_ranks: int) -> None:
    group = Group(access, num_ranks)
    group.admit(0, prompt(17))
    group.admit(1, prompt(6))
    group.admit(2, prompt(20))
    batches = group.step(
        [
            Segment(slot=0, start=0, num_tokens=17, is_last=True),
            Segment(slot=1, start=0, num_tokens=4, is_last=False),
            Segment(slot=2, start=0, num_tokens=20, is_last=True),
        ]
    )
    found = [[], []]
    for inputs in batches:
        assert inputs.output_rows is not None and inputs.output_rows.shape == (2,)
        for place, row in enumerate(inputs.output_rows.tolist()):
            if row >= 0:
                found[place].append((int(inputs.row_seqs[row]), int(inputs.positions[row])))
    copies = num_ranks if access == "partitioned" else 1
    assert found == [[(0, 16)] * copies, [(2, 19)] * copies]


def test_ngram_windows_look_back_over_chunks_but_not_over_sequences() -> None:
    group = Group("gathered", 2, ngram_order=3)
    group.admit(0, [11, 12, 13, 14, 15, 16])
    group.admit(1, [21, 22])
    first = [Segment(slot=0, start=0, num_tokens=4, is_last=False), Segment(slot=1, start=0, num_tokens=2, is_last=True)]
    second = [Segment(slot=0, start=4, num_tokens=2, is_last=True)]
    windows = {}
    for segments in (first, second):
        for inputs in group.step(segments):
            assert inputs.ngram_windows is not None
            for row, window in enumerate(inputs.ngram_windows.tolist()):
                slot = segments[int(inputs.row_seqs[row])].slot
                windows[slot, int(inputs.positions[row])] = window
                assert window[0] == int(inputs.token_ids[row])
    assert windows[0, 0] == [11, -1, -1]
    assert windows[0, 1] == [12, 11, -1]
    assert windows[0, 4] == [15, 14, 13]
    assert windows[1, 0] == [21, -1, -1]


def test_a_rank_without_rows_still_contributes() -> None:
    group = Group("gathered", 2)
    group.admit(0, prompt(3))
    segments = [Segment(slot=0, start=0, num_tokens=3, is_last=True)]
    batches = group.step(segments)
    group.check(batches, segments)
    assert sorted(len(inputs.token_ids) for inputs in batches) == [0, 3]
    assert all(inputs.gather_blocks is not None and inputs.gather_blocks.shape == (1,) for inputs in batches)
    assert all(len(inputs.cu_seqlens_q) == 2 for inputs in batches)


@pytest.mark.parametrize(("access", "num_ranks"), [("local", 1), ("partitioned", 2)])
def test_a_group_without_rows_has_an_empty_batch(access: KVAccess, num_ranks: int) -> None:
    builder = InputsBuilder(CacheShard(access, num_ranks, 0), BLOCK, 3, CPU, has_draft=True, group_size=2)
    inputs = builder.build([], Load(rows=(5, 0), outputs=(1, 0)))
    for tensor in (inputs.token_ids, inputs.positions, inputs.row_seqs, inputs.slot_mapping, inputs.next_token_ids):
        assert tensor is not None and tensor.shape == (0,) and tensor.dtype == torch.int64
    assert inputs.ngram_windows is not None and inputs.ngram_windows.shape == (0, 3)
    assert inputs.output_rows is not None and inputs.output_rows.shape == (0,)
    assert inputs.block_tables.shape == inputs.block_starts.shape == (0, 1)
    assert (inputs.cu_seqlens_q, inputs.kv_lens, inputs.gather_blocks) == ((0,), (), None)
    assert (inputs.rows, inputs.outputs) == (Rows(0, 3), Rows(0, 1))


def test_a_rank_hands_in_what_the_fullest_group_needs() -> None:
    group = Group("local", 1)
    group.admit(4, prompt(9))
    segments = [
        Segment(slot=0, start=0, num_tokens=12, is_last=False),
        Segment(slot=4, start=0, num_tokens=9, is_last=True),
        Segment(slot=3, start=4, num_tokens=5, is_last=False),
    ]
    slots = GroupSlots(num_slots=4, num_groups=2, own=1)
    spans = [Span.of(s, group.slots[0][s.slot]) for s in segments if slots.is_own(s.slot)]
    load = slots.load(segments)
    assert load == Load(rows=(17, 9), outputs=(0, 1))
    builder = InputsBuilder(CacheShard("local", 1, 0), BLOCK, 0, CPU, group_size=4, is_split=True)
    inputs = builder.build(spans, load)
    assert (inputs.rows, inputs.outputs) == (Rows(9, 5, is_split=True), Rows(1, 1))
    alone = builder.build(spans)
    assert (alone.rows, alone.outputs) == (Rows(9, 3, is_split=True), Rows(1, 1))


def test_slots_are_numbered_group_after_group() -> None:
    slots = GroupSlots(num_slots=4, num_groups=3, own=1)
    assert [slot for slot in range(12) if slots.is_own(slot)] == [4, 5, 6, 7]
    assert [slots.row(slot) for slot in range(4, 8)] == [0, 1, 2, 3]
    windows = [Segment(slot=slot, start=-1, num_tokens=1, is_last=True) for slot in (0, 4, 8, 9, 11)]
    assert slots.most_seqs(windows) == 3
    for wrong in (3, 8):
        with pytest.raises(AssertionError, match=f"slot {wrong} is not of group 1"):
            slots.row(wrong)
    with pytest.raises(AssertionError, match="slot 12"):
        slots.is_own(12)


@pytest.mark.parametrize(("start", "num_tokens", "is_last"), [(4, 4, False), (0, 9, True), (0, 8, False), (0, 4, True)])
def test_segments_that_do_not_fit_fail(start: int, num_tokens: int, is_last: bool) -> None:
    group = Group("local", 1)
    group.admit(0, prompt(8))
    with pytest.raises(AssertionError, match="slot 0"):
        group.step([Segment(slot=0, start=start, num_tokens=num_tokens, is_last=is_last)])
