"""The decode step: draft, verify, accept, write state. One function of device buffers of fixed shape.

The host gives slot numbers and reads what was drawn; which drafts stood is decided here, so that the next step needs nobody.
A draft stands exactly if it is the token that is drawn at its place, so no text tells whether there were drafts. All ranks of
a group draft and draw alike, from equal numbers. Knows no plans and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState, put
from longcat_pd.engine.sampler import sample
from longcat_pd.kernels.ops import Ops
from longcat_pd.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Seen:
    """What drafts are made from. ``newest`` [B]: position of the newest token; ``recent`` [B, R]: tokens up to it."""

    slots: Tensor
    newest: Tensor
    recent: Tensor
    lengths: tuple[int, ...]


class DraftSource(Protocol):
    """Where drafts come from."""

    def __call__(self, seen: Seen) -> Tensor:
        """Guesses at the tokens behind the newest of each sequence, [B, drafts]."""
        ...


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
        state, count = self._state, self._state.num_final[seen.slots].unsqueeze(1)
        final = state.final[seen.slots]
        self._catch_up(seen, final, count)
        last = (count - 1).unsqueeze(-1).expand(-1, 1, final.shape[-1])
        hidden, chosen, drafts = final.gather(1, last).squeeze(1), None, [seen.recent[:, -1]]
        for number in range(state.shape.num_drafts):
            inputs = state.inputs(
                seen.slots,
                (seen.newest - 1 + number).unsqueeze(1),
                lengths=seen.lengths,
                token_ids=drafts[-1],
                next_token_ids=drafts[-1],
            )
            hidden, chosen = self._model.draft_step(hidden, inputs, chosen)
            drafts.append(self._model.logits(hidden).argmax(-1))
        return torch.stack(drafts[1:], 1)

    def _catch_up(self, seen: Seen, final: Tensor, count: Tensor) -> None:
        """All certain positions but the newest, which only have to be cached: row i stands ``count`` - i before ``newest``."""
        state = self._state
        places = torch.arange(state.shape.num_drafts, device=final.device)
        behind = (places + state.shape.history - count + 1 - 1).clamp(0, state.shape.history - 1)
        tokens = seen.recent.gather(1, behind).clamp_min(0)
        inputs = state.inputs(
            seen.slots,
            (seen.newest.unsqueeze(1) - count + places).clamp_min(0),
            lengths=seen.lengths,
            token_ids=tokens,
            next_token_ids=tokens,
            is_real=places < count - 1,
        )
        self._model.write_drafts(final[:, : state.shape.num_drafts].flatten(0, 1), inputs)


class DecodeStep(nn.Module):
    """One step of the sequences in some slots.

    Args:
        drafts: where drafts come from, if windows have any.
    """

    def __init__(self, model: CausalLM, state: DecodeState, *, ops: Ops, drafts: DraftSource | None) -> None:
        super().__init__()
        self.state = state
        self._model = model
        self._ops = ops
        self._drafts = drafts

    def forward(self, slots: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """``slots`` [B] -> what was drawn [B, W], how many of it stand [B], and the logits [B, W, V] behind it.

        ``lengths``: see ``DecodeState.inputs``. What stands of a row are the drafts that were drawn and the first token that
        is no draft; draws beyond it saw a token that is not there.
        """
        state, shape = self.state, self.state.shape
        newest, recent = state.num_tokens[slots] - 1, state.recent[slots]
        line = recent
        if self._drafts is not None:
            line = torch.cat((recent, self._drafts(Seen(slots, newest, recent, lengths))), 1)
        positions = newest.unsqueeze(1) + torch.arange(shape.window, device=slots.device)
        inputs = state.inputs(
            slots,
            positions,
            lengths=lengths,
            token_ids=line[:, -shape.window :],
            ngram_windows=state.windows(line) if shape.ngram_order else None,
        )
        final = self._model.final(self._model.forward(inputs, None, None), None)
        logits = self._model.logits(final)
        drawn = sample(logits, state.sampling(slots), positions.flatten() + 1, self._ops).view(-1, shape.window)
        count = accepted(drawn, line[:, shape.history :])
        self._remember(slots, torch.cat((recent, drawn), 1), count, final)
        return drawn, count, logits.view(*drawn.shape, -1)

    def _remember(self, slots: Tensor, line: Tensor, count: Tensor, final: Tensor) -> None:
        state, shape = self.state, self.state.shape
        kept = count.unsqueeze(1) + torch.arange(shape.history, device=slots.device)
        put(state.recent, slots, line.gather(1, kept))
        grown = torch.where(slots == state.padding, 0, count)
        put(state.num_tokens, slots, state.num_tokens[slots] + grown)
        put(state.final, slots, final.view(-1, shape.window, shape.hidden_size))
        put(state.num_final, slots, count)


def accepted(drawn: Tensor, drafts: Tensor) -> Tensor:
    """How many of ``drawn`` [B, W] stand behind ``drafts`` [B, W - 1]: those that were drafted, and one more; [B]."""
    is_wrong = drawn[:, :-1] != drafts
    return (is_wrong.cumsum(1) == 0).sum(1) + 1
