"""What a rank is told: who it is, then one plan after the other, and, where faults are on, which of them to show.

Owns the plans' socket on the rank's side, and the rank's fault switches with what stands in front of its steps and its
collectives. Executes nothing.
"""

from __future__ import annotations

from functools import partial

from longcat_pd import wire
from longcat_pd.config.keys import admission
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.faulty_rank import Execute, faulty_steps, rank_switches
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.plan import StepPlan, Stop, plan_codec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.faulty_lanes import FaultyCaller
from longcat_pd.parallel.faulty_collectives import FaultyCollectives
from longcat_pd.parallel.mesh import Mesh

_PLAN_POLL_S = 60.0  # nothing hangs on it: a plan wakes the step thread at once


def read_spec(config: str) -> RankSpec:
    """Of the one string that a rank process is started with."""
    return wire.from_json(RankSpec, config)


class Orders:
    """The driver's side as a rank sees it. Belongs to the step thread.

    ``switches``: None where faults are off; then nothing stands in front of anything.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.switches = rank_switches(spec.rank) if spec.instance.faults else None
        place, identity = admission(spec.instance.cluster_key_file), spec.identity
        self._plans = wire.BlockingSocket("dealer", spec.plan_endpoint, bind=False, admission=place, identity=identity)
        self._codec = plan_codec()

    def call(self) -> None:
        """Say that plans can reach this rank from now on."""
        self._plans.send([b""])

    def next_plan(self) -> StepPlan | None:
        """Wait for it; None: there are no more."""
        while True:
            frames = self._plans.recv(_PLAN_POLL_S)
            if frames is None:
                continue
            told = self._codec.decode(frames)
            if isinstance(told, StepPlan):
                return told
            if isinstance(told, Stop):
                return None
            assert self.switches is not None, "an order to fail where faults are off"
            self.switches.obey(told)

    def exposed_mesh(self, mesh: Mesh) -> Mesh:
        """The same mesh; what it exchanges can fail where faults are on."""
        if self.switches is not None:
            mesh.through(partial(FaultyCollectives, switches=self.switches))
        return mesh

    def exposed_lanes(self, lanes: Lanes, cache: KVCache) -> Lanes:
        """The same lanes of this cache; those that push can fail where faults are on."""
        switches, push = self.switches, lanes[0]
        if switches is not None and push is not None:
            push.open_through(lambda caller: FaultyCaller(caller, switches, cache))
        return lanes

    def exposed_steps(self, execute: Execute) -> Execute:
        """What executes plans; a step can fail where faults are on."""
        return execute if self.switches is None else faulty_steps(execute, self.switches)

    def close(self) -> None:
        """No more plans are taken."""
        self._plans.close()
