"""An engine with rank processes as in service, driven by this process without a face: texts, and what steps take."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import ProcessExecutor, rank_specs
from longcat_pd.engine.request import Request, SamplingParams
from longcat_pd.engine.scheduler import DECODE_PLANS
from longcat_pd.metrics import Metrics
from longcat_pd.server.launch import ForkedRanks
from longcat_pd.standalone.recorder import StepRecorder, Steps
from longcat_pd.wire import to_json

RANK_ENTRY = "longcat_pd.bench.rank:main"
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Driven:
    """An engine that has started. ``step_s``: see ``Steps``."""

    engine: Engine
    metrics: Metrics
    step_s: defaultdict[int, list[float]]

    async def answers(self, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> list[tuple[int, ...]]:
        """So many tokens behind each prompt, of requests that start together; greedy, and nothing ends them early."""
        deadline = MonotonicClock().now() + LIMIT_S
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        requests = [
            Request(request_id=str(number), prompt_token_ids=tuple(ids), sampling=sampling, deadline=deadline)
            for number, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: Request) -> tuple[int, ...]:
        room = len(request.prompt_token_ids) + request.sampling.max_tokens
        async with self.engine.reserve(request, room) as seq:
            first = await self.engine.prefill(seq)
            return tuple([token.token_id async for delta in self.engine.decode(seq, first) for token in delta.tokens])


@asynccontextmanager
async def driven(
    model: Path, settings: Sequence[str], *, port: int, decode_plans: int = DECODE_PLANS
) -> AsyncIterator[Driven]:
    """An engine of this checkpoint, with ``settings`` as in `serve --set`. Its ranks end with the block."""
    spec = resolve.standalone(str(model), settings, host="127.0.0.1", port=port)
    clock, metrics = MonotonicClock(), Metrics(role=spec.role, instance=spec.name)
    ranks = rank_specs(spec, "bench")
    processes = ForkedRanks(RANK_ENTRY, [to_json(rank) for rank in ranks], clock=clock)
    steps = Steps()
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=StepRecorder(ProcessExecutor(ranks, processes, config=spec.engine, clock=clock), steps),
        eos_token_ids=frozenset(),
        clock=clock,
        metrics=metrics,
        decode_plans=decode_plans,
    )
    await engine.start()
    try:
        yield Driven(engine=engine, metrics=metrics, step_s=steps.step_s)
    finally:
        await engine.close()
