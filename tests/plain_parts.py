"""A compiler for tests: parts of the step as they stand, in the place of graphs. Notes which of them were run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.step_parts import StepPart

RUN: list[str] = []


def compiled(part: StepPart, num_seqs: int, entry: CacheEntry) -> tuple[Callable[..., tuple[Tensor, ...]], bool]:
    def form(*arguments: Tensor) -> tuple[Tensor, ...]:
        assert len(arguments[0]) == num_seqs, "a graph has one size"
        RUN.append(part.name)
        found: tuple[Tensor, ...] = part(*arguments)
        return found

    return form, True
