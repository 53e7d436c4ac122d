"""sizing/placement.py: where the 192 ranks are, and what a machine runs; by hand."""

from __future__ import annotations

from pathlib import Path

from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.sizing.placement import machines, places

FILE = Path(__file__).parents[2] / "deploy" / "config" / "cluster" / "longcat2-a2-192.yaml"


def test_a_prefill_rank() -> None:
    found = places(instance_spec(load(FILE), "p0"), 38)
    assert len(found) == 64 and [place.rank for place in found] == list(range(64))
    place = found[25]
    assert (place.node, place.node_rank, place.device, place.stage) == ("10.0.2.2", 1, 9, 3)
    assert place.layers == range(14, 19)
    assert place.coordinates["cp"] == 1 and "kvp" not in place.coordinates
    assert place.groups["pp"] == (1, 9, 17, 25, 33, 41, 49, 57)
    assert place.groups["ep"] == place.groups["cp"] == tuple(range(24, 32))


def test_a_decode_rank() -> None:
    place = places(instance_spec(load(FILE), "d0"), 38)[77]
    assert (place.node, place.node_rank, place.device, place.stage) == ("10.0.1.5", 4, 13, 0)
    assert (place.coordinates["dp"], place.coordinates["kvp"], place.coordinates["ep"]) == (9, 5, 77)
    assert place.groups["lmhead_tp"] == tuple(range(64, 80)) and place.groups["kvp"] == tuple(range(72, 80))
    assert place.groups["ngram_embed_tp"] == tuple(range(128))
    assert place.layers == range(38)


def test_machines_run_decode_first_and_the_balancer_on_the_last() -> None:
    found = machines(load(FILE))
    assert [machine.node for machine in found][::11] == ["10.0.1.1", "10.0.2.4"]
    assert [service.name for service in found[-1].services] == ["p0.3", "balancer"]
    assert {use.port for use in found[-1].ports} == {8081, *range(30010, 30026)}
    assert {use.port for use in found[0].ports} == {*range(31000, 31007), *range(31010, 31026)}
    assert found[-1].hccl.keys() == {"p0.3"}
    told = found[-1].hccl["p0.3"]
    assert told["HCCL_IF_BASE_PORT"] == "8282" and "PYTORCH_NPU_ALLOC_CONF" not in told
