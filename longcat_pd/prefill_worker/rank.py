"""Entry of a prefill rank process: the rank loop of every pool, with lanes that push attached."""

from __future__ import annotations

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.rank import run_rank
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.plan import travelling_layers
from longcat_pd.kv_transfer.process_group import caller_of
from longcat_pd.kv_transfer.push import PrefillShape, PushLanes
from longcat_pd.kv_transfer.sides import LaneOptions, Report
from longcat_pd.kv_transfer.transport import LaneEnd


def main(config: str) -> None:
    """Run the rank that ``config``, a RankSpec as JSON, describes."""
    run_rank(wire.from_json(RankSpec, config), push_lanes)


def push_lanes(spec: RankSpec, cache: KVCache, report: Report) -> Lanes:
    """The lanes of this rank."""
    instance = spec.instance
    me = LaneEnd(instance.name, spec.incarnation, spec.rank)
    layers = travelling_layers(instance.parallel.layers_per_stage, has_draft=instance.engine.num_draft_tokens > 0)
    shape = PrefillShape(layers_per_stage=layers, cp_size=instance.parallel.cp_size)
    options = LaneOptions.of(instance.transfer)
    caller = caller_of(spec, me)
    return PushLanes(me, shape, cache=cache, caller=caller, options=options, report=report), None
