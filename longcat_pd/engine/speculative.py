"""Drafts: how a rank proposes the next tokens of its sequences, and which of the proposed ones stand.

A draft stands exactly if it is the token that is drawn at its place, so no text tells whether there were drafts. Knows the
rows of a step, no ranks: all ranks of a group draft and draw alike, from equal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import SlotOutput, SlotSampling
from longcat_pd.engine.sampler import Sampled, SamplingRows, logprobs, sample
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.kernels.ops import Ops
from longcat_pd.kv_transfer.messages import DraftState
from longcat_pd.models.causal_lm import CausalLM


class DraftSource(Protocol):
    """Where drafts come from."""

    def propose(self, states: Sequence[SlotState], num_drafts: int) -> None:
        """Puts so many drafts behind the known tokens of each sequence (``SlotState.draft``)."""
        ...


class ModelDrafts:
    """Drafts of the checkpoint's own draft layer: always its arg-max.

    A round first gives the layer all positions that have become certain since the last one, with the target's hidden
    states; what the layer cached for drafts is overwritten by that. The newest of them yields the first draft, and every
    draft the next one.
    """

    def __init__(self, model: CausalLM, inputs: InputsBuilder) -> None:
        self._model = model
        self._inputs = inputs

    def propose(self, states: Sequence[SlotState], num_drafts: int) -> None:
        """See DraftSource."""
        undrafted = [_undrafted(state) for state in states]
        self._catch_up(states, undrafted)
        final, chosen = torch.stack([rows[-1] for rows in undrafted]), None
        for _ in range(num_drafts):
            inputs = self._inputs.build([_newest(state) for state in states])
            final, chosen = self._model.draft_step(final[inputs.row_seqs], inputs, chosen)
            best: list[int] = self._model.logits(final).argmax(-1).tolist()
            for state, token_id in zip(states, best, strict=True):
                state.draft(token_id)

    def _catch_up(self, states: Sequence[SlotState], undrafted: Sequence[torch.Tensor]) -> None:
        """All certain positions but the newest, which only have to be cached."""
        spans, rows = [], []
        for state, finals in zip(states, undrafted, strict=True):
            if len(finals) > 1:
                end = state.num_tokens - 2
                spans.append(Span(state, end - len(finals) + 1, end, 0))
                rows.append(finals[:-1])
        if not spans:
            return
        inputs = self._inputs.build(spans)
        firsts = [0]
        for span in spans:
            firsts.append(firsts[-1] + span.end - span.start)
        shift = torch.tensor([first - span.start for first, span in zip(firsts, spans, strict=False)])
        here = inputs.positions + shift.to(inputs.positions.device)[inputs.row_seqs]
        self._model.write_drafts(torch.cat(rows)[here], inputs)


def settled(
    final: torch.Tensor, logits: torch.Tensor, spans: Sequence[Span], *, ops: Ops, has_draft: bool
) -> tuple[SlotOutput, ...]:
    """Draws behind the output rows of the spans (``final`` [R, hidden], ``logits`` [R, V]) and tells the slots.

    ``has_draft``: the draft layer is here; slots keep the hidden states that it has to see.
    """
    outputs, first = [], 0
    for span, tokens in zip(spans, verified(logits, spans, ops), strict=True):
        state, rows = span.state, final[first : first + len(tokens)]
        first += span.num_outputs
        state.append(*(token.token_id for token in tokens))
        state.undrafted = rows.clone() if has_draft else None
        asked = tuple(token.logprob for token in tokens if token.logprob is not None)
        outputs.append(
            SlotOutput(
                slot=state.slot,
                token_ids=tuple(token.token_id for token in tokens),
                logprobs=asked,
                top=tuple(token.top for token in tokens) if asked else (),
                num_drafts=span.num_drafts,
                draft_state=_packed(rows) if has_draft and state.push is not None else None,
            )
        )
    return tuple(outputs)


def verified(logits: torch.Tensor, spans: Sequence[Span], ops: Ops) -> list[list[Sampled]]:
    """Draws a token behind every output row of the spans (``logits`` [R, V]); those that stand, at least one a span.

    They are the drafts that were drawn and the first token that is no draft. Draws beyond it saw a token that is not there.
    """
    rules: list[SlotSampling] = []
    positions: list[int] = []
    for span in spans:
        rules += [span.state.sampling] * span.num_outputs
        positions += range(span.end - span.num_outputs + 1, span.end + 1)
    places = torch.tensor(positions, device=logits.device)
    drawn = sample(logits, SamplingRows.of(rules, logits.device), places, ops).tolist()
    standing, first = [], 0
    for span in spans:
        tokens = _standing(span, drawn[first : first + span.num_outputs])
        num = span.state.sampling.num_logprobs
        rows = logits[first : first + len(tokens)]
        standing.append([Sampled(token) for token in tokens] if num is None else logprobs(rows, tokens, num))
        first += span.num_outputs
    return standing


def unpacked(state: DraftState, like: torch.Tensor) -> torch.Tensor:
    """The hidden state [1, hidden] of one position, on the device and in the data type of ``like``."""
    sent_as = {"float32": torch.float32, "bfloat16": torch.bfloat16}[state.dtype]
    return torch.frombuffer(bytearray(state.hidden), dtype=sent_as).view(1, -1).to(like.device, like.dtype)


def _packed(final: torch.Tensor) -> DraftState:
    data = final.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return DraftState(hidden=data, dtype=str(final.dtype).removeprefix("torch."))


def _standing(span: Span, drawn: Sequence[int]) -> Sequence[int]:
    drafts = span.state.token_ids[span.end - span.num_drafts : span.end].tolist()
    count = 0
    while count < len(drafts) and drawn[count] == drafts[count]:
        count += 1
    return drawn[: count + 1]


def _newest(state: SlotState) -> Span:
    """The row behind which the next draft comes: the one before the newest token or draft."""
    position = state.num_tokens + state.num_drafts - 2
    return Span(state, position, position + 1, 1)


def _undrafted(state: SlotState) -> torch.Tensor:
    assert state.undrafted is not None, f"slot {state.slot}: no hidden state to draft from"
    return state.undrafted
