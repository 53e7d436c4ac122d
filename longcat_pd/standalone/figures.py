"""What an offline run took: the table that tells of durations, which engine and ranks measure themselves.

Knows no files and no prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median


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
