"""Drafts: how the next tokens are proposed on the device, and which of the proposed ones stand.

A draft stands exactly if it is the token that is drawn at its place, so no text tells whether there were drafts. Knows the
state of slots, no ranks: all ranks of a group draft and draw alike, from equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.causal_lm import CausalLM


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


MakeDrafts = Callable[[CausalLM, DecodeState], DraftSource]


class ModelDrafts(nn.Module):
    """Drafts of the checkpoint's own draft layer: always its arg-max.

    A round first gives the layer the positions that have become certain since the last one, with the target's hidden
    states; what the layer cached for drafts is overwritten by that. The newest of them yields the first draft, and every
    draft the next one.
    """

    def __init__(self, model: CausalLM, state: DecodeState) -> None:
        super().__init__()
        self._model = model
        self._state = state

    def forward(self, seen: Seen) -> Tensor:
        """See DraftSource."""
        state = self._state
        final, count = state.final[seen.slots], state.num_final[seen.slots].unsqueeze(1)
        self._catch_up(seen, final, count)
        last = (count - 1).unsqueeze(-1).expand(-1, 1, final.shape[-1])
        hidden, chosen, tokens = final.gather(1, last).squeeze(1), None, [seen.recent[:, -1]]
        for number in range(state.shape.num_drafts):
            position = (seen.newest - 1 + number).unsqueeze(1)
            inputs = _behind(state.inputs(seen.slots, position, lengths=seen.lengths, token_ids=tokens[-1]))
            hidden, chosen = self._model.draft_step(hidden, inputs, chosen)
            tokens.append(self._model.best(hidden, inputs.outputs))
        return torch.stack(tokens[1:], 1)

    def _catch_up(self, seen: Seen, final: Tensor, count: Tensor) -> None:
        """All certain positions but the newest, which only have to be cached: row i stands ``count - i`` before that."""
        state, shape = self._state, self._state.shape
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
