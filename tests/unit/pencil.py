"""A pencil-and-paper executor: the next token is the last one plus one, and every plan is checked against what ranks know.

It keeps the ranks' own books (slots, blocks of each shard of each group, open pushes, announced arrivals), so a plan that
gives a block to two sequences, a slot of one group to a sequence of another, skips a position or retires a stranger fails
the test that made it. It remembers for every place of the cache which tokens the entry there was computed from, so a plan
that lets a sequence share anything but its own prefix, or write where another one reads, fails too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.engine.executor import OnClosed, OnFailure
from longcat_pd.engine.plan import Admit, RankAccounts, RankReady, Segment, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.roster import RankState
from longcat_pd.errors import LongcatError
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Arrival, TransferClosed
from longcat_pd.wire import unpack

Place = tuple[int, int, int]  # group, shard, block


@dataclass
class _Slot:
    tokens: list[int]
    prompt_len: int
    num_computed: int
    blocks: list[Place]
    push: str | None


@dataclass
class _Arrival:
    blocks: list[Place]
    first_block: int

    @property
    def reserved(self) -> set[Place]:
        return set(self.blocks[self.first_block :])


@dataclass
class Pencil:
    """``auto``: plans are executed in the next turn of the event loop; else by ``step``."""

    config: EngineConfig
    parallel: ParallelConfig
    auto: bool = True
    plans: list[StepPlan] = field(default_factory=list)
    slots: dict[int, _Slot] = field(default_factory=dict)
    arrivals: dict[str, _Arrival] = field(default_factory=dict)
    written: dict[tuple[Place, int], tuple[int, ...]] = field(default_factory=dict)  # by block and offset: the tokens
    pushes: dict[str, set[Place]] = field(default_factory=dict)  # open ones, and what they read
    waiting: deque[tuple[StepPlan, asyncio.Future[tuple[StepOutput, ...]]]] = field(default_factory=deque)
    silent: set[int] = field(default_factory=set)
    miscount: dict[int, int] = field(default_factory=dict)  # by rank: live blocks that it reports wrongly
    fault_at: int = 0
    beyond_grammar: set[int] = field(default_factory=set)  # ids whose sequence cannot go on
    accepted: int = 0  # drafts of each window that stand
    durations_ms: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rank: waited, computed
    prompts: dict[str, list[int]] = field(default_factory=dict)  # by transfer: what arrives, where a test says so
    absent: dict[int, str] = field(default_factory=dict)  # by rank: the machine that has not come
    is_started: bool = False
    is_closed: bool = False
    _on_closed: OnClosed = lambda event: None
    _on_failure: OnFailure = lambda error: None

    # -- the protocol

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> tuple[RankReady, ...]:
        self._on_closed, self._on_failure, self.is_started = on_closed, on_failure, True
        return tuple(
            RankReady(
                rank=r, load_s=0.0, weight_bytes=0, num_blocks=self.config.num_blocks, cache_entries=(),
                model_digest="", accounts=self.accounts(r), memory=(("weights", 100 * (r + 1)), ("n-gram tables", 7)),
            )
            for r in range(self.parallel.world_size)
        )  # fmt: skip

    def submit(self, plan: StepPlan) -> asyncio.Future[tuple[StepOutput, ...]]:
        future: asyncio.Future[tuple[StepOutput, ...]] = asyncio.get_running_loop().create_future()
        self.plans.append(plan)
        self.waiting.append((plan, future))
        if self.auto:
            asyncio.get_running_loop().call_soon(self.step)
        return future

    def rank_states(self) -> tuple[RankState, ...]:
        return tuple(
            RankState(r, "silent" if r in self.silent else "ok", 0.0, None, self.accounts(r), self.absent.get(r, ""))
            for r in range(self.parallel.world_size)
        )

    async def close(self) -> None:
        self.is_closed = True

    # -- what a test does

    def step(self) -> StepPlan:
        """Execute the oldest plan."""
        plan, future = self.waiting.popleft()
        slots = self._execute(plan)
        if plan.step_id == self.fault_at:
            future.set_exception(RuntimeError("the pencil broke"))
            return plan
        future.set_result(
            tuple(
                StepOutput(
                    step_id=plan.step_id,
                    rank=r,
                    slots=tuple(s for s in slots if r == self._first_rank(s.slot)),
                    accounts=self.accounts(r),
                    waited_ms=waited_ms,
                    compute_ms=compute_ms,
                )
                for r in range(self.parallel.world_size)
                for waited_ms, compute_ms in [self.durations_ms.get(r, (0.0, 0.0))]
            )
        )
        return plan

    def lose(self, error: LongcatError) -> None:
        """A rank is lost."""
        self._on_failure(error)
        for _, future in self.waiting:
            future.set_exception(error)
        self.waiting.clear()

    def close_transfer(self, transfer_id: str, *, ok: bool = True, ranks: range | None = None) -> None:
        """Ranks report the end of a transfer; its blocks are read and written no more."""
        ranks = ranks if ranks is not None else range(self.parallel.world_size)
        if ranks.stop == self.parallel.world_size:
            self.pushes.pop(transfer_id, None)
            if ok and transfer_id in self.arrivals:
                self._fill(self.arrivals[transfer_id], self.prompts.get(transfer_id, []))
        for rank in ranks:
            self._on_closed(TransferClosed(transfer_id=transfer_id, rank=rank, ok=ok))

    @property
    def num_shards(self) -> int:
        return self.parallel.cp_size * self.parallel.kvp_size

    @property
    def slots_each(self) -> int:
        return self.config.max_num_seqs // self.parallel.dp_size

    @property
    def ranks_each(self) -> int:
        return self.parallel.world_size // self.parallel.dp_size

    def _first_rank(self, slot: int) -> int:
        """Who reports of this slot."""
        return slot // self.slots_each * self.ranks_each

    def accounts(self, rank: int) -> RankAccounts:
        group, shard = rank // self.ranks_each, rank % self.num_shards

        def count(blocks: set[Place]) -> int:
            return sum(place[:2] == (group, shard) for place in blocks)

        live = {block for s in self.slots.values() for block in s.blocks}
        pushing = {s.push for s in self.slots.values()}
        late = {block for t, blocks in self.pushes.items() if t not in pushing for block in blocks}
        return RankAccounts(
            rank=rank,
            blocks_total=self.config.num_blocks - 1,
            blocks_live=count(live) + self.miscount.get(rank, 0),
            blocks_reserved=sum(count(a.reserved) for a in self.arrivals.values()),
            blocks_quarantined=count(late - live),
            slots_total=self.slots_each,
            slots_used=sum(slot // self.slots_each == group for slot in self.slots),
        )

    # -- the ranks

    def _execute(self, plan: StepPlan) -> tuple[SlotOutput, ...]:
        for slot in plan.retire:
            del self.slots[slot]
        for transfer in plan.drop:
            del self.arrivals[transfer]
        for arrival in plan.arrivals:
            self._announce(arrival)
        for admit in plan.admit:
            self._admit(admit)
        assert len({s.slot for s in plan.segments}) == len(plan.segments)
        outputs = [self._compute(plan, s) for s in plan.segments]
        return tuple(o for o in outputs if o is not None)

    def _held(self, group: int, blocks: bytes, split_start: int) -> list[Place]:
        split = BlockSplit(self.num_shards, self.config.block_size, split_start)
        ids = unpack(blocks)
        held = [(group, split.rank_of(number), block) for number, block in enumerate(ids)]
        assert len(set(held)) == len(ids), "a block twice in one sequence"
        assert all(0 < block < self.config.num_blocks for _, _, block in held)
        return held

    def _check_free(self, blocks: set[Place]) -> None:
        arriving = (a.blocks for a in self.arrivals.values())
        for other in [*(s.blocks for s in self.slots.values()), *arriving, *self.pushes.values()]:
            assert not blocks & set(other), f"blocks {blocks & set(other)} belong to another sequence"

    def _announce(self, arrival: Arrival) -> None:
        blocks = self._held(arrival.group, arrival.blocks, arrival.split_start)
        assert 0 <= arrival.first_block <= (arrival.prompt_len - 1) // self.config.block_size
        self._check_free(set(blocks[arrival.first_block :]))
        self.arrivals[arrival.transfer_id] = _Arrival(blocks, arrival.first_block)

    def _check_shared(self, blocks: list[Place], tokens: list[int]) -> None:
        size = self.config.block_size
        for position in range(len(blocks) * size):
            place = (blocks[position // size], position % size)
            assert self.written.get(place) == tuple(tokens[: position + 1]), f"shares what was not computed at {position}"

    def _write(self, blocks: list[Place], tokens: list[int], positions: range) -> None:
        for position in positions:
            number, offset = divmod(position, self.config.block_size)
            self.written[blocks[number], offset] = tuple(tokens[: position + 1])

    def _fill(self, arrival: _Arrival, prompt: list[int]) -> None:
        self._write(arrival.blocks, prompt, range(arrival.first_block * self.config.block_size, len(prompt)))

    def _write_own(self, slot: int, first: int, end: int) -> None:
        state, size = self.slots[slot], self.config.block_size
        mine = set(state.blocks[first // size : -(-end // size)])
        others = [s.blocks for number, s in self.slots.items() if number != slot]
        for other in [*others, *(a.blocks for a in self.arrivals.values())]:
            assert not mine & set(other), "written where another one reads"
        self._write(state.blocks, state.tokens, range(first, end))

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self.slots and 0 <= admit.slot < self.config.max_num_seqs
        assert admit.slot // self.slots_each == admit.group, "a slot of another group"
        blocks, tokens = self._held(admit.group, admit.blocks, admit.split_start), list(unpack(admit.token_ids))
        if admit.arrival is not None:
            arrival = self.arrivals.pop(admit.arrival)
            num_shared = arrival.first_block
            assert arrival.blocks == blocks and admit.num_computed == admit.prompt_len == len(tokens) - 1
            self._fill(arrival, tokens[:-1])  # by the lanes, before
        else:
            num_shared, rest = divmod(admit.num_computed, self.config.block_size)
            assert admit.num_computed < admit.prompt_len == len(tokens) and not rest
            self._check_free(set(blocks[num_shared:]))
        self._check_shared(blocks[:num_shared], tokens)
        push = admit.push.transfer_id if admit.push else None
        if push:
            self.pushes[push] = set(blocks)
        self.slots[admit.slot] = _Slot(tokens, admit.prompt_len, admit.num_computed, blocks, push)

    def _compute(self, plan: StepPlan, segment: Segment) -> SlotOutput | None:
        state = self.slots[segment.slot]
        if plan.phase == "prefill":
            assert segment.start == state.num_computed, "a segment starts where the last one ended"
            self._write_own(segment.slot, segment.start, segment.start + segment.num_tokens)
            state.num_computed += segment.num_tokens
            assert segment.is_last == (state.num_computed == state.prompt_len)
            assert segment.is_last or state.num_computed % self.config.block_size == 0
        else:
            assert (segment.start, segment.num_tokens, segment.is_last) == (-1, 1 + self.config.num_draft_tokens, True)
            assert state.num_computed == len(state.tokens) - 1, "decoding before the prompt is computed"
            return self._decode(segment, state)
        assert state.num_computed <= len(state.blocks) * self.config.block_size
        if not segment.is_last:
            return None
        state.tokens.append(state.tokens[-1] + 1)
        return self._said(segment.slot, (state.tokens[-1],))

    def _decode(self, segment: Segment, state: _Slot) -> SlotOutput:
        room = len(state.blocks) * self.config.block_size - state.num_computed
        assert room > 0, "a window begins behind the reservation"
        num_drafts = min(segment.num_tokens, room) - 1
        tokens = tuple(state.tokens[-1] + 1 + i for i in range(1 + min(self.accepted, num_drafts)))
        state.tokens += tokens
        self._write_own(segment.slot, state.num_computed, state.num_computed + len(tokens))
        state.num_computed += len(tokens)
        return self._said(segment.slot, tokens, num_drafts)

    def _said(self, slot: int, tokens: tuple[int, ...], num_drafts: int = 0) -> SlotOutput:
        fault = "too many states" if self.beyond_grammar.intersection(tokens) else ""
        return SlotOutput(slot=slot, token_ids=tokens, num_drafts=num_drafts, fault=fault)
