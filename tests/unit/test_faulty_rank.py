"""A rank's steps, collectives and outgoing messages with faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from longcat_pd.engine.faulty_rank import FaultySocket, StepFault, faulty_steps, rank_switches
from longcat_pd.engine.plan import Segment, StepOutput, StepPlan
from longcat_pd.faults import Fault
from longcat_pd.parallel.faulty_collectives import FaultyCollectives

STEP = StepPlan(step_id=1, phase="decode", segments=(Segment(slot=0, start=-1, num_tokens=1, is_last=True),))
NO_STEP = StepPlan(step_id=2, phase="decode", retire=(0,))


def execute(plan: StepPlan) -> StepOutput:
    return StepOutput(step_id=plan.step_id, rank=0)


def test_faults_of_a_step_meet_steps_alone() -> None:
    switches = rank_switches(0)
    step = faulty_steps(execute, switches)
    switches.set(Fault(name="raise_in_step", after=1))
    assert [step(plan).step_id for plan in (NO_STEP, STEP, NO_STEP, NO_STEP)] == [2, 1, 2, 2]
    with pytest.raises(StepFault, match="raise_in_step"):
        step(STEP)
    assert step(STEP).step_id == 1


@pytest.mark.parametrize("name", ["slow_step", "spin"])
def test_a_step_takes_longer(name: str) -> None:
    switches = rank_switches(0)
    switches.set(Fault(name=name, seconds=0.2))
    step, began = faulty_steps(execute, switches), time.monotonic()
    assert step(STEP).step_id == 1 and time.monotonic() - began >= 0.2
    step(STEP)
    assert switches.listed() == ()


@pytest.mark.parametrize("name", ["endless_step", "endless_collective"])
def test_what_is_endless_does_not_end(name: str) -> None:
    switches = rank_switches(0)
    switches.set(Fault(name=name))
    collectives = FaultyCollectives(_Collectives(), 2, switches)

    def execute_with_a_collective(plan: StepPlan) -> StepOutput:
        collectives.sum(torch.zeros(1))
        return execute(plan)

    step = faulty_steps(execute_with_a_collective, switches)
    stuck = threading.Thread(target=step, args=(STEP,), daemon=True)
    stuck.start()
    stuck.join(0.3)
    assert stuck.is_alive()
    switches.clear()
    stuck.join(0.1)
    assert stuck.is_alive(), "only with the process"


class _Collectives:
    """Of two ranks, the other of which has zeros. Counts."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.append("gather")
        return torch.stack([x, torch.zeros_like(x)])

    def swap(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.entered.append("swap")
        mine = x.chunk(2, dim)[0]
        return torch.stack([mine, torch.zeros_like(mine)])

    def swap_rows(self, x: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> torch.Tensor:
        self.entered.append("swap_rows")
        return x.new_zeros(sum(into), *x.shape[1:])

    def sum_parts(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.entered.append("sum_parts")
        return x.chunk(2, dim)[0].clone()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.append("sum")
        return x.clone()

    def warm_up(self) -> None:
        self.entered.append("warm_up")

    def leave(self) -> None:
        self.entered.append("leave")


CALLS = {
    "gather": lambda c, x: c.gather(x),
    "swap": lambda c, x: c.swap(x, 1),
    "swap_rows": lambda c, x: c.swap_rows(x, [2, 4], [3, 2]),
    "sum_parts": lambda c, x: c.sum_parts(x, 1),
    "sum": lambda c, x: c.sum(x),
}


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_skipped_has_the_shape_of_what_is_not(kind: str) -> None:
    inner, switches = _Collectives(), rank_switches(0)
    collectives, x = FaultyCollectives(inner, 2, switches), torch.arange(24.0).view(6, 4)
    entered = CALLS[kind](collectives, x)
    switches.set(Fault(name="skip_collective"))
    skipped = CALLS[kind](collectives, x)
    assert inner.entered == [kind] and skipped.shape == entered.shape
    CALLS[kind](collectives, x)
    collectives.warm_up()
    collectives.leave()
    assert inner.entered == [kind, kind, "warm_up", "leave"]


def test_a_silent_rank_says_everything_later_and_in_order() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def send(self, frames: Sequence[bytes]) -> None:
            self.sent += frames

        def close(self) -> None:
            self.sent.append(b"closed")

    recorder, switches = Recorder(), rank_switches(0)
    socket = FaultySocket(recorder, switches)
    switches.set(Fault(name="silent_rank"))
    speaking = threading.Thread(target=lambda: [socket.send([word]) for word in (b"a", b"b")])
    speaking.start()
    speaking.join(0.2)
    assert speaking.is_alive() and recorder.sent == []
    switches.clear("silent_rank")
    speaking.join(5.0)
    socket.close()
    assert recorder.sent == [b"a", b"b", b"closed"]
