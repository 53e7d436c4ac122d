"""What a rank remembers of the sequences in its slots: ids, lengths, blocks. Written by the runner only.

Lengths, not contents, decide what is valid: a token table may hold anything beyond ``num_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longcat_pd import wire
from longcat_pd.engine.plan import Admit, Segment, SlotSampling
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Push

Int64s = npt.NDArray[np.int64]


class SlotState:
    """One sequence on this rank.

    ``token_ids[:num_tokens]`` are known; the cache of the first ``num_computed`` positions is written. ``blocks[b]`` is the
    id of block number b in the shard ``block_ranks[b]``.
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

    def held_by(self, rank: int) -> Int64s:
        """Numbers of all blocks that ``rank`` holds, ascending."""
        return np.flatnonzero(self.block_ranks == rank)

    def append(self, token_id: int) -> None:
        """A token was sampled; its cache is not written yet."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1


@dataclass(frozen=True, slots=True)
class Span:
    """The query tokens ``start ... end - 1`` of one sequence in one step; ``wants_token``: its last row is sampled."""

    state: SlotState
    start: int
    end: int
    wants_token: bool

    @classmethod
    def of(cls, segment: Segment, state: SlotState) -> Span:
        """A prefill segment says where it starts; a decode segment is the newest token, which the rank knows."""
        start = segment.start if segment.start >= 0 else state.num_tokens - segment.num_tokens
        span = cls(state, start, start + segment.num_tokens, segment.is_last)
        assert start == state.num_computed, f"slot {state.slot}: starts at {start}, computed {state.num_computed}"
        assert span.start < span.end <= state.num_tokens, f"slot {state.slot}: ends at {span.end} of {state.num_tokens}"
        assert span.wants_token == (span.end == state.num_tokens), f"slot {state.slot}: last segment ends at {span.end}"
        return span

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the tokens before ``end``."""
        return self.state.split.num_blocks(self.end)

    @property
    def first_block(self) -> int:
        """The block of ``start``."""
        return self.start // self.state.split.block_size
