"""The decode step: draft, verify, accept, write state. One function of device buffers of fixed shape, or two of them.

The host gives slot numbers and reads what was drawn; which drafts stand is decided here, so the next step needs nobody.
Between drafts and verification the host says what grammars allow. Knows no plans and no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState, put
from longcat_pd.engine.masks import Masks
from longcat_pd.engine.sampler import drawn
from longcat_pd.engine.speculative import DraftSource, ModelDrafts, Seen, accepted
from longcat_pd.kernels.ops import Ops
from longcat_pd.models.causal_lm import CausalLM

Found = tuple[Tensor, Tensor, Tensor]


class DecodeStep(nn.Module):
    """One step of the sequences in some slots.

    ``slots`` [B]; ``lengths``: see ``DecodeState.inputs``; ``num_candidates``, above 0 without logits: see
    ``sampler.drawn``. Found are what was drawn [B, W], how many of it stand [B], and the logits [B, W, V] behind it. What
    stands of a row are the drafts that were drawn and the first token that is no draft; draws beyond it saw a token that is
    not there.

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

    def forward(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int = 0) -> Found:
        """All of it, with the host in its middle."""
        line = self.line(slots, lengths)
        return self.verify(slots, line, self.masks(slots, line), lengths=lengths, num_candidates=num_candidates)

    def plain(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int = 0) -> Found:
        """The same for slots of which none asks for anything to be done to its logits."""
        line = self.line(slots, lengths)
        return self.verify(slots, line, None, lengths=lengths, num_candidates=num_candidates)

    def line(self, slots: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """The first part: kept tokens of each slot, the newest last, and the drafts behind it, [B, R + W - 1]."""
        seen = self.seen(slots, lengths)
        return seen.recent if self._drafts is None else torch.cat((seen.recent, self._drafts(seen)), 1)

    def seen(self, slots: Tensor, lengths: tuple[int, ...]) -> Seen:
        """What drafts are made from."""
        return Seen(slots, self.state.num_tokens[slots] - 1, self.state.recent[slots], lengths)

    @property
    def rounds(self) -> ModelDrafts | None:
        """Where drafts come from, if every one of them can be asked for by itself."""
        return self._drafts if isinstance(self._drafts, ModelDrafts) else None

    def masks(self, slots: Tensor, line: Tensor, *, is_any_bound: bool = True) -> Masks:
        """Between the parts: what the grammars of the slots allow behind the drafts of ``line``. Calls the host if any of
        them is bound."""
        grammars = self.state.sampling.grammars
        masks: Masks = (grammars if is_any_bound else grammars.nobody_bound)(slots, self._drafts_of(line))
        return masks

    def verify(
        self, slots: Tensor, line: Tensor, masks: Masks | None, *, lengths: tuple[int, ...], num_candidates: int = 0
    ) -> Found:
        """The second part, which writes the state. ``masks``: None if no slot asks for anything, which saves much."""
        state, shape = self.state, self.state.shape
        places = torch.arange(shape.window, device=slots.device)
        positions = (state.num_tokens[slots] - 1).unsqueeze(1) + places
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
            rows=state.sampling.rows(slots, positions + 1, self._drafts_of(line), masks),
            positions=positions.flatten() + 1,
            num_candidates=num_candidates,
            ops=self._ops,
        )
        found = tokens.view(-1, shape.window)
        count = accepted(found, self._drafts_of(line))
        self._remember(slots, torch.cat((line[:, : shape.history], found), 1), count, final=final)
        if self._drafts is not None:
            self._drafts.catch_up(self.seen(slots, lengths))
        if masks is not None:
            state.sampling.count(slots, found, self._grown(slots, count), self._ops.store)
        return found, count, logits.view(*found.shape, logits.shape[-1])

    def _drafts_of(self, line: Tensor) -> Tensor:
        return line[:, self.state.shape.history :]

    def _grown(self, slots: Tensor, count: Tensor) -> Tensor:
        """By how many tokens: padding never does."""
        return torch.where(slots == self.state.padding, 0, count)

    def _remember(self, slots: Tensor, line: Tensor, count: Tensor, *, final: Tensor) -> None:
        state, shape = self.state, self.state.shape
        kept = count.unsqueeze(1) + torch.arange(shape.history, device=slots.device)
        put(state.recent, slots, line.gather(1, kept))
        put(state.num_tokens, slots, state.num_tokens[slots] + self._grown(slots, count))
        if self._drafts is not None:
            put(state.final, slots, final.view(-1, shape.window, shape.hidden_size))
            put(state.num_final, slots, count)
