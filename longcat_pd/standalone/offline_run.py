"""``longcat-pd infer --yaml``: a run of the offline dialect from its file to its table, over ranks in their own processes.

Owns the order of things, what is looked at before a rank starts, and what is printed. The dialect is
``config/offline.py``, prompts are ``dataset.py``, figures ``figures.py``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.checks import ports_of
from longcat_pd.config.offline import OfflineRun, in_dialect, load
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.executor import Executor
from longcat_pd.engine.request import Request, SamplingParams
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import lacking
from longcat_pd.server.face import OFFLINE_LIMIT_S
from longcat_pd.server.parts import make_parts
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK
from longcat_pd.server.text import TextDecoder, TextProcessor
from longcat_pd.sizing import preflight
from longcat_pd.standalone.dataset import prompts
from longcat_pd.standalone.figures import Answered, Batch, StepRecorder, table
from longcat_pd.standalone.online import RANK_ENTRY
from longcat_pd.standalone.service import StandaloneService

_BASES = range(20000, 32000, 10)  # below the range that outgoing connections take their ports from
_TRIES = 100


def run(model_name: str, path: str, overrides: Sequence[str], *, only_check: bool, out: TextIO) -> int:
    """Answer the prompts of one file of the dialect; the exit status. Raises ConfigError before any rank starts."""
    asked = load(path, overrides)
    if asked.model_name != model_name:
        raise ConfigError(f"--model {model_name}: {path} is for model_config.model_name={asked.model_name}")
    spec = _patient(asked.instance)
    found = preflight.inspect(spec)
    for line in found.plan:
        out.write(f"{line}\n")
    out.flush()
    findings = [*found.findings, *lacking(Path(spec.model.path), has_draft=spec.engine.num_draft_tokens > 0)]
    if findings:
        raise ConfigError(in_dialect("\n".join(findings)))
    text = TextProcessor.load(spec.model.path)
    waiting = prompts(asked.data, asked.batch_size, text)
    if only_check:
        return STATUS_OK
    if asked.keeps_compiled:
        return asyncio.run(_Run(asked, spec, text, out=out).answer(waiting))
    with tempfile.TemporaryDirectory(prefix="longcat-pd-compiled-") as folder:
        spec = replace(spec, engine=replace(spec.engine, compile_cache=folder))
        return asyncio.run(_Run(asked, spec, text, out=out).answer(waiting))


def on_free_ports(spec: InstanceSpec) -> InstanceSpec:
    """The same instance on ports that nobody listens on now. Raises ConfigError where none are found."""
    for base in random.sample(_BASES, _TRIES):
        moved = replace(spec, http_port=base)
        if not any(preflight.port_findings(ports_of(moved))):
            return moved
    raise ConfigError(f"no free ports on {spec.host} among {_TRIES} places tried in {_BASES.start} ... {_BASES.stop}")


def _patient(spec: InstanceSpec) -> InstanceSpec:
    """On ports of its own, and with nothing refused for waiting: nobody waits at the other end."""
    engine = replace(spec.engine, queue_timeout_s=OFFLINE_LIMIT_S, max_queued_requests=sys.maxsize)
    return on_free_ports(replace(spec, engine=engine))


class _Run:
    """One life of the ranks: start, batch after batch, table, end."""

    def __init__(self, asked: OfflineRun, spec: InstanceSpec, text: TextProcessor, *, out: TextIO) -> None:
        self._asked = asked
        self._text = text
        self._out = out
        self._clock = MonotonicClock()
        self._steps: list[StepRecorder] = []
        parts = make_parts(spec, RANK_ENTRY, self._clock, watch=self._watched)
        self._acceptance = parts.engine.acceptance
        self._service = StandaloneService(spec, parts.engine, hello=parts.hello, clock=self._clock)

    async def answer(self, waiting: Sequence[tuple[int, ...]]) -> int:
        """Answer all prompts; the exit status."""
        size, batches = self._asked.batch_size, []
        try:
            await self._service.start()
            for start in range(0, len(waiting), size):
                batch = await self._batch(start, waiting[start : start + size])
                for number, answer in enumerate(batch, start + 1):
                    self._tell(number, len(waiting), answer=answer)
                batches.append(batch)
            for line in table(batches, self._steps[0].decode_ms, self._acceptance.mean()):
                self._out.write(f"{line}\n")
            self._out.flush()
        finally:
            await self._service.close()
        return STATUS_FAULT if self._service.readiness().is_lost else STATUS_OK

    def _watched(self, executor: Executor) -> Executor:
        self._steps.append(StepRecorder(executor))
        return self._steps[-1]

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
        async with aclosing(self._service.generate(request)) as deltas:
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
