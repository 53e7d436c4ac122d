"""A rank process: two threads of its own (steps here, an outbox that owns the output socket) and those of its lanes.

Takes plans in order and answers each; ends when it is told or when a step fails. (``server/launch.py`` ends it when its
driver is gone.) A thread that ends by a defect ends the rank too, so that nothing waits for what nobody does any more.
Knows neither role nor requests: what differs between pools is which lanes are attached.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import MakeLanes, no_lanes
from longcat_pd.engine.orders import Orders, read_spec
from longcat_pd.engine.outbox import Outbox
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.errors import ConfigError, LongcatError
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of, take_place

STATUS_FAULT = 1
STATUS_CONFIG = 2


def main(config: str) -> None:
    """Entry of a rank process without lanes. ``config``: a RankSpec as JSON."""
    run_rank(read_spec(config), no_lanes)


def run_rank(spec: RankSpec, make_lanes: MakeLanes) -> None:
    """The life of a rank process. Returns after a Stop; ends the process with a status when something fails."""
    platform_of(spec.instance.device).prepare_rank()
    orders = Orders(spec)
    outbox = Outbox(spec, orders.switches)
    steps = _Steps(spec, orders, outbox)
    threading.excepthook = lambda thread: steps.fail(thread.exc_value)
    try:
        steps.run(make_lanes)
    except Exception as error:
        steps.fail(error)
    outbox.close()


class StepWatch:
    """Measures decode steps, for ``StepOutput``.

    Waiting for the driver counts only where there was work all the time: between two decode steps of which the second goes
    on with a sequence of the first. All waits between them are summed, those before other plans included; a rank without
    work, and one whose sequences have all ended, waits for nothing.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ended_at = now()
        self._waited_s = 0.0  # since the last decode step
        self._decoded: set[int] = set()  # slots of that step which have kept their tenant

    def execute(self, plan: StepPlan, run: Callable[[StepPlan], StepOutput]) -> StepOutput:
        """What ``run`` makes of the plan; for a decode step with the two durations."""
        began = self._now()
        self._waited_s += began - self._ended_at
        self._decoded.difference_update(plan.retire)
        output = run(plan)
        self._ended_at = self._now()
        if plan.phase == "decode" and plan.segments:
            slots = {segment.slot for segment in plan.segments}
            waited_s = self._waited_s if slots & self._decoded else 0.0
            output = replace(output, waited_ms=waited_s * 1000.0, compute_ms=(self._ended_at - began) * 1000.0)
            self._waited_s, self._decoded = 0.0, slots
        return output


class _Steps:
    """The step thread: join, load, then one plan after the other."""

    def __init__(self, spec: RankSpec, orders: Orders, outbox: Outbox) -> None:
        self._spec = spec
        self._orders = orders
        self._outbox = outbox
        self._step_id = 0  # of the plan in work, for the report of a fault

    def fail(self, error: BaseException | None) -> NoReturn:
        """Tell the driver, then end the process. From any thread. What is expected to happen needs no trace."""
        fault = error.message if isinstance(error, LongcatError) else "".join(traceback.format_exception(error))
        self._outbox.put(StepOutput(step_id=self._step_id, rank=self._spec.rank, fault=fault))
        self._outbox.close()
        # not sys.exit: process groups with a dead member may hang in their destructors
        os._exit(STATUS_CONFIG if isinstance(error, ConfigError) else STATUS_FAULT)

    def run(self, make_lanes: MakeLanes) -> None:
        """Until a Stop."""
        self._orders.call()
        take_place(self._spec)
        mesh = self._orders.exposed_mesh(Mesh.join(self._spec))
        loaded = load_rank_model(self._spec, mesh, tell=self._outbox.tell)
        lanes = make_lanes(self._spec, loaded.cache, self._outbox.put)
        push, arrival = self._orders.exposed_lanes(lanes, loaded.cache)
        runner = ModelRunner(self._spec, mesh, loaded=loaded, push=push, arrival=arrival)
        self._outbox.report_from(runner.accounts)
        self._outbox.put(runner.ready())
        self._execute_plans(self._orders.exposed_steps(runner.execute))
        runner.close()
        self._orders.close()
        mesh.leave()

    def _execute_plans(self, execute: Callable[[StepPlan], StepOutput]) -> None:
        watch = StepWatch(time.monotonic)
        while (plan := self._orders.next_plan()) is not None:
            self._step_id = plan.step_id
            self._outbox.note_step(plan.step_id)
            self._outbox.put(watch.execute(plan, execute))
            self._outbox.note_step(0)
