"""How the sequences of some slots are sampled, and what they have said so far: device buffers, a row for each slot.

Written by ``seat`` when a sequence takes its slot, and by the decode step as tokens become certain; drafts are looked at
and never written, so one that is rejected leaves no trace. Of a slot that asks for nothing the large tables hold anything.
Knows neither plans nor windows.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.masks import GrammarMasks, Masks
from longcat_pd.engine.request import MAX_BIAS
from longcat_pd.engine.sampler import SamplingRows, floor_of
from longcat_pd.engine.slots import SlotState
from longcat_pd.kernels.drawing_ops import ENDS, IN_PROMPT, Edits
from longcat_pd.kernels.ops import Store


class SamplingState(nn.Module):
    """The rows of ``num_rows`` slots; Letters: B sequences, W rows of each.

    ``counts`` and ``flags`` are five bytes for each slot and id of the vocabulary; see ``ops.Edits``. ``vocabulary``: None
    where nobody is bound to a grammar.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, *, vocabulary: Vocabulary | None = None
    ) -> None:
        super().__init__()

        def buffer(*sizes: int, fill: float = 0, dtype: torch.dtype = torch.int64) -> nn.Buffer:
            return nn.Buffer(torch.full((num_rows, *sizes), fill, dtype=dtype, device=device), persistent=False)

        self.temperature = buffer(dtype=torch.float64)
        self.top_p = buffer(fill=1.0, dtype=torch.float64)
        self.top_k = buffer()
        self.floor = buffer(fill=-math.inf, dtype=torch.float64)
        self.seed = buffer()
        self.choice = buffer()
        self.early_until = buffer()  # position of the first token that may end the answer
        self.frequency = buffer(dtype=torch.float64)
        self.presence = buffer(dtype=torch.float64)
        self.repetition = buffer(fill=1.0, dtype=torch.float64)
        self.counts = buffer(vocab_size, dtype=torch.float32)  # which devices write by index, unlike int32
        self.flags = buffer(vocab_size, dtype=torch.uint8)
        self.bias_ids = buffer(MAX_BIAS)
        self.bias = buffer(MAX_BIAS, dtype=torch.float32)
        self.grammars = GrammarMasks(vocabulary, device)

    def seat(self, slot: int, state: SlotState) -> None:
        """A sequence is sampled from now on, behind the tokens that are known of it."""
        rule, answer_at = state.sampling, _answer_at(state)
        self.temperature[slot] = rule.temperature
        self.top_p[slot] = rule.top_p
        self.top_k[slot] = rule.top_k
        self.floor[slot] = floor_of(rule)
        self.seed[slot] = rule.seed
        self.choice[slot] = rule.choice
        self.early_until[slot] = state.prompt_len + rule.min_tokens if rule.min_tokens else 0
        self.frequency[slot] = rule.frequency_penalty
        self.presence[slot] = rule.presence_penalty
        self.repetition[slot] = rule.repetition_penalty
        self.bias[slot].zero_()
        self.grammars.seat(slot, rule.grammar, state.token_ids[answer_at : state.num_tokens].tolist())
        if rule.has_edits:
            self._fill_tables(slot, state)

    def rows(self, slots: Tensor, positions: Tensor, drafts: Tensor, masks: Masks | None) -> SamplingRows:
        """How tokens at ``positions`` [B, W] are sampled: [B * W] rows.

        ``drafts`` [B, W - 1]: row r comes behind the first r of them; ``masks``: what grammars allow there, or None if none
        of the slots asks for anything to be done to its logits.
        """
        column = partial(_column, slots, positions.shape[1])
        return SamplingRows(
            temperature=column(self.temperature),
            top_p=column(self.top_p),
            floor=column(self.floor),
            top_k=column(self.top_k),
            seed=column(self.seed),
            choice=column(self.choice),
            edits=None if masks is None else self._edits(slots, positions, drafts, masks),
        )

    def count(self, slots: Tensor, tokens: Tensor, num: Tensor, store: Store) -> None:
        """The first ``num`` [B] of ``tokens`` [B, W] belong to the answers now.

        ``store``: the operator that writes by index. A token that stands several times is given the same count each time.
        """
        num_ids = self.counts.shape[1]
        stands = torch.arange(tokens.shape[1], device=slots.device) < num.unsqueeze(1)
        is_same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        places = (slots.unsqueeze(1) * num_ids + tokens).flatten()
        grown = self.counts.view(-1)[places] + (is_same & stands.unsqueeze(1)).sum(2).flatten()
        store(self.counts.view(-1, num_ids, 1), places, grown.unsqueeze(1))

    def _edits(self, slots: Tensor, positions: Tensor, drafts: Tensor, masks: Masks) -> Edits:
        width = positions.shape[1]
        column, places = partial(_column, slots, width), torch.arange(width, device=slots.device)
        is_before = places[: drafts.shape[1]] < places.unsqueeze(1)
        return Edits(
            counts=self.counts,
            flags=self.flags,
            bias_ids=self.bias_ids,
            bias=self.bias,
            seqs=slots.unsqueeze(1).expand(-1, width).flatten(),
            drafts=torch.where(is_before, drafts.unsqueeze(1), -1).flatten(0, 1),
            is_early=(positions < self.early_until[slots].unsqueeze(1)).flatten(),
            frequency=column(self.frequency),
            presence=column(self.presence),
            repetition=column(self.repetition),
            masks=masks[0],
            is_bound=masks[1],
        )

    def _fill_tables(self, slot: int, state: SlotState) -> None:
        rule, device, answer_at = state.sampling, self.counts.device, _answer_at(state)
        known = torch.from_numpy(state.token_ids[: state.num_tokens]).to(device)
        said = known[answer_at:]
        self.counts[slot] = torch.bincount(said, minlength=self.counts.shape[1])
        flags = self.flags[slot]
        flags.zero_()
        flags[known[:answer_at]] = IN_PROMPT
        ends = torch.tensor(rule.ends, dtype=torch.int64, device=device)
        flags[ends] = flags[ends] | ENDS
        num = len(rule.logit_bias)
        if num:
            ids, values = zip(*rule.logit_bias, strict=True)
            self.bias_ids[slot, :num] = torch.tensor(ids, device=device)
            self.bias[slot, :num] = torch.tensor(values, dtype=torch.float32, device=device)


def _answer_at(state: SlotState) -> int:
    """The position of the answer's first token, which may be in the prompt."""
    return state.prompt_len - state.sampling.num_said


def _column(slots: Tensor, width: int, field: Tensor) -> Tensor:
    """[S] -> [B * W]: each slot's for all of its rows."""
    return field[slots].unsqueeze(1).expand(-1, width).flatten()
