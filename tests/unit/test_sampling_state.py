"""engine/sampling_state.py: what each row of a window sees of the prompt, the answer and the drafts, and what stays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.request import MAX_BIAS
from longcat_pd.engine.sampling_state import SamplingState
from longcat_pd.engine.slots import SlotState
from longcat_pd.kernels.drawing_ops import ENDS, IN_PROMPT
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.sizing.steps import BIAS_BYTES, SLOT_BYTES
from tests.slots import GREEDY, admit

VOCAB, PADDING = 12, 3
ALL = replace(
    GREEDY,
    min_p=0.25,
    min_tokens=3,
    ends=(0, 5),
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias=((7, 2.0), (1, -100.0)),
)


def known(ids: list[int], rule: SlotSampling, prompt_len: int) -> SlotState:
    record = admit(GroupPool(0, 1, 40), 0, ids, block_size=4, room=8, num_computed=len(ids) - 1, sampling=rule)
    return SlotState(replace(record, prompt_len=prompt_len), 1, 4)


@pytest.fixture
def state() -> SamplingState:
    """Slot 1 asks for everything: prompt 5 5 9, answer 9 4; slot 2 for nothing."""
    made = SamplingState(PADDING + 1, VOCAB, torch.device("cpu"))
    made.seat(1, known([5, 5, 9, 9, 4], ALL, 3))
    made.seat(2, known([1, 2], GREEDY, 1))
    return made


def test_what_is_known_of_a_sequence(state: SamplingState) -> None:
    assert state.counts[1].nonzero().flatten().tolist() == [4, 9] and int(state.counts[1].sum()) == 2
    flags = dict(enumerate(state.flags[1].tolist()))
    assert {token: bits for token, bits in flags.items() if bits} == {0: ENDS, 5: ENDS | IN_PROMPT, 9: IN_PROMPT}
    biased = {i: b for i, b in zip(state.bias_ids[1].tolist(), state.bias[1].tolist(), strict=True) if b}
    assert biased == {7: 2.0, 1: -100.0}


def test_what_was_said_elsewhere_is_of_the_answer(state: SamplingState) -> None:
    """The same sequence: its answer has begun in a prompt that the ranks computed as one."""
    state.seat(0, known([5, 5, 9, 9, 4], replace(ALL, num_said=1, min_tokens=2), 4))
    assert torch.equal(state.counts[0], state.counts[1]) and torch.equal(state.flags[0], state.flags[1])
    assert state.early_until[0] == state.early_until[1] == 6


def test_a_row_sees_the_drafts_before_it(state: SamplingState) -> None:
    slots, drafts = torch.tensor([2, 1]), torch.tensor([[3, 3], [6, 8]])
    positions = torch.tensor([[2, 3, 4], [5, 6, 7]])
    rows = state.rows(slots, positions, drafts, state.grammars.nobody_bound(slots, drafts))
    edits = rows.edits
    assert edits is not None
    assert edits.seqs.tolist() == [2, 2, 2, 1, 1, 1]
    assert edits.drafts.tolist() == [[-1, -1], [3, -1], [3, 3], [-1, -1], [6, -1], [6, 8]]
    assert edits.is_early.tolist() == [False, False, False, True, False, False]  # the third token stands at position 5
    assert edits.presence.tolist() == [0.0] * 3 + [0.5] * 3 and edits.repetition.tolist() == [1.0] * 3 + [1.5] * 3
    assert edits.frequency.tolist() == [0.0] * 3 + [-0.5] * 3
    assert rows.floor.tolist() == [-math.inf] * 3 + [math.log(0.25)] * 3
    assert int(edits.counts.sum()) == 2, "drafts are not counted"


def test_rows_of_slots_that_ask_for_nothing_have_no_edits(state: SamplingState) -> None:
    slots = torch.tensor([2])
    assert state.rows(slots, torch.tensor([[2]]), torch.empty((1, 0), dtype=torch.int64), None).edits is None


def test_only_what_stands_is_counted(state: SamplingState) -> None:
    before = state.counts.clone()
    tokens = torch.tensor([[4, 4, 6], [1, 1, 1], [11, 2, 2]])
    state.count(torch.tensor([1, PADDING, 0]), tokens, torch.tensor([2, 0, 1]), kernels.load("cpu").store)
    grown = (state.counts - before).nonzero().tolist()
    assert grown == [[0, 11], [1, 4]] and int(state.counts[1, 4]) == 3


def test_a_slot_forgets_its_former_tenant(state: SamplingState) -> None:
    state.seat(1, known([2, 3], replace(ALL, logit_bias=((3, 1.0),), ends=(4,), min_p=0.0, min_tokens=1), 1))
    assert state.counts[1].nonzero().flatten().tolist() == [3]
    assert state.flags[1].nonzero().flatten().tolist() == [2, 4]
    assert state.bias[1].nonzero().flatten().tolist() == [0] and int(state.bias_ids[1, 0]) == 3
    state.seat(1, known([2, 3], GREEDY, 1))
    slots = torch.tensor([1])
    no_drafts = torch.empty((1, 0), dtype=torch.int64)
    edits = state.rows(slots, torch.tensor([[0]]), no_drafts, state.grammars.nobody_bound(slots, no_drafts)).edits
    assert edits is not None and not edits.bias[1].any() and not edits.is_early.any()
    assert [float(x) for x in (edits.frequency, edits.presence, edits.repetition)] == [0.0, 0.0, 1.0]


def test_the_plan_counts_the_tables() -> None:
    """Beside them there are a few numbers for each slot."""
    tables = SamplingState(3, 4096, torch.device("cpu")).buffers()
    total = sum(table.untyped_storage().nbytes() for table in tables)
    assert 0 <= total - 3 * (SLOT_BYTES * 4096 + BIAS_BYTES) <= 3 * 100
    assert BIAS_BYTES == 12 * MAX_BIAS
