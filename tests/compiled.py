"""Ranks whose decode step is compiled, and a life for them: sequences that join, leave and take each other's slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.plan import Segment, SlotOutput, SlotSampling, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from tests.slots import admit

# the library's compiler uses what the library deprecates, when it is imported
compiler_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def with_engine(spec: RankSpec, **changes: object) -> RankSpec:
    """The same rank with other settings of its engine."""
    engine = replace(spec.instance.engine, **changes)  # type: ignore[arg-type]
    return replace(spec, instance=replace(spec.instance, engine=engine))


def compiled(spec: RankSpec, folder: Path) -> RankSpec:
    """The same rank with one graph, which has room for all slots."""
    slots = spec.instance.engine.max_num_seqs
    return with_engine(spec, exe_mode="inductor", buckets=(slots,), compile_cache=str(folder))


@dataclass
class Said:
    """What a sequence brought: tokens, their log-probs, the best ids and theirs, and how many each window brought."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)

    def add(self, slot: SlotOutput) -> None:
        self.ids += slot.token_ids
        self.logprobs += slot.logprobs
        self.top += slot.top


@dataclass(frozen=True)
class Work:
    """One sequence that is to be decoded."""

    prompt: list[int]
    sampling: SlotSampling
    num_new: int


@dataclass(frozen=True)
class Crowd:
    """At most ``at_once`` decode; ``joining`` more are let in before every second step."""

    at_once: int
    joining: int


class Life:
    """Plans for one rank, as a scheduler would make them, until all work is done."""

    def __init__(self, runner: ModelRunner, *, num_drafts: int, num_ranks: int, block_size: int) -> None:
        self._runner = runner
        self._num_drafts = num_drafts
        self._block_size = block_size
        self._pool = GroupPool(0, num_ranks, runner.cache.num_blocks)
        self._step = 0

    def answers(self, work: Sequence[Work], crowd: Crowd) -> list[Said]:
        """What all of them say, in the order of ``work``; no more than each wants."""
        said = [Said() for _ in work]
        waiting, live, rounds = deque(enumerate(work)), dict[int, int](), 0
        while waiting or live:
            if rounds % 2 == 0:
                places = sorted({*range(crowd.at_once)} - {*live})[: crowd.joining]
                joining = {slot: waiting.popleft() for slot in places if waiting}
                self._join(joining, said)
                live |= {slot: number for slot, (number, _) in joining.items()}
            self._decode(live, said)
            gone = [slot for slot, number in live.items() if self._num_known(slot, work[number]) >= work[number].num_new]
            self._execute("decode", retire=tuple(gone))
            for slot in gone:
                del live[slot]
            rounds += 1
        for one, wanted in zip(said, work, strict=True):
            del one.ids[wanted.num_new :], one.logprobs[wanted.num_new :], one.top[wanted.num_new :]
        return said

    def _num_known(self, slot: int, work: Work) -> int:
        """By what is true on all ranks, also those that report nothing."""
        return self._runner._slots[slot].num_tokens - len(work.prompt)

    def _join(self, joining: dict[int, tuple[int, Work]], said: list[Said]) -> None:
        if not joining:
            return
        admits = tuple(
            admit(
                self._pool,
                slot,
                work.prompt,
                block_size=self._block_size,
                room=work.num_new + self._num_drafts + 1,
                sampling=work.sampling,
            )
            for slot, (_, work) in joining.items()
        )
        whole = tuple(
            Segment(slot=slot, start=0, num_tokens=len(work.prompt), is_last=True) for slot, (_, work) in joining.items()
        )
        for out in self._execute("prefill", admit=admits, segments=whole):
            said[joining[out.slot][0]].add(out)

    def _decode(self, live: dict[int, int], said: list[Said]) -> None:
        if not live:
            return
        windows = tuple(Segment(slot=s, start=-1, num_tokens=1 + self._num_drafts, is_last=True) for s in sorted(live))
        for out in self._execute("decode", segments=windows):
            said[live[out.slot]].add(out)
            said[live[out.slot]].runs.append(len(out.token_ids))

    def _execute(self, phase: str, **what: tuple[object, ...]) -> tuple[SlotOutput, ...]:
        self._step += 1
        plan = StepPlan(step_id=self._step, phase=phase, **what)  # type: ignore[arg-type]
        return self._runner.execute(plan).slots
