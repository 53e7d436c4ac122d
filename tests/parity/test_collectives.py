"""parallel/collectives.py on real groups: every operation <-> its definition, all types, empty tensors, deadlines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.parallel import mesh as mesh_module
from longcat_pd.parallel.mesh import Mesh
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
    assert 0.5 < waited < 10.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_said_in_one_line(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "JOIN_LIMIT_S", 1.0)
    spec = rank_specs(NOWHERE, ParallelConfig(kvp_size=2, attn_tp_size=2))[rank]
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"not all 2 ranks came to the rendezvous at 127\.0\.0\.1:\d+ within 1 s"):
        Mesh.join(spec)
    assert time.monotonic() - began < 5.0
