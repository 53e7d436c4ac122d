"""Prompts on one pipeline stage: rows in, hidden states to the next stage, the first token on the last one.

Owns the messages between stages. Knows spans of slots, no plans and no lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.rank_model import RankModel
from longcat_pd.engine.sampler import SamplingRows, drawn
from longcat_pd.engine.sampling_state import SamplingState
from longcat_pd.engine.slots import Load, SlotState, Span
from longcat_pd.models.batch import Rows
from longcat_pd.parallel.collectives import PendingSend
from longcat_pd.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token behind a prompt, its logits (see ``sampler.drawn``) and the hidden state [1, hidden] behind these.

    ``fault``: see ``SlotOutput``.
    """

    state: SlotState
    token_id: int
    logits: torch.Tensor
    final: torch.Tensor
    fault: str = ""


class PromptStage:
    """One rank's part of the prompts of its instance."""

    def __init__(self, loaded: RankModel, mesh: Mesh) -> None:
        self._loaded = loaded
        self._mesh = mesh
        self._inputs = InputsBuilder(
            mesh.cache_shard,
            loaded.cache.block_size,
            loaded.ngram_order,
            loaded.device,
            has_draft=loaded.has_draft,
            group_size=mesh.axis("attn_tp").size,
            is_split=mesh.axis("attn_tp").size > 1 and mesh.layout.axis("dp").size > 1,
        )
        self._sending: PendingSend | None = None

    def compute(
        self, spans: Sequence[Span], load: Load, on_layer: Callable[[int], None] | None, *, num_candidates: int = 0
    ) -> list[FirstToken]:
        """One step of these rows of this group; the tokens behind prompts that end, on the last stage.

        All groups take part, also with what they have no rows for: ``load`` says what the others have. ``num_candidates``:
        see ``sampler.drawn``.
        """
        inputs, pp = self._inputs.build(spans, load), self._mesh.axis("pp")
        hidden = self._received(len(inputs.token_ids)) if pp.rank else None
        hidden = self._loaded.model.forward(inputs, hidden, on_layer)
        for span in spans:
            span.state.num_computed = span.end
        if pp.rank < pp.size - 1:
            self._pass_on(hidden)
            return []
        if not any(load.outputs):
            return []
        final = self._loaded.model.final(hidden, inputs)
        states = [span.state for span in spans if span.wants_token]
        return self._drawn(final, inputs.outputs, states=states, num_candidates=num_candidates)

    def close(self) -> None:
        """Lets the last message to the next stage leave."""
        if self._sending is not None:
            self._sending.wait()

    def _drawn(
        self, final: torch.Tensor, at: Rows, *, states: Sequence[SlotState], num_candidates: int
    ) -> list[FirstToken]:
        positions = torch.tensor([state.num_tokens for state in states], dtype=torch.int64, device=final.device)
        known = self._known(states, positions.device)
        ids, logits = drawn(
            self._loaded.model,
            final,
            at,
            rows=_rows_of(known, states, positions),
            positions=positions,
            num_candidates=num_candidates,
            ops=self._loaded.ops,
        )
        tokens: list[int] = ids.tolist()
        for state, token in zip(states, tokens, strict=True):
            state.append(token)
        faults = [known.grammars.advance(row, [token]) if known else "" for row, token in enumerate(tokens)]
        return [
            FirstToken(state, token, logits[row : row + 1], final[row : row + 1], faults[row])
            for row, (state, token) in enumerate(zip(states, tokens, strict=True))
        ]

    def _known(self, states: Sequence[SlotState], device: torch.device) -> SamplingState | None:
        """What first tokens are sampled from, where anybody asks for more than the model's logits. Nothing of it is kept:
        they may decode elsewhere, and it is made where they do."""
        if not any(state.sampling.has_edits for state in states):
            return None
        known = SamplingState(len(states), self._loaded.vocab_size, device, vocabulary=self._loaded.vocabulary)
        for place, state in enumerate(states):
            known.seat(place, state)
        return known

    def _received(self, num_rows: int) -> torch.Tensor:
        pp = self._mesh.axis("pp")
        return pp.recv((num_rows, self._loaded.hidden_size), self._loaded.dtype, pp.rank - 1)

    def _pass_on(self, hidden: torch.Tensor) -> None:
        """Sends to the next stage while this one goes on with the next plan; one message at most is on its way."""
        pp = self._mesh.axis("pp")
        self.close()
        self._sending = pp.start_send(hidden, pp.rank + 1)


def _rows_of(known: SamplingState | None, states: Sequence[SlotState], positions: torch.Tensor) -> SamplingRows:
    """How first tokens at ``positions`` [R] are sampled."""
    if known is None:
        return SamplingRows.of([state.sampling for state in states], positions.device)
    places = torch.arange(len(states), device=positions.device)
    no_drafts = positions.new_empty((len(states), 0))
    return known.rows(places, positions.unsqueeze(1), no_drafts, known.grammars(places, no_drafts))
