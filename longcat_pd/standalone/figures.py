"""What an offline run took: the durations that engine and ranks measure themselves, and the table that tells of them.

Knows no files and no prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from longcat_pd.engine.executor import Executor, OnClosed, OnFailure, Ready
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.roster import RankState


class StepRecorder:
    """An executor that passes everything on and notes how long decode steps take.

    Args:
        decode_ms: where the slowest rank's duration of each is put.
    """

    def __init__(self, executor: Executor, decode_ms: list[float]) -> None:
        self._decode_ms = decode_ms
        self._executor = executor

    async def start(self, on_closed: OnClosed, on_failure: OnFailure) -> Ready:
        """As the executor does."""
        return await self._executor.start(on_closed, on_failure)

    def submit(self, plan: StepPlan) -> asyncio.Future[tuple[StepOutput, ...]]:
        """As the executor does."""
        outputs = self._executor.submit(plan)
        if plan.phase == "decode" and plan.segments:
            outputs.add_done_callback(self._note)
        return outputs

    def rank_states(self) -> tuple[RankState, ...]:
        """As the executor does."""
        return self._executor.rank_states()

    async def close(self) -> None:
        """As the executor does."""
        await self._executor.close()

    def _note(self, outputs: asyncio.Future[tuple[StepOutput, ...]]) -> None:
        if not outputs.cancelled() and outputs.exception() is None:
            self._decode_ms.append(max(output.compute_ms for output in outputs.result()))


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One answered prompt. Durations are those of its life; ``first_at`` and ``ended_at`` are on the run's clock, in s."""

    num_prompt: int
    token_ids: tuple[int, ...]
    finish: str
    prefill_ms: float
    first_token_ms: float
    first_at: float
    ended_at: float


Batch = Sequence[Answered]


def table(batches: Sequence[Batch], decode_ms: Sequence[float], tokens_per_step: float | None) -> Iterator[str]:
    """The lines of the table.

    Args:
        batches: all of a batch were asked at once, one batch after the other.
        decode_ms: by decode step.
        tokens_per_step: that a sequence got from one, its own and accepted drafts; None where nothing was decoded.
    """
    answers = [answer for batch in batches for answer in batch]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    prompts = sum(answer.num_prompt for answer in answers)
    yield f"prompts {len(answers)}, batches {len(batches)}, tokens in {prompts}, tokens out {num_tokens}"
    yield f"{'':<34}{'mean':>10}{'median':>10}{'min':>10}{'max':>10}"
    yield _row("prefill of a prompt, ms", [answer.prefill_ms for answer in answers])
    yield _row("first tokens of a whole batch, ms", [max(a.first_token_ms for a in batch) for batch in batches])
    yield _row("decode step, ms", decode_ms)
    spans = [max(a.ended_at for a in batch) - min(a.first_at for a in batch) for batch in batches]
    decoded = num_tokens - len(answers)
    yield f"{'tokens/s while decoding':<34}{decoded / sum(spans):>10.2f}" if decoded else "nothing was decoded"
    if tokens_per_step is not None:
        yield f"{'tokens per step and sequence':<34}{tokens_per_step:>10.2f}"
        yield f"{'of which accepted drafts':<34}{tokens_per_step - 1.0:>10.2f}"


def _row(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"{name:<34}{'-':>10}{'-':>10}{'-':>10}{'-':>10}"
    columns = (mean(values), median(values), min(values), max(values))
    return f"{name:<34}" + "".join(f"{value:>10.2f}" for value in columns)
