"""engine/speculative.py and slots.py: which draws stand, what a slot knows afterwards, and what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.engine.accounting import Acceptance
from longcat_pd.engine.plan import Segment, SlotOutput
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.engine.speculative import settled, unpacked
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.metrics import Metrics
from tests.slots import GREEDY, admit
from tests.unit.test_runner import PUSH

BLOCK = 4
OPS = kernels.load("cpu")
WINDOW = Segment(slot=0, start=-1, num_tokens=4, is_last=True)


def state_of(ids: list[int], *, pushed: bool = False) -> SlotState:
    record = admit(
        GroupPool(0, 1, 16),
        0,
        ids,
        block_size=BLOCK,
        room=9,
        num_computed=len(ids) - 1,
        sampling=replace(GREEDY, num_logprobs=1),
        push=PUSH if pushed else None,
    )
    return SlotState(record, 1, BLOCK)


def logits_for(*ids: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), 50).float()


@pytest.mark.parametrize(
    ("drafts", "stands"),
    [([30, 31, 32], 4), ([30, 31, 9], 3), ([30, 9, 32], 2), ([9, 31, 32], 1), ([9, 9, 9], 1)],
)
def test_a_run_stands_up_to_the_first_wrong_draft(drafts: list[int], stands: int) -> None:
    state = state_of([5, 6, 7])
    span = Span.of(WINDOW, state)
    for draft in drafts:
        state.draft(draft)
    state.num_computed = span.end
    final = torch.arange(8.0).view(4, 2)
    (out,) = settled(final, logits_for(30, 31, 32, 33), [span], ops=OPS, has_draft=True)
    assert out.token_ids == (30, 31, 32, 33)[:stands] and out.num_drafts == 3
    assert len(out.logprobs) == len(out.top) == stands and out.draft_state is None
    assert state.token_ids[: state.num_tokens].tolist() == [5, 6, 7, *out.token_ids]
    assert (state.num_computed, state.num_drafts) == (2 + stands, 0)
    assert state.undrafted is not None and torch.equal(state.undrafted, final[:stands])
    following = Span.of(WINDOW, state)
    assert (following.start, following.end) == (2 + stands, 6 + stands)


def test_a_window_begins_with_the_newest_token_only() -> None:
    state = state_of([5, 6, 7])
    state.append(8)
    with pytest.raises(AssertionError, match="last segment ends at 3"):
        Span.of(WINDOW, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_for_drafts_travels_exactly(dtype: torch.dtype) -> None:
    state = state_of([5, 6, 7], pushed=True)
    state.num_computed = 3
    final = torch.randn(1, 6).to(dtype)
    (out,) = settled(final, logits_for(30), [Span(state, 0, 3, 1)], ops=OPS, has_draft=True)
    assert out.draft_state is not None
    found = unpacked(out.draft_state, torch.empty(0, dtype=dtype))
    assert found.dtype == dtype and torch.equal(found, final)


def test_a_window_behind_the_end_of_an_answer_stays_in_the_reservation() -> None:
    """The driver made it before it knew of the end."""
    state = state_of([5, 6, 7])
    room = len(state.blocks) * BLOCK
    assert room == 12
    state.append(*range(10, 16))
    state.num_computed = 8
    assert (Span.of(WINDOW, state).end, Span.of(WINDOW, state).num_drafts) == (room, 3)
    state.append(16, 17)
    state.num_computed = 10
    assert (Span.of(WINDOW, state).end, Span.of(WINDOW, state).num_drafts) == (room, 1)
    state.append(18)
    state.num_computed = 11
    assert Span.of(WINDOW, state).num_drafts == 0
    state.append(9)
    assert state.token_ids[room] == 9


def test_acceptance_is_a_mean_over_rows_and_counts_go_on() -> None:
    metrics = Metrics(role="decode", instance="d0")
    acceptance = Acceptance(metrics.engine)
    assert acceptance.mean() is None
    rows = [SlotOutput(slot=s, token_ids=tuple(range(n)), num_drafts=3) for s, n in enumerate((4, 1, 2))]
    acceptance.add(rows)
    assert acceptance.mean() == pytest.approx(7 / 3)
    acceptance.restart()
    assert acceptance.mean() is None
    text = metrics.render().decode()
    assert 'longcat_pd_draft_tokens_total{instance="d0",role="decode"} 9.0' in text
    assert 'longcat_pd_accepted_tokens_total{instance="d0",role="decode"} 4.0' in text
