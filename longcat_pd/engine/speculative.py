"""Drafts: how the next tokens are proposed on the device, and which of the proposed ones stand.

A draft stands exactly if it is the token that is drawn at its place, so no text tells whether there were drafts. Knows the
state of slots, no ranks: all ranks of a group draft and draw alike, from equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.mtp import Chosen


@dataclass(frozen=True, slots=True)
class Seen:
    """What drafts are made from: the slots [B], the position of each newest token [B], and the tokens up to it [B, R].

    ``lengths``: see ``DecodeState.inputs``.
    """

    slots: Tensor
    newest: Tensor
    recent: Tensor
    lengths: tuple[int, ...]


class DraftSource(Protocol):
    """Where drafts come from. Part of the decode step: device tensors of fixed shape only."""

    def __call__(self, seen: Seen) -> Tensor:
        """Guesses at the tokens behind the newest of each sequence, [B, drafts]."""
        ...

    def catch_up(self, seen: Seen) -> None:
        """A step is over, and its state is written: what it made certain is taken in, but for the newest token."""
        ...


MakeDrafts = Callable[[CausalLM, DecodeState], DraftSource]


class Guess(NamedTuple):
    """Between two rounds: the newest tokens [B, R] and the drafts so far behind them, and what the next draft is made of:
    a hidden state [B, hidden], and the keys that all rounds attend to, if there are such."""

    line: Tensor
    hidden: Tensor
    keys: Tensor | None = None


class ModelDrafts(nn.Module):
    """Drafts of the checkpoint's own draft layer: always its arg-max.

    When a step is over the layer is given the positions that have become certain, with the target's hidden states; what it
    cached for drafts is overwritten by that. The newest of them yields the first draft, and every draft the next one.
    """

    def __init__(self, model: CausalLM, state: DecodeState) -> None:
        super().__init__()
        self._model = model
        self._state = state

    def forward(self, seen: Seen) -> Tensor:
        """See DraftSource."""
        guess = self.begun(seen)
        for number in range(self._state.shape.num_drafts):
            guess = self.round(seen, guess, number)
        return guess.line[:, self._state.shape.history :]

    def begun(self, seen: Seen) -> Guess:
        """Before the first round."""
        final, count = self._state.final[seen.slots], self._state.num_final[seen.slots]
        last = (count - 1).view(-1, 1, 1).expand(-1, 1, final.shape[-1])
        return Guess(seen.recent, final.gather(1, last).squeeze(1))

    def round(self, seen: Seen, guess: Guess, number: int) -> Guess:
        """One more draft, ``number`` of them being there."""
        position = (seen.newest - 1 + number).unsqueeze(1)
        inputs = _behind(self._state.inputs(seen.slots, position, lengths=seen.lengths, token_ids=guess.line[:, -1]))
        hidden, chosen = self._model.draft_step(guess.hidden, inputs, Chosen(guess.keys) if number else None)
        token = self._model.best(hidden, inputs.outputs)
        return Guess(torch.cat((guess.line, token.unsqueeze(1)), 1), hidden, chosen.keys)

    def catch_up(self, seen: Seen) -> None:
        """See DraftSource. Row i stands ``count - i`` before the newest; such positions only have to be cached."""
        state, shape = self._state, self._state.shape
        final, count = state.final[seen.slots], state.num_final[seen.slots].unsqueeze(1)
        rows = torch.arange(shape.num_drafts, device=final.device)
        behind = (shape.history - count + rows).clamp(0, shape.history - 1)
        positions = (seen.newest.unsqueeze(1) - count + rows).clamp_min(0)
        tokens = seen.recent.gather(1, behind).clamp_min(0)
        inputs = state.inputs(seen.slots, positions, lengths=seen.lengths, token_ids=tokens, is_real=rows < count - 1)
        self._model.write_drafts(final[:, : shape.num_drafts].flatten(0, 1), _behind(inputs))


def _behind(inputs: ForwardInputs) -> ForwardInputs:
    """These ids are those of the tokens behind the rows, which the draft layer reads."""
    return replace(inputs, next_token_ids=inputs.token_ids)


def accepted(drawn: Tensor, drafts: Tensor) -> Tensor:
    """How many of ``drawn`` [B, W] stand behind ``drafts`` [B, W - 1]: those that were drafted, and one more; [B]."""
    if not drafts.shape[1]:
        return torch.ones_like(drawn[:, 0])
    is_wrong = drawn[:, :-1] != drafts
    return (is_wrong.cumsum(1) == 0).sum(1) + 1
