"""Drafts by a script, so that every pattern of acceptance can be produced; and what a source proposed, listened to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longcat_pd.engine.decode_state import DecodeState, put
from longcat_pd.engine.speculative import DraftSource, MakeDrafts, Seen
from longcat_pd.models.causal_lm import CausalLM


class Script(nn.Module):
    """Proposes what will be drawn, but for the places that a pattern names: round r is right for ``pattern[r]`` drafts.

    ``truth[slot]``: all tokens of the sequence in a slot, prompt and answer.
    """

    def __init__(self, state: DecodeState, truth: Sequence[Sequence[int]], pattern: Sequence[int]) -> None:
        super().__init__()
        rows, longest = state.shape.num_slots + 1, max(map(len, truth)) + 64
        self.truth = nn.Buffer(torch.full((rows, longest), 77))
        for slot, ids in enumerate(truth):
            self.truth[slot, : len(ids)] = torch.tensor(ids)
        self.pattern = nn.Buffer(torch.tensor(pattern))
        self.rounds = nn.Buffer(torch.zeros(rows, dtype=torch.int64))
        self.num_drafts = state.shape.num_drafts

    def forward(self, seen: Seen) -> Tensor:
        places = torch.arange(self.num_drafts)
        coming = (seen.newest.unsqueeze(1) + 1 + places).clamp_max(self.truth.shape[1] - 1)
        tokens = self.truth[seen.slots].gather(1, coming)
        rounds = self.rounds[seen.slots]
        right = self.pattern[rounds % len(self.pattern)].unsqueeze(1)
        put(self.rounds, seen.slots, rounds + 1)
        return torch.where(places < right, tokens, (tokens + 1) % 1000)

    def catch_up(self, seen: Seen) -> None:
        """Knows everything."""


def scripted(truth: Sequence[Sequence[int]], pattern: Sequence[int]) -> MakeDrafts:
    """See Script."""
    return lambda _model, state: Script(state, truth, pattern)


class Listener(nn.Module):
    """Lets the layer propose and notes it: (slot, tokens known, drafts). A script's word counts, where there is one."""

    def __init__(self, source: DraftSource, script: DraftSource | None) -> None:
        super().__init__()
        self.source, self.script = source, script
        self.heard: list[tuple[int, int, list[int]]] = []

    def forward(self, seen: Seen) -> Tensor:
        drafts = self.source(seen)
        for slot, newest, tokens in zip(seen.slots.tolist(), seen.newest.tolist(), drafts.tolist(), strict=True):
            self.heard.append((slot, newest + 1, tokens))
        return drafts if self.script is None else self.script(seen)

    def catch_up(self, seen: Seen) -> None:
        self.source.catch_up(seen)


def listening(make: MakeDrafts, listeners: list[Listener], script: MakeDrafts | None = None) -> MakeDrafts:
    """``make``'s drafts, with a Listener that is put into ``listeners``."""

    def made(model: CausalLM, state: DecodeState) -> DraftSource:
        listeners.append(Listener(make(model, state), script(model, state) if script else None))
        return listeners[-1]

    return made
