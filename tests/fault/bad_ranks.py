"""Workers whose ranks misbehave when a test says so: ``python -m tests.fault.bad_ranks prefill --instance p0 ...``.

A rank looks for a file named ``<instance>.<rank>.<what>`` in the folder that the setting ``engine.compile_cache`` names
(these ranks compile nothing): before it joins the others for what it does at the start, before every step for the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.decode_worker import __main__ as decode_main
from longcat_pd.decode_worker.rank import arrival_lanes
from longcat_pd.engine import rank
from longcat_pd.engine.handover import MakeLanes
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.prefill_worker import __main__ as prefill_main
from longcat_pd.prefill_worker.rank import push_lanes
from longcat_pd.progress.steps import Tell
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.worker import run_worker
from tests.processes import Processes

MODULE = "tests.fault.bad_ranks"


class BadRanks(Processes):
    """A cluster whose drivers start such ranks."""

    def start(self, name: str, *overrides: str) -> None:
        service = self.service(name)
        if service.kind == "balancer":
            super().start(name, *overrides)
            return
        role = "prefill" if name.startswith("p") else "decode"
        sets = [word for item in overrides for word in ("--set", item)]
        words = service.arguments[service.arguments.index("--instance") :]
        self.launch(name, ["-m", MODULE, role, *words, "--config", str(self.config), *sets])


def tell(folder: Path, instance: str, rank_number: int, what: str) -> Path:
    """Have one rank do it; the file, for whoever takes it back."""
    path = folder / f"{instance}.{rank_number}.{what}"
    path.touch()
    return path


def prefill(config: str) -> None:
    _run(config, push_lanes)


def decode(config: str) -> None:
    _run(config, arrival_lanes)


def main(arguments: Sequence[str]) -> int:
    build = {"prefill": prefill_main.build, "decode": decode_main.build}[arguments[0]]
    role = "prefill" if arguments[0] == "prefill" else "decode"
    return run_worker(WorkerRole(name=role, rank_entry=f"{MODULE}:{role}", build=build), arguments[1:])  # type: ignore[arg-type]


def _run(config: str, lanes: MakeLanes) -> None:
    spec = wire.from_json(RankSpec, config)
    told = _Told(spec)
    if told("absent"):
        threading.Event().wait()  # it does not even call
    vars(rank)["ModelRunner"] = lambda *args, **more: _BadRunner(told, *args, **more)
    vars(rank)["load_rank_model"] = lambda spec, mesh, *, tell: _load(told, spec, mesh, tell)
    vars(rank)["Mesh"] = _BadMesh if told("late") else Mesh
    rank.run_rank(spec, lanes)


class _Told:
    def __init__(self, spec: RankSpec) -> None:
        self._stem = f"{spec.instance.engine.compile_cache}/{spec.instance.name}.{spec.rank}."

    def __call__(self, what: str) -> bool:
        return os.access(self._stem + what, os.F_OK)


class _BadMesh(Mesh):
    @classmethod
    def join(cls, spec: RankSpec) -> Mesh:
        threading.Event().wait()  # it has called, and does not come to the rendezvous
        raise AssertionError(spec)


def _load(told: _Told, spec: RankSpec, mesh: Mesh, tell: Tell) -> RankModel:
    if told("raise"):
        raise ValueError("a defect of the start")
    if told("memory"):
        raise MemoryError("no more of it")
    if told("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return load_rank_model(spec, mesh, tell=tell)


class _BadRunner(ModelRunner):
    def __init__(self, told: _Told, spec: RankSpec, mesh: Mesh, **more: object) -> None:
        super().__init__(spec, mesh, **more)  # type: ignore[arg-type]
        self._told = told

    def execute(self, plan: StepPlan) -> StepOutput:
        while self._told("spin"):
            pass
        if self._told("fail"):
            raise ValueError("a defect of a step")
        if self._told("skip"):
            self._mesh.traffic.began = _wait_for_ever  # type: ignore[method-assign]
        output = super().execute(plan)
        if self._told("part"):
            axis = next(iter(self._mesh.traffic.axes))
            self._mesh.traffic.began(axis, "one more than the others")
            return replace(output, accounts=self.accounts())
        return output


def _wait_for_ever(_axis: str, _kind: str) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
