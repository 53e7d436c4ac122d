"""The batches of an offline run: asked of an engine over rank processes, their texts told, and the table at the end.

Knows what is asked and what was measured; files and checks are ``offline_run.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TextIO

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.offline import OfflineRun
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.request import Request, SamplingParams
from longcat_pd.server.face import OFFLINE_LIMIT_S
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK
from longcat_pd.server.text import TextDecoder, TextProcessor
from longcat_pd.standalone.figures import Answered, Batch, table
from longcat_pd.standalone.measured import over_processes
from longcat_pd.standalone.start import ShownStart


class Batches:
    """One life of the ranks: start, batch after batch, table, end.

    Args:
        spec: of ``asked``, as it is started.
        text: of the same checkpoint.
        progress: where the start is told of.
    """

    def __init__(
        self, asked: OfflineRun, spec: InstanceSpec, text: TextProcessor, *, out: TextIO, progress: TextIO
    ) -> None:
        self._asked = asked
        self._text = text
        self._out = out
        self._clock = MonotonicClock()
        self._start = ShownStart(progress, self._clock, with_lines=True)
        self._measured = over_processes(spec, self._clock, on_progress=self._start.progressed)

    async def answer(self, waiting: Sequence[tuple[int, ...]]) -> int:
        """Answer all prompts; the exit status."""
        service, size, batches = self._measured.service, self._asked.batch_size, []
        try:
            await self._start.start(service)
            for start in range(0, len(waiting), size):
                batch = await self._batch(start, waiting[start : start + size])
                for number, answer in enumerate(batch, start + 1):
                    self._tell(number, len(waiting), answer=answer)
                batches.append(batch)
            steps = self._measured.steps
            for line in table(batches, steps.all_ms(), steps.tokens_per_row()):
                self._out.write(f"{line}\n")
            self._out.flush()
        finally:
            await service.close()
        return STATUS_FAULT if service.readiness().is_lost else STATUS_OK

    async def _batch(self, start: int, ids: Sequence[tuple[int, ...]]) -> Batch:
        tasks = [asyncio.ensure_future(self._one(f"prompt-{start + place}", prompt)) for place, prompt in enumerate(ids, 1)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, name: str, ids: tuple[int, ...]) -> Answered:
        request = Request(
            request_id=name,
            prompt_token_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=self._asked.max_new_tokens),
            deadline=self._clock.now() + OFFLINE_LIMIT_S,
        )
        tokens: list[int] = []
        times: list[float] = []
        finish = ""
        async with aclosing(self._measured.service.generate(request)) as deltas:
            async for delta in deltas:
                times.append(self._clock.now())
                tokens.extend(token.token_id for token in delta.tokens)
                finish = delta.finish.value if delta.finish else finish
        timings = request.life.timings_ms()
        return Answered(
            num_prompt=len(ids),
            token_ids=tuple(tokens),
            finish=finish,
            prefill_ms=timings["prefill"],
            first_token_ms=timings["first_token"],
            first_at=times[0],
            ended_at=times[-1],
        )

    def _tell(self, number: int, total: int, *, answer: Answered) -> None:
        decoder = TextDecoder(self._text)
        shown = "".join(decoder.push(token_id) for token_id in answer.token_ids)
        counts = f"{answer.num_prompt} tokens in, {len(answer.token_ids)} out ({answer.finish})"
        self._out.write(f"--- prompt {number} of {total}: {counts}\n{shown}\n")
        self._out.flush()
