"""What a rank remembers of the sequences in its slots: ids, lengths, blocks; and which slots are its own. Written by the
runner only.

Lengths, not contents, decide what is valid: a token table may hold anything beyond ``num_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longcat_pd import wire
from longcat_pd.engine.plan import Admit, Segment, SlotSampling
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Push

Int64s = npt.NDArray[np.int64]

MAX_CANDIDATES = 64  # of each part of a split head; a larger ``top_k`` looks at all logits


@dataclass(frozen=True, slots=True)
class Load:
    """What all ranks compute in one step: by group, how many rows, and how many of these want a token."""

    rows: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """The slots of an instance: ``num_slots`` for each group, numbered group after group. ``own``: this rank's group.

    Plans speak of the slots of all groups; a rank has sequences in its own, and counts those of the others.
    """

    num_slots: int
    num_groups: int = 1
    own: int = 0

    def is_own(self, slot: int) -> bool:
        """Whether this rank's group has the slot."""
        return self._group_of(slot) == self.own

    def row(self, slot: int) -> int:
        """The place of an own slot in its group."""
        assert self.is_own(slot), f"slot {slot} is not of group {self.own}"
        return slot - self.own * self.num_slots

    def load(self, segments: Sequence[Segment]) -> Load:
        """What these segments ask of each group."""
        return Load(
            rows=self._by_group((segment.slot, segment.num_tokens) for segment in segments),
            outputs=self._by_group((segment.slot, int(segment.is_last)) for segment in segments),
        )

    def most_seqs(self, segments: Sequence[Segment]) -> int:
        """Segments of the group that has most of them."""
        return max(self._by_group((segment.slot, 1) for segment in segments))

    def _group_of(self, slot: int) -> int:
        group = slot // self.num_slots
        assert 0 <= group < self.num_groups, f"slot {slot} is not one of {self.num_groups} groups of {self.num_slots}"
        return group

    def _by_group(self, counts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        total = [0] * self.num_groups
        for slot, count in counts:
            total[self._group_of(slot)] += count
        return tuple(total)


class SlotState:
    """One sequence on this rank.

    The cache of the first ``num_computed`` positions is written by prompts. ``num_tokens`` are known; their ids are here up
    to the first that was generated, later ones are on the device only (``decode_state.py``). ``blocks[b]`` is the id of
    block number b in the shard ``block_ranks[b]``.
    """

    def __init__(self, admit: Admit, num_ranks: int, block_size: int) -> None:
        known = np.asarray(wire.unpack(admit.token_ids), dtype=np.int64)
        self.slot = admit.slot
        self.sampling: SlotSampling = admit.sampling
        self.prompt_len = admit.prompt_len
        self.push: Push | None = admit.push
        self.split = BlockSplit(num_ranks, block_size, admit.split_start)
        self.blocks: Int64s = np.asarray(wire.unpack(admit.blocks), dtype=np.int64)
        self.block_ranks: Int64s = np.array([self.split.rank_of(b) for b in range(len(self.blocks))], dtype=np.int64)
        self.token_ids: Int64s = np.append(known, 0)  # and room for the first token
        self.num_tokens = len(known)
        self.num_computed = admit.num_computed

    def held_by(self, rank: int) -> Int64s:
        """Numbers of all blocks that ``rank`` holds, ascending."""
        return np.flatnonzero(self.block_ranks == rank)

    def append(self, token_id: int) -> None:
        """The first token behind the prompt."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1


@dataclass(frozen=True, slots=True)
class Span:
    """The query tokens ``start ... end - 1`` of a prompt in one step; the last row of the last span is sampled."""

    state: SlotState
    start: int
    end: int
    wants_token: bool

    @classmethod
    def of(cls, segment: Segment, state: SlotState) -> Span:
        """The rows of a prompt's segment."""
        span = cls(state, segment.start, segment.start + segment.num_tokens, segment.is_last)
        assert span.start == state.num_computed, f"slot {state.slot}: starts at {span.start}, computed {state.num_computed}"
        assert span.start < span.end <= state.num_tokens, f"slot {state.slot}: ends at {span.end} of {state.num_tokens}"
        assert segment.is_last == (span.end == state.num_tokens), f"slot {state.slot}: last segment ends at {span.end}"
        return span

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the tokens before ``end``."""
        return self.state.split.num_blocks(self.end)


def candidates_wanted(rules: Iterable[SlotSampling]) -> int:
    """Among how many of the best ids of a row its token is to be found, whichever of these rules it has; 0: among all.

    One of the few numbers that a step is made for. Log-probs need the logits of all ids, and so does who changes them.
    """
    most = 1
    for rule in rules:
        if rule.num_logprobs is not None or rule.has_edits:
            return 0
        if rule.temperature > 0.0:
            if not 0 < rule.top_k <= MAX_CANDIDATES:
                return 0
            most = MAX_CANDIDATES
    return most
