"""The decode step: draft, verify, accept, write state. One function of device buffers of fixed shape.

The host gives slot numbers and reads what was drawn; which drafts stand is decided here, so the next step needs nobody.
Knows no plans and no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState, put
from longcat_pd.engine.sampler import drawn
from longcat_pd.engine.speculative import DraftSource, Seen, accepted
from longcat_pd.kernels.ops import Ops
from longcat_pd.models.causal_lm import CausalLM


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

    @property
    def has_split_head(self) -> bool:
        """Whether it pays to look at candidates only."""
        return self._model.has_split_head

    def forward(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """``slots`` [B] -> what was drawn [B, W], how many of it stand [B], and the logits [B, W, V] behind it.

        ``lengths``: see ``DecodeState.inputs``; ``num_candidates``, above 0 without logits: see ``sampler.drawn``. What
        stands of a row are the drafts that were drawn and the first token that is no draft; draws beyond it saw a token
        that is not there.
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
        final = self._model.final(self._model.forward(inputs, None, None), inputs)
        tokens, logits = drawn(
            self._model,
            final,
            inputs.outputs,
            rows=state.sampling.rows(slots, positions + 1, line[:, shape.history :]),
            positions=positions.flatten() + 1,
            num_candidates=num_candidates,
            ops=self._ops,
        )
        found = tokens.view(-1, shape.window)
        count = accepted(found, line[:, shape.history :])
        self._remember(slots, torch.cat((recent, found), 1), count, final)
        return found, count, logits.view(*found.shape, logits.shape[-1])

    def _remember(self, slots: Tensor, line: Tensor, count: Tensor, final: Tensor) -> None:
        state, shape = self.state, self.state.shape
        kept = count.unsqueeze(1) + torch.arange(shape.history, device=slots.device)
        put(state.recent, slots, line.gather(1, kept))
        grown = torch.where(slots == state.padding, 0, count)
        put(state.num_tokens, slots, state.num_tokens[slots] + grown)
        state.sampling.count(slots, line[:, shape.history :], grown)
        if self._drafts is not None:
            put(state.final, slots, final.view(-1, shape.window, shape.hidden_size))
            put(state.num_final, slots, count)
