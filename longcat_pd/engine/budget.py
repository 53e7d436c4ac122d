"""What the next plan may still hold of the prompts of one group. Pure arithmetic on positions and blocks."""

from __future__ import annotations

from collections import Counter

from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.kv_cache.layout import BlockSplit


class Budget:
    """Tokens of a chunk and, in context parallel, rows of its fullest rank.

    Blocks of one long prompt are level over the ranks of ``cp``, but the only block of a short one lies on one of them, and
    those of prompts that begin alike on the same. Every rank pads to the fullest one's rows, so that one says how long a
    step takes and how much memory it needs, however few tokens the others have.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelConfig) -> None:
        self._block_size = config.block_size
        self._tokens = config.max_num_batched_tokens
        self._limit = chunk_rows(config, parallel) if parallel.cp_size > 1 else None
        self._rows: Counter[int] = Counter()  # by rank of cp

    def __bool__(self) -> bool:
        return self._tokens > 0

    def take(self, start: int, end: int, split: BlockSplit) -> int:
        """Up to where the positions ``start ... end`` of a prompt find room: ``end``, or a block border before it.

        Nothing is left behind a prompt that does not fit to its end.
        """
        fits = min(end, start + self._tokens)
        if fits < end:
            fits -= fits % self._block_size
        if self._limit is not None:
            fits = self._level(start, fits, split)
        self._tokens = self._tokens - (fits - start) if fits == end else 0
        return max(fits, start)

    def _level(self, start: int, end: int, split: BlockSplit) -> int:
        """Count rows, block by block, up to the first one that its rank has no room for."""
        assert self._limit is not None
        here = start
        while here < end:
            block = here // self._block_size
            border, rank = min((block + 1) * self._block_size, end), split.rank_of(block)
            if self._rows[rank] + border - here > self._limit:
                return here
            self._rows[rank] += border - here
            here = border
        return end
