"""An engine on a pencil, with a manual clock; requests in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import Delta, Request, SamplingParams
from longcat_pd.engine.scheduler import DECODE_PLANS
from longcat_pd.kv_transfer.messages import Arrival, Push
from longcat_pd.metrics import Metrics
from longcat_pd.wire import pack
from tests.manual_clock import ManualClock, settle
from tests.unit.pencil import Pencil

FAR = 1e9


def engine_config(**changes: Any) -> EngineConfig:
    values = {
        "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8, "num_blocks": 17,
        "max_queued_requests": 8,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def request(
    prompt: list[int], max_tokens: int = 4, *, deadline: float = FAR, name: str = "r", priority: int = 0, **sampling: Any
) -> Request:
    return Request(
        request_id=name,
        priority=priority,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        deadline=deadline,
    )


def push(transfer_id: str) -> Push:
    return Push(
        transfer_id=transfer_id, peer="d0", peer_incarnation="i", lane_host="h", lane_port=1, kvp_size=1, first_rank=0,
        blocks=pack([1]), generation=1,
    )  # fmt: skip


@dataclass
class Rig:
    engine: Engine
    pencil: Pencil
    clock: ManualClock
    metrics: Metrics

    async def answer(self, asked: Request) -> list[Delta]:
        """The standalone role."""
        num_tokens = len(asked.prompt_token_ids) + asked.sampling.max_tokens + self.pencil.config.num_draft_tokens
        async with self.engine.reserve(asked, num_tokens) as seq:
            first = await self.engine.prefill(seq)
            return [delta async for delta in self.engine.decode(seq, first)]

    async def prefill(self, asked: Request, transfer_id: str, acknowledged: asyncio.Event) -> int:
        """The prefill role, up to an acknowledgement that the test gives."""
        async with self.engine.reserve(asked, len(asked.prompt_token_ids)) as seq:
            first = await self.engine.prefill(seq, push(transfer_id))
            await acknowledged.wait()
            return first.token_id

    async def receive(self, asked: Request, transfer_id: str, first: Any) -> list[Delta]:
        """The decode role."""
        num_tokens = len(asked.prompt_token_ids) + asked.sampling.max_tokens + self.pencil.config.num_draft_tokens
        async with self.engine.reserve(asked, num_tokens) as seq:
            self.engine.announce(
                seq,
                Arrival(
                    transfer_id=transfer_id, group=seq.group, peer="p0", peer_incarnation="i",
                    source_cp_size=1, source_layers=(1,), prompt_len=len(asked.prompt_token_ids),
                    blocks=pack(seq.blocks), split_start=seq.split.start, generation=seq.generation,
                    first_block=seq.num_shared,
                ),
            )  # fmt: skip
            self.pencil.prompts[transfer_id] = list(asked.prompt_token_ids)
            reports = await self.engine.transfer_closed(transfer_id)
            assert all(r.ok for r in reports), reports
            return [delta async for delta in self.engine.decode(seq, first)]

    async def assert_idle(self) -> None:
        """Everything is back, by the ranks' own count."""
        self.pencil.auto = True
        while self.pencil.waiting:
            self.pencil.step()
        await settle()
        account = await self.engine.accounting()
        assert account["idle"] and account["outstanding"] == 0 and account["mismatch"] == [], account
        for rank in account["ranks"]:
            assert rank["blocks"]["free"] + rank["blocks"]["cached"] == rank["blocks"]["total"]


@asynccontextmanager
async def rig(
    *, auto: bool = True, parallel: ParallelConfig | None = None, decode_plans: int = DECODE_PLANS, **changes: Any
) -> AsyncIterator[Rig]:
    config, parallel = engine_config(**changes), parallel or ParallelConfig()
    pencil, clock = Pencil(config, parallel, auto), ManualClock()
    metrics = Metrics(role="standalone", instance="s0")
    engine = Engine(
        config,
        parallel,
        executor=pencil,
        eos_token_ids=frozenset({20}),
        clock=clock,
        metrics=metrics,
        decode_plans=decode_plans,
    )
    await engine.start()
    try:
        yield Rig(engine, pencil, clock, metrics)
    finally:
        await engine.close()


def ids(deltas: list[Delta]) -> list[int]:
    return [t.token_id for d in deltas for t in d.tokens]
