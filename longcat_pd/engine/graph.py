"""How the decode step is executed: as it stands, or as compiled graphs: for each size of a batch one, and where the head is
split one more that looks at the best ids only.

Owns the choice by ``exe_mode``, the padding of a batch to a compiled size, and the count of compilations. Knows the step as
a function only.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from longcat_pd.config.resolve import compile_cache
from longcat_pd.config.schema import EngineConfig, RankSpec
from longcat_pd.engine.compile_cache import CacheEntry, code_digest, short_digest
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.log import logger

Found = tuple[Tensor, Tensor, Tensor]
Form = Callable[[Tensor], Found]
Compile = Callable[[DecodeStep, int, int, CacheEntry], tuple[Form, bool]]

# exe_mode -> the module that has ``compiled``; imported when the mode is chosen
COMPILERS: Mapping[str, str] = {"inductor": "longcat_pd.engine.inductor"}


class StepForms:
    """The step for any number of sequences up to the slots: compiled before the first one, or as it stands.

    Args:
        facts: what the step depends on beside its configuration and its tensors.
    """

    def __init__(self, step: DecodeStep, spec: RankSpec, facts: Mapping[str, str]) -> None:
        self._step = step
        self._padding = step.state.padding
        self._padding_length = step.state.padding_length
        self._forms: dict[tuple[int, int], Form] = {}  # by sequences and candidates
        self.num_compilations = 0
        self._is_quiet = spec.rank > 0  # what one rank says, the others would repeat
        engine = spec.instance.engine
        if engine.exe_mode in COMPILERS:
            shape = {
                **facts,
                "layout": f"{spec.instance.parallel} rank {spec.rank}",
                "state": repr(step.state.shape),
                "unfused": " ".join(sorted(engine.unfused)),
                "cache": f"{engine.num_blocks} blocks of {engine.block_size}",
            }
            # configurations of one checkpoint keep their graphs side by side
            name = f"{facts['model']}-{short_digest(shape)}-rank{spec.rank}"
            self._compile(engine, {**shape, "code": code_digest()}, name=name)

    def run(self, slots: Sequence[int], lengths: tuple[int, ...], *, num_seqs: int, num_candidates: int = 0) -> Found:
        """See ``DecodeStep.forward``; ``lengths`` bound what a step that is not compiled looks at.

        ``num_seqs``: at least so many sequences (and one) are computed, with padding for those that are missing.
        """
        size = max(len(slots), num_seqs, 1)
        if self._forms:
            size = next(compiled for compiled, _ in self._forms if compiled >= size)
        missing = size - len(slots)
        padded = self._tensor([*slots, *[self._padding] * missing])
        if self._forms:
            is_best = num_candidates == 1 and (size, 1) in self._forms
            found = self._forms[size, int(is_best)](padded)
        else:
            found = self._step(padded, (*lengths, *[self._padding_length] * missing), num_candidates)
        drawn, counts, logits = (tensor[: len(slots)] for tensor in found)
        return drawn, counts, logits

    def _tensor(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._step.state.num_tokens.device)

    def _compile(self, engine: EngineConfig, facts: Mapping[str, str], *, name: str) -> None:
        compile_step: Compile = importlib.import_module(COMPILERS[engine.exe_mode]).compiled
        say = logger().debug if self._is_quiet else logger().info
        kinds = (0, 1) if self._step.has_split_head else (0,)
        for size, num_candidates in itertools.product(sorted(engine.buckets), kinds):
            began = time.monotonic()
            say("step_compiling", num_seqs=size, sizes=list(engine.buckets), candidates=num_candidates)
            shape = {**facts, "num_seqs": str(size), "candidates": str(num_candidates)}
            file = f"{name}-seqs{size}{'-best' * num_candidates}"
            entry = CacheEntry(compile_cache(engine), file, shape)
            self._forms[size, num_candidates], is_new = compile_step(self._step, size, num_candidates, entry)
            self.num_compilations += is_new
            seconds = round(time.monotonic() - began, 3)
            say("step_compiled", num_seqs=size, seconds=seconds, source="compiler" if is_new else "cache")
