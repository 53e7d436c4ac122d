"""Prompts that begin alike: what is computed for one of them is there for all.

Decides which blocks become findable and when, and who waits for a block that another one computes. Pure; part of the room,
used by the scheduler only. Knows no plans.

A block is published only when all ranks have reported it, so nobody finds what is not there. It is never written again:
a sequence shares whole blocks before its last prompt position, and all that it computes lies behind them. Groups share
nothing with each other.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.kv_cache.prefix import block_keys


class Prefixes:
    """The shared blocks of one instance, by group. Without ``prefix_cache`` no sequence has a key, so nothing is found."""

    def __init__(self, pools: Many[GroupPool], config: EngineConfig) -> None:
        self._pools = tuple(pools)
        self._is_on = config.prefix_cache
        self._block_size = config.block_size
        self._window = 1 + config.num_draft_tokens
        # of blocks that are not computed yet: by whom they will be; by group and key
        self._in_work: dict[tuple[int, bytes], Sequence] = {}

    def name(self, seq: Sequence) -> None:
        """Keys for the full blocks of its prompt."""
        if self._is_on:
            self._extend_keys(seq, seq.request.prompt_token_ids)

    def shareable(self, seq: Sequence) -> list[bytes]:
        """Keys of the blocks that it may share: the last prompt position is always computed, for the first token."""
        return seq.keys[: (seq.num_prompt_tokens - 1) // self._block_size]

    def begin(self, seq: Sequence) -> bool:
        """The prompt is about to be computed, behind all blocks that are found by now.

        False: another sequence is computing the next of them; ask again when it has gone on.
        """
        assert seq.table is not None and not seq.is_admitted
        keys = self.shareable(seq)
        seq.table = self._pools[seq.group].share_more(seq.table, keys)
        num_shared = seq.table.num_shared
        if num_shared < len(keys) and self._in_work.get((seq.group, keys[num_shared]), seq) is not seq:
            return False
        self._leave_to_others(seq, keys[:num_shared])
        for key in seq.keys[num_shared:]:
            self._in_work.setdefault((seq.group, key), seq)
        seq.num_findable = num_shared
        seq.num_scheduled = seq.num_computed = num_shared * self._block_size
        seq.request.life.num_cached_tokens = seq.num_computed
        return True

    def computed(self, seq: Sequence) -> None:
        """The ranks have reported ``num_computed`` positions of the prompt, or they have arrived."""
        self._publish(seq, seq.num_computed // self._block_size)

    def ended(self, seq: Sequence, stage: Stage) -> None:
        """It computes nothing more and has not given its blocks back. Of an answer, all that nothing can touch is findable.

        What lies within one window of the newest position may be a draft's, or may still be written.
        """
        if stage is Stage.DECODING and self._is_on:
            settled = max(seq.num_computed - self._window, 0) // self._block_size
            if settled > len(seq.keys):
                ids = (*seq.request.prompt_token_ids, *(token.token_id for token in seq.outputs))
                self._extend_keys(seq, ids)
            self._publish(seq, settled)
        self._leave_to_others(seq, seq.keys)

    def flush(self) -> None:
        """Nothing that was computed so far is found any more."""
        for pool in self._pools:
            pool.forget_all()

    def _extend_keys(self, seq: Sequence, token_ids: tuple[int, ...]) -> None:
        seq.keys = block_keys(token_ids, self._block_size, sees_next=self._window > 1, before=seq.keys)

    def _publish(self, seq: Sequence, end: int) -> None:
        assert seq.table is not None
        first, keys = seq.num_findable, seq.keys[seq.num_findable : end]
        self._pools[seq.group].publish(seq.table, first, keys)
        seq.num_findable += len(keys)
        self._leave_to_others(seq, keys)

    def _leave_to_others(self, seq: Sequence, keys: list[bytes]) -> None:
        """Nobody waits for it to compute these blocks (any more)."""
        for key in keys:
            if self._in_work.get((seq.group, key)) is seq:
                del self._in_work[seq.group, key]
