"""The grammars of some slots as a step sees them: who is bound, to what, and for how long."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from longcat_pd.engine import masks
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.masks import GrammarMasks
from longcat_pd.tiny.tokenizer import train

TOKENIZER, VOCAB, EOS = train(300), 310, 2
CPU = torch.device("cpu")
A, B = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
NO_DRAFTS = torch.empty((2, 0), dtype=torch.int64)


def allowed(mask: Tensor) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


@pytest.fixture
def table() -> GrammarMasks:
    return GrammarMasks(Vocabulary(TOKENIZER.to_str(), VOCAB, [EOS]), CPU)


def test_rows_of_slots_in_any_order(table: GrammarMasks) -> None:
    table.seat(5, 'start: "aaaa"', [])
    found, is_bound = table(torch.tensor([0, 5, 3]), torch.tensor([[A, A], [A, B], [B, B]]))
    assert is_bound.tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert [A in allowed(found[row]) for row in (3, 4)] == [True, True] and B not in allowed(found[3])
    assert found.shape == (9, -(-VOCAB // 32)) and found.dtype == torch.int32


def test_a_slot_has_the_grammar_of_its_newest_tenant(table: GrammarMasks) -> None:
    slots = torch.tensor([1, 0])
    table.seat(1, 'start: "ab"', [A])
    found, is_bound = table(slots, NO_DRAFTS)
    assert is_bound.tolist() == [True, False] and B in allowed(found[0]) and A not in allowed(found[0])
    assert table.advance(1, [B]) == "" and table.advance(0, [B]) == ""
    found, _ = table(slots, NO_DRAFTS)
    assert allowed(found[0]) == {EOS}
    table.seat(1, "", [])
    assert not table.has_any and not table(slots, NO_DRAFTS)[1].any()
    table.seat(1, 'start: "ab"', [])
    table.leave(1)
    table.leave(0)
    assert not table.has_any


def test_a_fault_is_told_once_the_tokens_are_there(table: GrammarMasks) -> None:
    table.seat(0, 'start: "a"', [])
    assert "doesn't satisfy" in table.advance(0, [B])


def test_tables_do_not_meet_and_go_when_nobody_has_them(table: GrammarMasks) -> None:
    other = GrammarMasks(Vocabulary(TOKENIZER.to_str(), VOCAB, [EOS]), CPU)
    table.seat(0, 'start: "a"', [])
    assert not other(torch.tensor([0, 1]), NO_DRAFTS)[1].any()
    number = int(other.number)
    assert number in masks._TABLES
    del other
    gc.collect()
    assert number not in masks._TABLES


def test_without_a_tokenizer_nobody_is_bound() -> None:
    table = GrammarMasks(None, CPU)
    table.seat(0, "", [])
    found, is_bound = table(torch.tensor([0, 1]), NO_DRAFTS)
    assert not is_bound.any() and found.shape == (2, 1)
    with pytest.raises(AssertionError, match="without a tokenizer"):
        table.seat(0, "start:", [])
