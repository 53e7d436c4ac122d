"""What the graph compiler makes of a function around the operators: plain torch, streams, cores, events, collectives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.npu.device import install
from tests.npu.offline.capture import CUBES, STREAM, VECTORS, ge_graph, ranks, run_eagerly
from tests.npu.offline.real import SOCS, torchair
from tests.npu.offline.shapes import empty, fake

INT32, INT64, FLOAT = torch.int32, torch.int64, torch.float32
computed = install().computed


def test_cummax_fails() -> None:
    with fake(), pytest.raises(Exception, match=r"cummax.*ge_converter is not implemented"):
        ge_graph(lambda x: torch.cummax(x, 0), empty(4, 8))


def test_an_unknown_keyword_is_refused_in_a_graph() -> None:
    with fake(), pytest.raises(Exception, match="Unknown keyword argument 'eps'"):
        ge_graph(lambda x: torch.ops.npu.npu_rms_norm(x, x[0], eps=1e-6), empty(4, 8))


def test_a_function_that_builds_no_graph_is_an_error() -> None:
    with pytest.raises(AssertionError, match="without a graph"):
        ge_graph(lambda x: 3, torch.zeros(1))


CONVERTS: dict[str, Callable[..., Any]] = {
    "scatter": lambda x, i, y: torch.scatter(x, 1, i, y),
    "scatter_add": lambda x, i, y: torch.scatter_add(x, 1, i, y),
    "sort": lambda x, i, y: torch.sort(x, dim=-1, descending=True),
    "topk of integers": lambda x, i, y: torch.topk(i, 3),
    "searchsorted": lambda x, i, y: torch.searchsorted(i, i, right=True),
    "double": lambda x, i, y: (x.double() / 3.0).cumsum(-1),
    "bits": lambda x, i, y: (i | i) & ~i,
    "floor": lambda x, i, y: i // 4 + i % 7,
    "where": lambda x, i, y: torch.where(x > y, x, -1.0),
    "gather": lambda x, i, y: torch.gather(x, 1, i),
    "cumsum of booleans": lambda x, i, y: (x > y).cumsum(-1),
    "one_hot": lambda x, i, y: torch.nn.functional.one_hot(i[:, 0], 8),
    "multiplication of integers": lambda x, i, y: i * 6364136223846793005 + 1,
}
REFUSED: dict[str, Callable[..., Any]] = {
    "index_put": lambda x, i, y: x.index_put_((i[:, 0],), y),
    "sort.stable": lambda x, i, y: torch.sort(x, dim=-1, stable=True),
    "bitwise_and.Scalar": lambda x, i, y: i & 3,
    "bitwise_xor": lambda x, i, y: i ^ i,
    "isnan": lambda x, i, y: torch.isnan(x),
    "isfinite": lambda x, i, y: torch.isfinite(x),
    "repeat_interleave.self_int": lambda x, i, y: x.repeat_interleave(2, 0),
    "amax": lambda x, i, y: x.amax(-1),
    "all.dim": lambda x, i, y: (x > y).all(-1),
}


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty(4, 8, dtype=FLOAT), empty(4, 8, dtype=INT64), empty(4, 8, dtype=FLOAT)


@pytest.mark.parametrize("name", CONVERTS)
def test_converts(name: str) -> None:
    with fake():
        assert ge_graph(CONVERTS[name], *arguments()).nodes


@pytest.mark.parametrize("name", REFUSED)
def test_does_not_convert(name: str) -> None:
    with fake(), pytest.raises(Exception, match=f"aten.{name}"):
        ge_graph(REFUSED[name], *arguments())


def test_tensors_of_the_host_are_a_weaker_check() -> None:
    """torch takes isfinite apart on the host and not on an NPU, which has its own kernel: trust FakeTensors of the NPU."""
    assert "IsFinite" not in ge_graph(REFUSED["isfinite"], torch.zeros(2, 2), None, None).histogram()


def test_a_write_to_an_input_adds_no_copy() -> None:
    def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, 512), slots.view(-1, 1), rows)
        return rows + 1

    def write_a_twin(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_scatter_nd_update(cache.view(-1, 512), slots.view(-1, 1), rows)

    with fake():
        given = empty(8, 16, 1, 512), empty(4, dtype=INT64), empty(4, 512)
        assert not ge_graph(write, *given).of("TensorMove", "Cast")
        assert ge_graph(write_a_twin, *given).of("TensorMove")


@pytest.mark.parametrize("soc", SOCS)
def test_streams_cores_and_events(soc: str) -> None:
    def overlap(side: Callable[[], torch.Tensor], main: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with torchair.scope.npu_stream_switch("side", 0), torchair.scope.limit_core_num(12, 24):
            first = side()
        with torchair.scope.limit_core_num(8, 16):
            second = main()
        return first, second

    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = overlap(lambda: torch.nn.functional.silu(x), lambda: torch.sigmoid(x))
        return torchair.scope.npu_wait_tensor(first, second) + second

    with fake(soc):
        graph = ge_graph(step, empty(4, 8), soc=soc)
    (side,), (main,), (joined,) = graph.of("Swish"), graph.of("Sigmoid"), graph.of("Add")
    assert (side.attrs[STREAM], side.attrs[CUBES], side.attrs[VECTORS]) == ("side", "12", "24")
    assert STREAM not in main.attrs
    assert (main.attrs[CUBES], main.attrs[VECTORS]) == ("8", "16")
    assert STREAM not in joined.attrs and CUBES not in joined.attrs
    (wait,) = graph.of("Identity")
    assert f"{main.name}:-1" in wait.inputs
    assert [node.name for node in graph.readers(side)] == [wait.name]
    assert side in graph.writers(wait)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    with ranks(4) as group:
        yield group


COLLECTIVES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "all_gather_tensor": (lambda x, group: functional.all_gather_tensor(x, 0, group), "HcomAllGather"),
    "all_reduce": (lambda x, group: functional.all_reduce(x, "sum", group), "HcomAllReduce"),
    "reduce_scatter_tensor": (lambda x, group: functional.reduce_scatter_tensor(x, "sum", 0, group), "HcomReduceScatter"),
    "all_to_all_single": (lambda x, group: functional.all_to_all_single(x.view(-1), None, None, group), "HcomAllToAll"),
}


def into(call: Callable[..., Any], rows: int) -> Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]:
    def function(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        flat = x.view(-1)
        out = flat.new_empty(rows)
        call(out, flat, group=group)
        return out

    return function


COLLECTIVES |= {
    "all_gather_into_tensor": (into(dist.all_gather_into_tensor, 8 * 16 * 4), "HcomAllGather"),
    "reduce_scatter_into_tensor": (into(dist.reduce_scatter_tensor, 8 * 16 // 4), "HcomReduceScatter"),
    "all_to_all_single into a tensor": (into(dist.all_to_all_single, 8 * 16), "HcomAllToAll"),
}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str, soc: str, world: dist.ProcessGroup) -> None:
    call, node = COLLECTIVES[name]
    with fake(soc):
        graph = ge_graph(lambda x: call(x, world) + 1, empty(8, 16), soc=soc)
    (found,) = graph.of(node)
    assert found.attrs["group"].endswith("rank_list=0,1,2,3")
    assert len([other for other in graph.nodes if other.type.startswith("Hcom")]) == 1


def test_functional_collectives_need_no_empty_tensor(world: dist.ProcessGroup) -> None:
    with fake():
        assert not ge_graph(lambda x: COLLECTIVES["all_gather_tensor"][0](x, world) + 1, empty(8, 16)).of("Empty")
        assert ge_graph(lambda x: COLLECTIVES["all_gather_into_tensor"][0](x, world) + 1, empty(8, 16)).of("Empty")


def test_groups_are_told_apart(world: dist.ProcessGroup) -> None:
    pair = dist.new_group([0, 1])
    with fake():
        graph = ge_graph(lambda x: functional.all_reduce(functional.all_reduce(x, "sum", world), "max", pair) + 1, empty(8))
    assert [
        (node.attrs["group"].partition("rank_list=")[2], node.attrs["reduction"]) for node in graph.of("HcomAllReduce")
    ] == [
        ("0,1,2,3", "sum"),
        ("0,1", "max"),
    ]


def test_an_own_operator_can_emit_a_stock_node() -> None:
    """The way round a wrong shape function: an own schema, an own shape, and the node of the stock operator."""
    library = torch.library.Library("planted_npu", "FRAGMENT")
    library.define("sparse_lse(Tensor query, Tensor keys, Tensor chosen, float scale) -> (Tensor, Tensor, Tensor)")

    def shapes(query: torch.Tensor, keys: torch.Tensor, chosen: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        statistic = query.new_empty(1, query.shape[0], query.shape[1], dtype=FLOAT)
        return torch.empty_like(query), statistic, torch.empty_like(statistic)

    library.impl("sparse_lse", shapes, "Meta")

    @torchair.register_fx_node_ge_converter(torch.ops.planted_npu.sparse_lse.default)
    def convert(query: Any, keys: Any, chosen: Any, scale: float, meta_outputs: Any = None) -> Any:
        return torchair.ge.custom_op(
            "SparseFlashAttention",
            inputs={"query": query, "key": keys, "value": keys, "sparse_indices": chosen},
            attrs={"scale_value": torchair.ge.attr.Float(scale), "return_softmax_lse": torchair.ge.attr.Bool(True)},
            outputs=["attention_out", "softmax_max", "softmax_sum"],
        )

    with fake():
        given = empty(4, 64, 512), empty(10, 128, 1, 512), empty(4, 1, 2048, dtype=INT32)
        graph = ge_graph(lambda q, k, c: torch.ops.planted_npu.sparse_lse(q, k, c, 0.125), *given)
    (node,) = graph.of("SparseFlashAttention")
    assert node.arguments == ("query", "key", "value", "sparse_indices")
    assert node.attrs == {"scale_value": 0.125, "return_softmax_lse": True}
    assert graph.uses()["SparseFlashAttention"] == (tuple(sorted(node.arguments)), ("return_softmax_lse", "scale_value"))
    library._destroy()


def test_passes_keep_what_a_function_gives_and_writes() -> None:
    def function(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[:2].copy_(x[:2])
        return torch.nn.functional.silu(x) + cache.sum()

    x, cache, expected = torch.randn(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    torch.testing.assert_close(run_eagerly(function, cache, x), function(expected, x))
    assert torch.equal(cache, expected)


def test_passes_keep_what_operators_give_and_write() -> None:
    needed = {"npu_rms_norm", "npu_scatter_nd_update_", "npu_scatter_nd_update"}
    if not needed <= computed:
        pytest.skip(f"no CPU kernel of {', '.join(sorted(needed - computed))}")

    def function(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        y, _ = torch.ops.npu.npu_rms_norm(x, gamma, epsilon=1e-6)
        torch.ops.npu.npu_scatter_nd_update_(cache, slots, y)
        return y * 2

    x, gamma, slots = torch.randn(4, 64), torch.rand(64), torch.tensor([[3], [1], [7], [2]])
    cache, expected = torch.zeros(8, 64), torch.zeros(8, 64)
    torch.testing.assert_close(run_eagerly(function, cache, slots, x, gamma), function(expected, slots, x, gamma))
    assert torch.equal(cache, expected)
    assert cache[3].any()
