"""The decoding sequences of one rank: seats them in the device state, runs the step, tells what stands.

Knows slots, no plans and no requests. Which sequences step is the caller's word; where each of them is, the device's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.decode_state import DecodeShape, DecodeState
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.engine.graph import StepForms
from longcat_pd.engine.plan import SlotOutput
from longcat_pd.engine.rank_model import RankModel
from longcat_pd.engine.sampler import Sampled, logprobs
from longcat_pd.engine.slots import GroupSlots, SlotState
from longcat_pd.engine.speculative import MakeDrafts
from longcat_pd.parallel.mesh import Mesh


class Decoder:
    """Decode steps on one rank that has all layers.

    Args:
        group: the slots of this rank's group.
        make_drafts: where drafts come from, if windows have any.
    """

    def __init__(
        self, spec: RankSpec, mesh: Mesh, *, loaded: RankModel, group: GroupSlots, make_drafts: MakeDrafts
    ) -> None:
        shape = DecodeShape.of(
            spec.instance.engine,
            mesh.cache_shard,
            num_groups=group.num_groups,
            group_size=mesh.axis("attn_tp").size,
            ngram_order=loaded.ngram_order,
            hidden_size=loaded.hidden_size,
            vocab_size=loaded.vocab_size,
        )
        self._group = group
        self._num_drafts = shape.num_drafts
        self._state = DecodeState(
            shape, mesh.cache_shard, dtype=loaded.dtype, device=loaded.device, vocabulary=loaded.vocabulary
        )
        drafts = make_drafts(loaded.model, self._state) if shape.num_drafts else None
        step = DecodeStep(loaded.model, self._state, ops=loaded.ops, drafts=drafts)
        facts = {"model": loaded.model_digest, "dtype": str(loaded.dtype)}
        self.forms = StepForms(step, spec, facts, mesh.traffic, tell=loaded.tell)

    def seat(self, state: SlotState, final: torch.Tensor | None) -> None:
        """A sequence decodes from now on (see ``DecodeState.seat``)."""
        self._state.seat(self._group.row(state.slot), state, final if self._num_drafts else None)

    def leave(self, state: SlotState) -> None:
        """It does not decode any more. Its rows hold what they hold; what the host keeps of it goes."""
        self._state.leave(self._group.row(state.slot))

    def step(self, states: Sequence[SlotState], num_seqs: int, *, num_candidates: int = 0) -> tuple[SlotOutput, ...]:
        """One step of these sequences; what stands of their windows. ``num_seqs``: what the fullest group has.

        ``num_candidates``: see ``sampler.drawn``.
        """
        lengths = tuple(state.num_tokens + self._num_drafts for state in states)
        rows = [self._group.row(state.slot) for state in states]
        drawn, counts, logits = self.forms.run(rows, lengths, num_seqs=num_seqs, num_candidates=num_candidates)
        outputs = []
        for row, (state, tokens, count) in enumerate(zip(states, drawn.tolist(), counts.tolist(), strict=True)):
            state.num_tokens += count
            fault = self._state.sampling.grammars.advance(rows[row], tokens[:count])
            num_drafts = self._num_drafts
            outputs.append(slot_output(state, tokens[:count], logits[row, :count], num_drafts=num_drafts, fault=fault))
        return tuple(outputs)


def slot_output(
    state: SlotState, tokens: Sequence[int], logits: torch.Tensor, *, num_drafts: int = 0, fault: str = ""
) -> SlotOutput:
    """What is told of new tokens of one sequence; ``logits`` [tokens, V] are read where log-probs are asked for."""
    num, found = state.sampling.num_logprobs, list[Sampled]()
    if num is not None:
        found = logprobs(logits, tokens, num)
    return SlotOutput(
        slot=state.slot,
        token_ids=tuple(tokens),
        logprobs=tuple(token.logprob for token in found if token.logprob is not None),
        top=tuple(token.top for token in found),
        num_drafts=num_drafts,
        fault=fault,
    )
