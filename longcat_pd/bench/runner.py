"""Model runners in a process of their own, driven by plans without a driver: decode steps and prompt chunks by themselves.

The process makes the runners it is told of, says that they are ready, and then obeys one order a line with one answer a
line; whoever orders decides what is compared in turn with what. Knows no rows of the page.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from longcat_pd import log
from longcat_pd.bench.client import prompt
from longcat_pd.bench.orders import READY, Order, Setup, Took
from longcat_pd.config import resolve
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.plan import Admit, Segment, SlotSampling, StepOutput, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from longcat_pd.wire import pack

_GREEDY = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)
_PORT = 1  # one rank listens nowhere


class Bench:
    """One runner of one rank, and the sequences that are measured on it."""

    def __init__(self, setup: Setup) -> None:
        spec = resolve.standalone(setup.model, setup.settings, host="127.0.0.1", port=_PORT)
        self._engine = spec.engine
        self._runner = ModelRunner(rank_specs(spec, "bench")[0], Mesh.single())
        self._step_id = 0

    def obey(self, order: Order) -> Took:
        """Measure what is ordered, with fresh sequences, which are gone afterwards."""
        slots = range(order.batch)
        prompts = [prompt(order.length, seed=order.seed * 1000 + slot) for slot in slots]
        whole = tuple(Segment(slot=slot, start=0, num_tokens=order.length, is_last=True) for slot in slots)
        admit = tuple(self._admit(slot, ids, order.grammar) for slot, ids in enumerate(prompts))
        took, _ = self._execute(StepPlan(step_id=0, phase="prefill", admit=admit, segments=whole))
        found = Took(step_s=took, seconds=took, steps=1, tokens=order.batch)
        if order.num_tokens:
            found = self._decoded(order)
        self._execute(StepPlan(step_id=0, phase="decode", retire=tuple(slots)))
        return found

    def _decoded(self, order: Order) -> Took:
        """Steps of all sequences until they have ``num_tokens`` new ones on average."""
        width = 1 + self._engine.num_draft_tokens
        windows = tuple(Segment(slot=slot, start=-1, num_tokens=width, is_last=True) for slot in range(order.batch))
        times, tokens = list[float](), 0
        while tokens < order.batch * order.num_tokens:
            took, output = self._execute(StepPlan(step_id=0, phase="decode", segments=windows))
            times.append(took)
            tokens += sum(len(slot.token_ids) for slot in output.slots)
        return Took(step_s=statistics.median(times), seconds=sum(times), steps=len(times), tokens=tokens)

    def _execute(self, plan: StepPlan) -> tuple[float, StepOutput]:
        self._step_id += 1
        numbered = StepPlan(
            step_id=self._step_id, phase=plan.phase, admit=plan.admit, segments=plan.segments, retire=plan.retire
        )
        began = time.perf_counter()
        output = self._runner.execute(numbered)
        return time.perf_counter() - began, output

    def _admit(self, slot: int, ids: Sequence[int], grammar: str) -> Admit:
        """Each slot has room for the longest sequence, and always the same blocks."""
        room = -(-(self._engine.max_model_len + self._engine.num_draft_tokens) // self._engine.block_size)
        return Admit(
            slot=slot,
            group=0,
            token_ids=pack(ids),
            prompt_len=len(ids),
            num_computed=0,
            blocks=pack(range(1 + slot * room, 1 + (slot + 1) * room)),
            split_start=0,
            sampling=replace(_GREEDY, grammar=grammar),
        )


def answers(setups: Sequence[Setup], orders: Iterator[str]) -> Iterator[str]:
    """A line when all runners are ready, then one for each order."""
    benches = {setup.name: Bench(setup) for setup in setups}
    yield READY
    for line in orders:
        order = Order.from_json(line)
        yield benches[order.name].obey(order).to_json()


def main() -> None:
    """Obey orders until standard input ends. The argument: the setups as JSON."""
    platform_of("cpu").prepare_rank()
    log.set_up()
    setups = [Setup(**fields) for fields in json.loads(sys.argv[1])]
    for line in answers(setups, iter(sys.stdin.readline, "")):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
