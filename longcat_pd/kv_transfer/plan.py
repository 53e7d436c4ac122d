"""Which rank sends which block of which layer to whom: follows from the two layouts alone.

Pure arithmetic; both sides compute it and compare nothing. Knows no tensors, no lanes, and of the cache only that every
entry of a layer has one block for each block number of the prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from longcat_pd.kv_cache.layout import BlockSplit


def travelling_layers(layers_per_stage: Sequence[int], *, has_draft: bool) -> tuple[int, ...]:
    """Layers of each prefill stage whose cache travels: the draft layer is one more of the last stage."""
    *others, last = layers_per_stage
    return (*others, last + has_draft)


@dataclass(frozen=True, slots=True)
class Move:
    """One block of one cache entry goes from a prefill rank to a decode rank (numbers within their instances)."""

    source: int
    target: int
    entry: str
    block: int


@dataclass(frozen=True)
class TransferPlan:
    """The hand-over of one prompt.

    A layer lies on the pipeline stage that computes it, a block on the context-parallel rank that ``source_split`` names;
    it goes to the rank of the decode group that ``target_split`` names. So every move is one whole block from one rank to
    one rank, whatever the sizes of the two pools are.

    Args:
        source_layers: layers of each prefill stage, in order (see ``travelling_layers``).
        source_split: blocks -> ranks of one stage; prefill rank = stage * cp_size + cp_rank.
        target_split: blocks -> ranks of the decode group.
        first_rank: number of the group's first rank in the decode instance.
        num_blocks: blocks of the prompt.
        first_block: the first that travels; the target has those before it.
    """

    source_layers: tuple[int, ...]
    source_split: BlockSplit
    target_split: BlockSplit
    first_rank: int
    num_blocks: int
    first_block: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.source_layers)

    def layers_of(self, source: int) -> range:
        """The layers that a prefill rank computes."""
        stage = source // self.source_split.num_ranks
        first = sum(self.source_layers[:stage])
        return range(first, first + self.source_layers[stage])

    def source_of(self, layer: int, block: int) -> int:
        """The prefill rank that holds this block of this layer."""
        stage, first = 0, self.source_layers[0]
        while layer >= first:
            stage += 1
            first += self.source_layers[stage]
        return stage * self.source_split.num_ranks + self.source_split.rank_of(block)

    def target_of(self, block: int) -> int:
        """The decode rank that takes this block of every layer."""
        return self.first_rank + self.target_split.rank_of(block)

    def targets_of(self, source: int) -> tuple[int, ...]:
        """The decode ranks that get anything from this prefill rank, ascending."""
        cp_rank = source % self.source_split.num_ranks
        return tuple(sorted(self.first_rank + kvp for cp, kvp in self._pairs if cp == cp_rank))

    def sources_of(self, target: int) -> tuple[int, ...]:
        """The prefill ranks that send anything to this decode rank, ascending."""
        cp_ranks = sorted(cp for cp, kvp in self._pairs if self.first_rank + kvp == target)
        stages = range(len(self.source_layers))
        return tuple(stage * self.source_split.num_ranks + cp for stage in stages for cp in cp_ranks)

    def blocks_between(self, source: int, target: int, first_block: int, end_block: int) -> list[int]:
        """Of the block numbers first_block ... end_block - 1 those that go from ``source`` to ``target``, ascending."""
        pair = (source % self.source_split.num_ranks, target - self.first_rank)
        blocks = self._pairs.get(pair, [])
        return blocks[bisect_left(blocks, first_block) : bisect_left(blocks, end_block)]

    def moves(self, layer: int, entries: Sequence[str], first_block: int, end_block: int) -> Iterator[Move]:
        """All moves of one chunk of one layer, whose cache entries are ``entries``."""
        for block in range(max(first_block, self.first_block), min(end_block, self.num_blocks)):
            source, target = self.source_of(layer, block), self.target_of(block)
            for entry in entries:
                yield Move(source, target, entry, block)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], list[int]]:
        """(cp_rank, kvp_rank) -> their common blocks, ascending; pairs without any are absent."""
        pairs: dict[tuple[int, int], list[int]] = {}
        for block in range(self.first_block, self.num_blocks):
            pairs.setdefault((self.source_split.rank_of(block), self.target_split.rank_of(block)), []).append(block)
        return pairs
