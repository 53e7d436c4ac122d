"""parallel/collectives.py on real groups: every operation <-> its definition, all types, empty tensors, deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.fx.experimental.proxy_tensor import make_fx

from longcat_pd.config.schema import HcclConfig, HcclOptions, NpuConfig, ParallelConfig, RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.parallel import mesh as mesh_module
from longcat_pd.parallel.collectives import AxisGroup
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from tests.parity.gloo import on_ranks, rank_specs

NOWHERE = Path("/nonexistent")
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn)


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_moves(spec: RankSpec, mesh: Mesh) -> None:
    axis = mesh.axis("kvp")
    n, me = axis.size, axis.rank
    for dtype in TYPES:
        for shape in ((2 * n, 3), (0, 3), (n, 0)):
            everyones = [value(rank, shape, dtype) for rank in range(n)]
            for dim in (0, 1) if shape == (2 * n, 3) else (0,):
                assert same(axis.all_gather(everyones[me], dim), torch.cat([e.clone() for e in everyones], dim))
            parts = [e.tensor_split(n, 0)[me] for e in everyones]
            assert same(axis.all_to_all(everyones[me]), torch.cat(parts))
    single = value(me, (4,), torch.int64)[::2][:1]  # contiguous, with a stride of two
    assert same(axis.all_gather(single), torch.cat([value(rank, (4,), torch.int64)[:1] for rank in range(n)]))
    wide = [value(rank, (2, 3, 2 * n)) for rank in range(n)]
    assert same(axis.all_to_all(wide[me], 2), torch.cat([w.chunk(n, 2)[me] for w in wide], 2))
    assert same(
        axis.all_to_all(wide[me].transpose(0, 1), 2), torch.cat([w.transpose(0, 1).chunk(n, 2)[me] for w in wide], 2)
    )


def check_sums(spec: RankSpec, mesh: Mesh) -> None:
    axis = mesh.axis("kvp")
    n, me = axis.size, axis.rank
    for shape in ((3, 5), (40000 + 7,), (0, 4), (4 * n, 9000)):  # below and above the size from which parts are reduced
        for dtype in (torch.float32, torch.bfloat16):
            everyones = [value(rank, shape, dtype) for rank in range(n)]
            wide = everyones[0].float()
            for other in everyones[1:]:
                wide = wide + other
            mine = everyones[me].clone()
            assert torch.equal(axis.all_reduce(mine), wide.to(dtype))  # the same bits everywhere
            assert torch.equal(mine, everyones[me])
            if shape[0] == 4 * n:
                assert torch.equal(axis.reduce_scatter(mine), wide.to(dtype).chunk(n)[me])
    counts = [torch.full((3,), 2**40 + rank) for rank in range(n)]
    assert torch.equal(axis.all_reduce(counts[me]), torch.stack(counts).sum(0))


def check_point_to_point(spec: RankSpec, mesh: Mesh) -> None:
    axis = mesh.axis("kvp")
    n, me = axis.size, axis.rank
    pending = [axis.start_send(value(10 * me + i, (3, i)), (me + 1) % n) for i in range(4)]
    previous = (me - 1) % n
    for i in range(4):  # an empty one among them
        assert same(axis.recv((3, i), torch.float32, previous), value(10 * previous + i, (3, i)))
    for send in pending:
        send.wait()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tolist() == b.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [check_moves, check_sums])
def test_operations(num_ranks: int, check: object) -> None:
    parallel = ParallelConfig(kvp_size=num_ranks, attn_tp_size=num_ranks)
    assert callable(check)
    on_ranks(rank_specs(NOWHERE, parallel), check)


def both(mesh: Mesh) -> tuple[AxisGroup, AxisGroup]:
    """The same ranks, joined in pairs, and by the backend's own collectives."""
    axis = mesh.axis("kvp")
    assert axis._line is not None
    return axis, AxisGroup(axis.name, axis.size, axis.rank, axis._line, collectives="native")


def check_native_moves(spec: RankSpec, mesh: Mesh) -> None:
    pairs, native = both(mesh)
    n, me = pairs.size, pairs.rank
    for dtype in TYPES:
        for shape in ((2 * n, 3 * n), (0, n), (n, 0)):
            x = value(me, shape, dtype)
            for dim in (0, 1, -1):
                assert same(native.all_gather(x, dim), pairs.all_gather(x, dim))
                assert same(native.all_to_all(x, dim), pairs.all_to_all(x, dim))
            assert same(native.all_gather(x.t()), pairs.all_gather(x.t()))  # not contiguous
        counts = [[(frm + 2 * to) % 3 for to in range(n)] for frm in range(n)]  # some of them none
        out, into = counts[me], [row[me] for row in counts]
        rows = value(me, (sum(out), 2, 3), dtype)
        assert same(native.all_to_all_rows(rows, out, into), pairs.all_to_all_rows(rows, out, into))
        nothing = rows[:0]
        assert same(native.all_to_all_rows(nothing, [0] * n, [0] * n), nothing)


def check_native_sums(spec: RankSpec, mesh: Mesh) -> None:
    pairs, native = both(mesh)
    for shape in ((2 * pairs.size, 5), (pairs.size, 20000), (0, pairs.size), (3, pairs.size, 2)):
        for dtype, exact in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
            x = value(pairs.rank, shape, dtype)
            before = x.clone()
            total = native.all_reduce(x)
            assert torch.equal(x, before)
            torch.testing.assert_close(total, pairs.all_reduce(x), rtol=exact, atol=exact)
            assert torch.equal(total.expand(1, *shape), pairs.all_gather(total.unsqueeze(0))[:1]), (
                "the same bits everywhere"
            )
            for dim in (0, 1) if shape[0] % pairs.size == 0 else (1,):
                if shape[dim] % pairs.size == 0:
                    part = native.reduce_scatter(x, dim)
                    torch.testing.assert_close(part, pairs.reduce_scatter(x, dim), rtol=exact, atol=exact)
    counts = torch.full((pairs.size,), 2**40 + pairs.rank)
    assert torch.equal(native.all_reduce(counts), pairs.all_reduce(counts))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("check", [check_native_moves, check_native_sums])
def test_the_backends_own_do_the_same(num_ranks: int, check: object) -> None:
    assert callable(check)
    on_ranks(rank_specs(NOWHERE, ParallelConfig(kvp_size=num_ranks, attn_tp_size=num_ranks)), check)


def check_counts(spec: RankSpec, mesh: Mesh) -> tuple[int, int]:
    pairs, native = both(mesh)
    x, found = torch.ones(4 * pairs.size, 6), []
    for axis in (pairs, native):
        before = mesh.traffic.axes.pop("kvp", None)
        assert before is None or axis is native
        axis.all_gather(x)
        axis.all_to_all(x)
        axis.reduce_scatter(x)
        axis.all_to_all_rows(x, [4] * axis.size, [4] * axis.size)
        found.append(mesh.traffic.axes["kvp"])
    assert found[0] == found[1]
    sums = []
    for axis in (pairs, native):
        before = mesh.traffic.axes["kvp"].sent_bytes
        axis.all_reduce(torch.ones(2**20 + 1))  # large enough that pairs exchange parts too
        sums.append(mesh.traffic.axes["kvp"].sent_bytes - before)
    assert sums[0] == sums[1]
    return found[1].num_collectives, found[1].digest


def test_both_count_alike() -> None:
    one, other = on_ranks(rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2)), check_counts)
    assert one == other


class Exchanging(torch.nn.Module):
    """What a step does with a group."""

    def __init__(self, group: AxisGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.group.all_to_all(x * 2, 1)
        part = self.group.reduce_scatter(self.group.all_gather(heads) + 1)
        return part + self.group.all_reduce(part) + self.group.all_gather(part, 1)[:, : part.shape[1]]


def check_graph(spec: RankSpec, mesh: Mesh) -> list[str]:
    """One graph without a break, with the eager result; nothing is counted in it, and a note makes up for it."""
    native = both(mesh)[1]
    step, graphs = Exchanging(native), list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    x = value(mesh.rank, (2 * native.size, 3 * native.size))
    with torch.inference_mode():
        with mesh.traffic.noted() as note:
            expected = step(x)
        once = replace(mesh.traffic.axes["kvp"])
        compiled = torch.compile(step, backend=keep, fullgraph=True, dynamic=False)
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
    assert mesh.traffic.axes["kvp"] == once
    mesh.traffic.repeat(note)
    assert mesh.traffic.axes["kvp"].num_collectives == 2 * once.num_collectives
    with FakeTensorMode() as fake, mesh.traffic.noted() as found_without_data:
        step(fake.from_tensor(x))
    assert found_without_data == note, "a step can be noted without executing it"
    (graph,) = graphs
    found = make_fx(step, tracing_mode="fake")(x)  # the operators themselves, without dynamo
    named = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
    assert len(named) == 10, "five collectives and their waits"
    return [str(node.target) for node in found.graph.nodes if "c10d" in str(node.target)]


def test_the_backends_own_are_nodes_of_one_graph() -> None:
    one, other = on_ranks(rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2)), check_graph)
    kinds = [name.split(".")[1] for name in one if "wait" not in name]
    wanted = [
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
        "all_gather_into_tensor",
    ]
    assert one == other
    assert kinds == wanted


def check_names(spec: RankSpec, mesh: Mesh) -> tuple[str, bool]:
    before = {axis: replace(found) for axis, found in mesh.traffic.axes.items()}
    assert mesh.axis("ep").communicator == ""
    mesh.warm_up()
    assert mesh.traffic.axes == before, "no traffic of the model's"
    assert mesh.axis("kvp").communicator == ""
    name = mesh.axis("ep").communicator
    ranks = dist.get_process_group_ranks(_resolve_process_group(name))  # type: ignore[arg-type]
    assert ranks == list(mesh.layout.group_of(mesh.rank, "ep"))
    ep = mesh.axis("ep")
    assert ep._line is not None
    return name, name != ep._line.group.group_name


@pytest.mark.parametrize("collectives", ["pairwise", "native"])
def test_the_fused_pair_has_a_communicator_of_its_own(collectives: str) -> None:
    parallel = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, ep_size=2, moe_dispatch="fused")
    found = on_ranks(rank_specs(NOWHERE, parallel), check_names, collectives=collectives)
    names = [name for name, _ in found]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(is_own for _, is_own in found)


def check_shared(spec: RankSpec, mesh: Mesh) -> list[bool]:
    groups = [mesh.axis(name)._line for name in ("kvp", "attn_tp", "ep")]
    kvp, attn_tp, ep = (line.group.group_name for line in groups if line is not None)
    mesh.warm_up()
    return [kvp == attn_tp, kvp == ep]


def test_axes_of_the_same_ranks_share_a_group_unless_their_options_differ() -> None:
    specs = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2))
    assert on_ranks(specs, check_shared) == [[True, True]] * 2
    hccl = HcclConfig(ep=HcclOptions(buffer_mb=400))
    npu = replace(specs[0].instance, npu=NpuConfig(soc="A3", hccl=hccl))
    specs = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2))
    assert on_ranks([replace(spec, instance=npu) for spec in specs], check_shared) == [[True, False]] * 2


def test_experts_that_run_beside_the_rest_share_no_group_with_it() -> None:
    specs = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2, ep_size=2))
    overlapped = replace(specs[0].instance, npu=NpuConfig(is_moe_overlapped=True))
    assert on_ranks([replace(spec, instance=overlapped) for spec in specs], check_shared) == [[True, False]] * 2


def check_chain(spec: RankSpec, mesh: Mesh) -> None:
    mesh.warm_up()
    assert mesh.traffic.axes == {}
    pp = mesh.axis("pp")
    if pp.rank > 0:
        assert pp.recv((2,), torch.float32, pp.rank - 1).tolist() == [1.0, 2.0]
    if pp.rank < 2:
        pp.send(torch.tensor([1.0, 2.0]), pp.rank + 1)


@pytest.mark.parametrize("collectives", ["pairwise", "native"])
def test_neighbours_are_warmed_up_and_their_messages_stay_in_order(collectives: str) -> None:
    on_ranks(rank_specs(NOWHERE, ParallelConfig(pp_size=3)), check_chain, collectives=collectives)


def test_point_to_point() -> None:
    on_ranks(rank_specs(NOWHERE, ParallelConfig(kvp_size=3, attn_tp_size=3)), check_point_to_point)


def place(spec: RankSpec, mesh: Mesh) -> tuple[float, float, int]:
    pp, cp = mesh.axis("pp"), mesh.axis("cp")
    mine = torch.tensor([float(mesh.rank)])
    return float(pp.all_reduce(mine)), float(cp.all_reduce(mine)), mesh.axis("kvp").size


def test_axes_are_separate_groups() -> None:
    got = on_ranks(rank_specs(NOWHERE, ParallelConfig(pp_size=2, cp_size=2)), place)
    assert got == [(2.0, 1.0, 1), (4.0, 1.0, 1), (2.0, 5.0, 1), (4.0, 5.0, 1)]


def wait_for_nobody(spec: RankSpec, mesh: Mesh) -> float:
    began = time.monotonic()
    if mesh.rank == 0:
        with pytest.raises(RuntimeError):
            mesh.axis("kvp").all_gather(torch.ones(3))
    else:
        time.sleep(2.0)
    return time.monotonic() - began


def test_a_collective_that_a_rank_never_enters_ends() -> None:
    specs = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2), timeout_s=1.0)
    waited = on_ranks(specs, wait_for_nobody)[0]
    assert 0.5 < waited < 60.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_said_in_one_line(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = replace(platform_of("cpu"), join_limit_s=1.0)
    monkeypatch.setattr(mesh_module, "platform_of", lambda device: hasty)
    spec = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2))[rank]
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"not all 2 ranks came to the rendezvous at 127\.0\.0\.1:\d+ within 1 s"):
        Mesh.join(spec)
    assert time.monotonic() - began < 20.0
