"""What a rank remembers of the sequences in its slots: ids, lengths, blocks. Written by the runner only.

Lengths, not contents, decide what is valid: a token table may hold anything beyond ``num_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from longcat_pd import wire
from longcat_pd.engine.plan import Admit, Segment, SlotSampling
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Push

Int64s = npt.NDArray[np.int64]


class SlotState:
    """One sequence on this rank.

    ``token_ids[:num_tokens]`` are known, and behind them stand ``num_drafts`` drafts; the cache of the first
    ``num_computed`` positions is written. ``blocks[b]`` is the id of block number b in the shard ``block_ranks[b]``.
    ``undrafted``: final hidden states [m, hidden] of the last m positions before the newest token, which the draft layer
    has not seen; None where nothing is drafted.
    """

    def __init__(self, admit: Admit, num_ranks: int, block_size: int) -> None:
        known = np.asarray(wire.unpack(admit.token_ids), dtype=np.int64)
        self.slot = admit.slot
        self.sampling: SlotSampling = admit.sampling
        self.push: Push | None = admit.push
        self.split = BlockSplit(num_ranks, block_size, admit.split_start)
        self.blocks: Int64s = np.asarray(wire.unpack(admit.blocks), dtype=np.int64)
        self.block_ranks: Int64s = np.array([self.split.rank_of(b) for b in range(len(self.blocks))], dtype=np.int64)
        self.token_ids: Int64s = np.zeros(len(self.blocks) * block_size + 1, dtype=np.int64)  # + 1: sampled, never computed
        self.token_ids[: len(known)] = known
        self.num_tokens = len(known)
        self.num_computed = admit.num_computed
        self.num_drafts = 0
        self.undrafted: torch.Tensor | None = None

    def held_by(self, rank: int) -> Int64s:
        """Numbers of all blocks that ``rank`` holds, ascending."""
        return np.flatnonzero(self.block_ranks == rank)

    def draft(self, token_id: int) -> None:
        """A guess at the token behind those that are known and guessed."""
        self.token_ids[self.num_tokens + self.num_drafts] = token_id
        self.num_drafts += 1

    def append(self, *token_ids: int) -> None:
        """Tokens are certain; the cache of the newest is not written yet, and what drafts have left behind it is void."""
        self.token_ids[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)
        self.num_drafts = 0
        self.num_computed = min(self.num_computed, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Span:
    """The query tokens ``start ... end - 1`` of one sequence in one step; the last ``num_outputs`` rows are sampled."""

    state: SlotState
    start: int
    end: int
    num_outputs: int

    @classmethod
    def of(cls, segment: Segment, state: SlotState) -> Span:
        """A prefill segment says where it starts; a decode segment is the newest token and drafts, which the rank knows."""
        if segment.start < 0:
            known_end = state.num_computed + 1
            # behind the end of the answer, which ranks do not see, drafts can reach the end of the reservation
            room = len(state.blocks) * state.split.block_size - state.num_computed
            num_tokens = min(segment.num_tokens, room)
            span = cls(state, state.num_computed, state.num_computed + num_tokens, num_tokens)
        else:
            known_end = segment.start + segment.num_tokens
            span = cls(state, segment.start, known_end, int(segment.is_last))
        assert span.start == state.num_computed, f"slot {state.slot}: starts at {span.start}, computed {state.num_computed}"
        assert span.start < known_end <= state.num_tokens, f"slot {state.slot}: ends at {known_end} of {state.num_tokens}"
        assert segment.is_last == (known_end == state.num_tokens), f"slot {state.slot}: last segment ends at {known_end}"
        return span

    @property
    def wants_token(self) -> bool:
        """Whether anything is sampled."""
        return self.num_outputs > 0

    @property
    def num_drafts(self) -> int:
        """Drafts at the end, each of which the row before it judges."""
        return max(self.num_outputs - 1, 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the tokens before ``end``."""
        return self.state.split.num_blocks(self.end)

    @property
    def first_block(self) -> int:
        """The block of ``start``."""
        return self.start // self.state.split.block_size
