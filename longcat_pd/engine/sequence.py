"""One request inside an engine: how far it has come and what it holds. Written by the scheduler only.

Knows no queue, no event loop and no rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from longcat_pd.engine.request import Event, FinishReason, Request, TokenOutput
from longcat_pd.errors import LongcatError
from longcat_pd.kv_cache.block_table import BlockTable
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Arrival, DraftState, Push


class Stage(str, Enum):
    """Where a sequence is; it only moves downwards, and to ENDED from everywhere."""

    WAITING = "waiting"  # for blocks and a slot
    HELD = "held"  # has both; nothing is asked of the ranks
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"  # the prompt is computed, the first token is known
    DECODING = "decoding"
    ENDED = "ended"  # gave everything back


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A request, its reservation and its progress.

    ``num_tokens``: positions that the reservation covers. ``num_scheduled``: leading prompt positions that stand in plans;
    ``num_computed``: positions whose cache is there, found or reported by the ranks. ``is_admitted``, ``is_announced``: a
    plan has told the ranks of this sequence, of its arrival. ``draft_state``: what the first drafts behind a hand-over
    start from. ``failure``: why it ended without a finish, if the ranks say so. ``keys``: of its leading full blocks, of
    which others find the first ``num_findable`` (``prefixes.py``).
    """

    request: Request
    num_tokens: int
    split: BlockSplit
    table: BlockTable | None = None
    slot: int = -1
    stage: Stage = Stage.WAITING
    num_scheduled: int = 0
    num_computed: int = 0
    outputs: list[TokenOutput] = field(default_factory=list)
    finish: FinishReason | None = None
    matched_stop_token: int | None = None
    is_admitted: bool = False
    push: Push | None = None
    arrival: Arrival | None = None
    is_announced: bool = False
    draft_state: DraftState | None = None
    failure: LongcatError | None = None
    keys: list[bytes] = field(default_factory=list)
    num_findable: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks of the reservation, all shards together."""
        return self.split.num_blocks(self.num_tokens)

    @property
    def group(self) -> int:
        """The group whose ranks hold the blocks."""
        return self._held.group

    @property
    def blocks(self) -> list[int]:
        """Local block ids by block number."""
        return list(self._held.blocks)

    @property
    def num_shared(self) -> int:
        """Leading blocks that were found with their content."""
        return self._held.num_shared

    @property
    def generation(self) -> int:
        """Unique among all reservations of the group."""
        return self._held.generation

    @property
    def _held(self) -> BlockTable:
        assert self.table is not None, f"{self.request.request_id} holds no blocks"
        return self.table

    def stamp(self, event: Event, now: float) -> None:
        """Note a life event once."""
        self.request.life.stamp(event, now)

    def take(self, token: TokenOutput, eos_token_ids: frozenset[int]) -> None:
        """Append one generated token and see whether the answer ends with it. A stop wins over the length."""
        assert self.finish is None, "a finished answer never changes"
        self.outputs.append(token)
        sampling = self.request.sampling
        if token.token_id in sampling.stop_token_ids:
            self.finish, self.matched_stop_token = FinishReason.STOP, token.token_id
        elif token.token_id in eos_token_ids and not sampling.ignore_eos:
            self.finish = FinishReason.STOP
        elif len(self.outputs) >= sampling.max_tokens:
            self.finish = FinishReason.LENGTH
