"""Entry of a decode rank process: the rank loop of every pool, with lanes that receive attached."""

from __future__ import annotations

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.rank import run_rank
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.arrival import ArrivalLanes
from longcat_pd.kv_transfer.hello import LANE_PORT_OFFSET
from longcat_pd.kv_transfer.process_group import listener_of
from longcat_pd.kv_transfer.sides import LaneOptions, Report
from longcat_pd.kv_transfer.transport import LaneEnd

_STORE_TIMEOUT_S = 1800.0  # rank 0 serves the store and may have more to load; the driver's own limit ends a start


def main(config: str) -> None:
    """Run the rank that ``config``, a RankSpec as JSON, describes."""
    run_rank(wire.from_json(RankSpec, config), arrival_lanes)


def arrival_lanes(spec: RankSpec, cache: KVCache, report: Report) -> Lanes:
    """The lanes of this rank."""
    instance = spec.instance
    me = LaneEnd(instance.name, spec.incarnation, spec.rank)
    address = (instance.host, instance.http_port + LANE_PORT_OFFSET)
    listener = listener_of(spec, me, address, _STORE_TIMEOUT_S)
    options = LaneOptions.of(instance.transfer)
    lanes = ArrivalLanes(me, instance.parallel.kvp_size, cache=cache, listener=listener, options=options, report=report)
    return None, lanes
