"""The product's own collectives in graphs of torchair: one node each, of the right group, and counted without running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from longcat_pd.parallel.collectives import AxisGroup
from longcat_pd.parallel.line import Line
from longcat_pd.parallel.traffic import Traffic
from tests.npu.offline.capture import ge_graph, ranks
from tests.npu.offline.shapes import empty, fake

SIZE = 4
RANKS = (0, 2, 4, 6)  # every second one


@pytest.fixture
def group() -> Iterator[AxisGroup]:
    with ranks(2 * SIZE):
        made = dist.new_group(list(RANKS))
        line = Line(axis="ep", rank=0, ranks=RANKS, group=made, traffic=Traffic(), device=torch.device("cpu"))
        yield AxisGroup("ep", SIZE, 0, line, collectives="native")


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391"])
@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("all_gather", "HcomAllGather"),
        ("all_to_all", "HcomAllToAll"),
        ("reduce_scatter", "HcomReduceScatter"),
        ("all_reduce", "HcomAllReduce"),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_collective_is_one_node(group: AxisGroup, soc: str, name: str, node: str, dim: int) -> None:
    call = getattr(group, name)
    with fake(soc):
        graph = ge_graph(lambda x: (call(x) if name == "all_reduce" else call(x, dim)) + 1, empty(8, 16), soc=soc)
    (found,) = graph.of(node)
    assert [other.type for other in graph.nodes if other.type.startswith("Hcom")] == [node]
    assert found.attrs["group"].endswith("rank_list=0,2,4,6")
    assert not graph.of("Empty", "Fill", "Unpack", "ConcatV2", "TensorMove")


def test_a_graph_counts_nothing(group: AxisGroup) -> None:
    assert group._line is not None
    traffic = group._line.traffic
    with fake():
        with traffic.noted() as note:
            group.all_reduce(empty(8, 16))
        ge_graph(lambda x: group.all_reduce(x) + 1, empty(8, 16))
    assert traffic.axes["ep"].num_collectives == 1
    traffic.repeat(note)
    assert traffic.axes["ep"].num_collectives == 2
