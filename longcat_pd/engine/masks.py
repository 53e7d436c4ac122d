"""The grammars of the sequences in some slots, as the decode step sees them: masks over the ids that may come next.

Which tokens an answer has is known on the device only; a grammar is followed on the host. So the step calls the host in
its middle, where its drafts are made and their logits are not: one node of a graph. What the answers came to is told
behind the step. A graph that cannot call anybody is cut there. Knows slots and masks; the grammars are ``grammar.py``'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from longcat_pd.engine.grammar import Matcher, Vocabulary
from longcat_pd.kernels.node import node

# By number: an operator is given tensors only, and a graph outlives the process that compiled it, so the number that it
# finds its table with is a tensor too.
_TABLES: WeakValueDictionary[int, GrammarMasks] = WeakValueDictionary()
_NUMBERS = itertools.count()

Masks = tuple[Tensor, Tensor]  # [T, words] int32, a bit for each id, the lowest first; and which of them bind, [T] bool


class GrammarMasks(nn.Module):
    """The matchers of some slots. Letters: B sequences, W rows of each, T = B * W.

    Args:
        vocabulary: None where nothing can be bound to a grammar.
    """

    def __init__(self, vocabulary: Vocabulary | None, device: torch.device) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._matchers: dict[int, Matcher] = {}  # of the slots that are bound
        number = next(_NUMBERS)
        self.number = nn.Buffer(torch.tensor([number], device=device), persistent=False)
        self.num_words = vocabulary.num_words if vocabulary is not None else 1
        _TABLES[number] = self

    def seat(self, slot: int, grammar: str, said: Sequence[int]) -> None:
        """Bind the slot to a grammar, behind what its sequence has generated; "" frees it."""
        self._matchers.pop(slot, None)
        if grammar:
            assert self._vocabulary is not None, "a grammar at a rank without a tokenizer"
            self._matchers[slot] = self._vocabulary.begin(grammar)
            self._matchers[slot].advance(said)

    def leave(self, slot: int) -> None:
        """Its sequence is gone."""
        self._matchers.pop(slot, None)

    def advance(self, slot: int, token_ids: Sequence[int]) -> str:
        """These tokens belong to the answer now; why its grammar cannot be kept, if it cannot."""
        matcher = self._matchers.get(slot)
        if matcher is None:
            return ""
        matcher.advance(token_ids)
        return matcher.fault

    def forward(self, slots: Tensor, drafts: Tensor) -> Masks:
        """``slots`` [B], ``drafts`` [B, W - 1] -> masks of their rows; those that do not bind hold anything."""
        return _grammar_masks(self.number, slots, drafts, self.num_words)

    def nobody_bound(self, slots: Tensor, drafts: Tensor) -> Masks:
        """The same for slots of which none is bound, without calling the host."""
        num_rows = slots.shape[0] * (drafts.shape[1] + 1)
        masks = slots.new_zeros((num_rows, self.num_words), dtype=torch.int32)
        return masks, slots.new_zeros((num_rows,), dtype=torch.bool)

    def fill(self, slots: Sequence[int], drafts: Sequence[Sequence[int]], masks: Tensor, is_bound: Tensor) -> None:
        """Rows of sequences that are bound. ``masks`` [B, W, words] and ``is_bound`` [B, W] on the host."""
        for place, slot in enumerate(slots):
            if slot in self._matchers:
                self._matchers[slot].fill(masks[place].numpy(), drafts[place])
                is_bound[place] = True

    def binds(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots is bound."""
        return not self._matchers.keys().isdisjoint(slots)

    @property
    def has_any(self) -> bool:
        """Whether any slot is bound."""
        return bool(self._matchers)


def _grammar_masks_shapes(number: Tensor, slots: Tensor, drafts: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    num_rows = slots.shape[0] * (drafts.shape[1] + 1)
    return (
        slots.new_empty((num_rows, num_words), dtype=torch.int32),
        slots.new_empty((num_rows,), dtype=torch.bool),
    )


@node(_grammar_masks_shapes)
def _grammar_masks(number: Tensor, slots: Tensor, drafts: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    table = _TABLES[int(number)]
    window = drafts.shape[1] + 1
    masks = torch.empty((len(slots), window, num_words), dtype=torch.int32)
    is_bound = torch.zeros((len(slots), window), dtype=torch.bool)
    if table.has_any:
        table.fill(slots.tolist(), drafts.tolist(), masks, is_bound)
    return masks.flatten(0, 1).to(slots.device), is_bound.flatten().to(slots.device)
