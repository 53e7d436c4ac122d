"""How the decode step is executed: as it stands, or as compiled graphs: for each size of a batch one for every part of it.

Owns the choice by ``exe_mode``, the padding of a batch to a compiled size, which parts make a step, and the count of
compilations. Knows the step as functions only.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longcat_pd.config.resolve import compile_cache
from longcat_pd.config.schema import EngineConfig, RankSpec
from longcat_pd.engine.compile_cache import CacheEntry, code_digest, short_digest
from longcat_pd.engine.decode_step import DecodeStep, Found
from longcat_pd.engine.step_parts import GraphLimits, StepPart, parts_of, run_parts, shapes_in, shapes_of
from longcat_pd.log import logger
from longcat_pd.parallel.traffic import Traffic
from longcat_pd.progress.steps import Tell, untold

Form = Callable[..., tuple[Tensor, ...]]
Compile = Callable[[StepPart, int, CacheEntry], tuple[Form, bool]]


@dataclass(frozen=True, slots=True)
class Compiler:
    """What is behind an exe_mode. ``module`` has ``compiled`` and is imported when the mode is chosen."""

    module: str
    limits: GraphLimits


COMPILERS: Mapping[str, Compiler] = {
    "inductor": Compiler("longcat_pd.engine.inductor", GraphLimits()),
    "ge_graph": Compiler("longcat_pd.engine.ge_graph", GraphLimits(is_cut=True, writes_once=True)),
    "npugraph_ex": Compiler("longcat_pd.engine.npugraph_ex", GraphLimits(is_cut=True)),
}


class StepForms:
    """The step for any number of sequences up to the slots: compiled before the first one, or as it stands.

    Args:
        facts: what the step depends on beside its configuration and its tensors.
        traffic: of this rank, which graphs that cannot count are counted in.
        tell: of the graphs, as they are made.
    """

    def __init__(
        self, step: DecodeStep, spec: RankSpec, facts: Mapping[str, str], traffic: Traffic, *, tell: Tell = untold
    ) -> None:
        self._step = step
        self._traffic = traffic
        self._tell = tell
        self._padding = step.state.padding
        self._padding_length = step.state.padding_length
        self._sizes: list[int] = []  # that are compiled, the smallest first
        self._forms: dict[int, dict[str, Form]] = {}  # by sequences, and by name of the part
        self.num_compilations = 0
        self._talks = spec.instance.parallel.world_size > 1
        self._is_quiet = spec.rank > 0  # what one rank says, the others would repeat
        engine = spec.instance.engine
        if engine.exe_mode in COMPILERS:
            shape = {
                **facts,
                "exe_mode": engine.exe_mode,
                "layout": f"{spec.instance.parallel} rank {spec.rank}",
                "state": repr(step.state.shape),
                "unfused": " ".join(sorted(engine.unfused)),
                "cache": f"{engine.num_blocks} blocks of {engine.block_size}",
            }
            # configurations of one checkpoint keep their graphs side by side
            name = f"{facts['model']}-{short_digest(shape)}-rank{spec.rank}"
            self._compile(engine, {**shape, "code": code_digest()}, name=name)

    def run(self, slots: Sequence[int], lengths: tuple[int, ...], *, num_seqs: int, num_candidates: int = 0) -> Found:
        """See ``DecodeStep``; ``lengths`` bound what a step that is not compiled looks at.

        ``num_seqs``: at least so many sequences (and one) are computed, with padding for those that are missing.
        """
        size = max(len(slots), num_seqs, 1)
        if self._sizes:
            size = next(compiled for compiled in self._sizes if compiled >= size)
        missing = size - len(slots)
        padded = self._tensor([*slots, *[self._padding] * missing])
        if self._sizes:
            takes_best = num_candidates == 1
            found = run_parts(self._step, self._forms[size], padded, slots=slots, takes_best=takes_best)
        else:
            step = self._step if self._step.state.asks(slots) else self._step.plain
            found = step(padded, (*lengths, *[self._padding_length] * missing), num_candidates)
        drawn, counts, logits = (tensor[: len(slots)] for tensor in found)
        return drawn, counts, logits

    def _tensor(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._step.state.num_tokens.device)

    def _compile(self, engine: EngineConfig, facts: Mapping[str, str], *, name: str) -> None:
        """All parts for all sizes, the largest first: what it needs of memory serves the others too."""
        compiler = COMPILERS[engine.exe_mode]
        is_silent = compiler.limits.is_cut and self._talks
        compile_part: Compile = importlib.import_module(compiler.module).compiled
        say = logger().debug if self._is_quiet else logger().info
        self._sizes = sorted(engine.buckets)
        parts = parts_of(self._step, compiler.limits)
        self._forms = {size: {} for size in self._sizes}
        wanted = list(itertools.product(reversed(self._sizes), parts))
        self._tell("compile", 0, len(wanted))
        for done, (size, part) in enumerate(wanted, 1):
            began = time.monotonic()
            say("step_compiling", num_seqs=size, sizes=list(engine.buckets), part=part.name)
            shape = {**facts, "num_seqs": str(size), "part": part.name}
            entry = CacheEntry(compile_cache(engine), f"{name}-seqs{size}-{part.name}", shape)
            form, is_new = compile_part(part, size, entry)
            self._forms[size][part.name] = self._counted(form, part, size) if is_silent else form
            self.num_compilations += is_new
            seconds = round(time.monotonic() - began, 3)
            say("step_compiled", num_seqs=size, seconds=seconds, source="compiler" if is_new else "cache")
            self._tell("compile", done, len(wanted))

    def _counted(self, form: Form, part: StepPart, num_seqs: int) -> Form:
        """The form, whose every run counts as much as the part does as it stands; which is seen without computing it."""
        examples = shapes_in(part, num_seqs)
        with self._traffic.noted() as note:
            shapes_of(part, examples)
        if not note.kinds:
            return form

        def run(*arguments: Tensor) -> tuple[Tensor, ...]:
            self._traffic.repeat(note)
            return form(*arguments)

        return run
