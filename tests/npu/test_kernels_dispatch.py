"""Fused dispatch and combine among threads, and over gloo: what arrives where, the sums, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.npu.device import install
from tests.npu.kernels import dispatch, groups

install()
npu = torch.ops.npu
NAME = "ep of a test"


@dataclass
class Case:
    """One call of all ranks: experts 0 ... routed - 1 multiply by their number plus 1, zero and copy experts follow."""

    world: int = 2
    rows: tuple[int, ...] = (3, 3)
    routed: int = 8
    zero: int = 2
    copy: int = 3
    topk: int = 4
    hidden: int = 1024
    soc: str = "A3"
    dtype: torch.dtype = torch.float32
    active: tuple[int | None, ...] = (None,) * 16
    options: dict[str, Any] = field(default_factory=dict)  # of both operators
    quant_mode: int = 0
    is_weighted_early: bool = False

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.world)
        experts = self.routed + self.zero + self.copy

        def choice() -> Tensor:
            return torch.randperm(experts, generator=draw)[: self.topk]

        self.x = [torch.randn(n, self.hidden, generator=draw).to(self.dtype) for n in self.rows]
        self.ids = [torch.stack([choice() for _ in range(n)]).int() for n in self.rows]
        self.weights = [torch.rand(n, self.topk, generator=draw) for n in self.rows]

    @property
    def local(self) -> int:
        return self.routed // self.world

    def mask(self, rank: int) -> Tensor | None:
        count = self.active[rank]
        return None if count is None else torch.arange(self.rows[rank]) < count

    def num_active(self, rank: int) -> int:
        count = self.active[rank]
        return self.rows[rank] if count is None else count

    def common(self, rank: int) -> dict[str, Any]:
        return {
            "group_ep": NAME,
            "ep_world_size": self.world,
            "ep_rank_id": rank,
            "moe_expert_num": self.routed,
            "zero_expert_num": self.zero,
            "copy_expert_num": self.copy,
            "shared_expert_num": 0,
            "x_active_mask": self.mask(rank),
        } | self.options

    def dispatch(self, rank: int, **changed: Any) -> tuple[Tensor, ...]:
        given = {
            "x": self.x[rank],
            "expert_ids": self.ids[rank],
            "quant_mode": self.quant_mode,
            "expert_scales": self.weights[rank] if self.is_weighted_early else None,
        }
        return npu.npu_moe_distribute_dispatch_v2(**(self.common(rank) | given | changed))

    def combine(self, rank: int, sent: tuple[Tensor, ...], **changed: Any) -> Tensor:
        rows, scales, assist, counts, recv, tp, early = sent
        wide = rows.float() * scales.unsqueeze(1) if self.quant_mode else rows.float()
        numbers = torch.arange(rank * self.local, (rank + 1) * self.local).repeat_interleave(counts) + 1
        wide[: len(numbers)] *= numbers.unsqueeze(1)
        given = {
            "expand_x": wide.to(self.dtype),
            "expert_ids": self.ids[rank],
            "assist_info_for_combine": assist,
            "ep_send_counts": recv,
            "tp_send_counts": tp,
            "expert_scales": self.weights[rank],
            "expand_scales": early,
            "ori_x": self.x[rank] if self.copy else None,
        }
        return npu.npu_moe_distribute_combine_v2(**(self.common(rank) | given | changed))

    def expected(self, rank: int) -> Tensor:
        """In fp64, for active rows."""
        n = self.num_active(rank)
        ids, x = self.ids[rank][:n], self.x[rank][:n].double()
        factors = torch.where(ids < self.routed, ids + 1, torch.where(ids >= self.routed + self.zero, 1, 0))
        return x * (factors * self.weights[rank][:n].double()).sum(-1, keepdim=True)

    def arrivals(self, rank: int) -> list[tuple[int, int, int]]:
        """(local expert, source rank, row) in the documented order."""
        found = []
        for expert in range(self.local):
            for source in range(self.world):
                for row in range(self.num_active(source)):
                    if rank * self.local + expert in self.ids[source][row].tolist():
                        found.append((expert, source, row))
        return found


def on_all(case: Case, task: Callable[[int], Any]) -> list[Any]:
    """The task on every rank at once."""
    with ThreadPoolExecutor(case.world) as pool:
        return list(pool.map(task, range(case.world)))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    groups.unregister_group(NAME)
    dispatch.forget_dispatches()
    dispatch.choose_soc("A3")


def start(case: Case, timeout: float = 20.0) -> Case:
    dispatch.choose_soc(case.soc)
    groups.register_group(NAME, groups.thread_exchange(case.world, timeout))
    return case


MESH = Case()
CASES = {
    "A3": MESH,
    "A3, v1, 4 ranks": replace(MESH, world=4, rows=(2,) * 4, options={"comm_alg": "fullmesh_v1"}),
    "A3, v2, other rows": replace(MESH, rows=(1, 4), options={"comm_alg": "fullmesh_v2", "global_bs": 8}),
    "A3, masked": replace(MESH, active=(2, 0)),
    "A3, bf16": replace(MESH, dtype=torch.bfloat16),
    "A3, weights along": replace(MESH, is_weighted_early=True),
    "A2": replace(MESH, soc="A2", hidden=32, world=8, rows=(3,) * 8, zero=0, topk=11),
    "A2, zero only": replace(MESH, soc="A2", hidden=32, copy=0),
    "A2, hierarchy": Case(
        soc="A2",
        hidden=32,
        world=16,
        rows=(2,) * 16,
        routed=16,
        zero=0,
        copy=0,
        options={"comm_alg": "hierarchy"},
        is_weighted_early=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_travel_to_experts_and_sums_come_back(name: str) -> None:
    case = start(CASES[name])

    def task(rank: int) -> Tensor:
        sent = case.dispatch(rank)
        rows, scales, assist, counts, recv, _, early = sent
        arrivals = case.arrivals(rank)
        capacity = max(case.rows[rank], case.options.get("global_bs", 0) // case.world) * case.world
        assert rows.shape == (capacity * min(case.local, case.topk), case.hidden)
        assert assist.dtype == recv.dtype == torch.int32 and counts.dtype == torch.int64
        wanted = [case.x[source][row] for _, source, row in arrivals]
        assert torch.equal(rows[: len(wanted)], torch.stack(wanted) if wanted else rows[:0])
        assert rows[len(wanted) :].isnan().all() and scales.isnan().all()
        assert counts.tolist() == [sum(e == expert for e, _, _ in arrivals) for expert in range(case.local)]
        if case.is_weighted_early:
            for weight, (expert, source, row) in zip(early.tolist(), arrivals, strict=False):
                choice = case.ids[source][row].tolist().index(rank * case.local + expert)
                assert weight == case.weights[source][row, choice].item()
        return case.combine(rank, sent)

    tolerance = {"rtol": 0.02, "atol": 0.02} if case.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for rank, y in enumerate(on_all(case, task)):
        assert y.shape == case.x[rank].shape and y.dtype == case.dtype
        n = case.num_active(rank)
        torch.testing.assert_close(y[:n].double(), case.expected(rank), **tolerance)
        assert y[n:].isnan().all()


def test_int8_rows_travel_with_their_scales() -> None:
    case = start(replace(MESH, quant_mode=2, options={}))
    smooth = torch.rand(case.routed, case.hidden) + 0.5

    def task(rank: int) -> Tensor:
        rows, scales, *_ = case.dispatch(rank, scales=smooth, expert_token_nums_type=0)
        arrivals = case.arrivals(rank)
        assert rows.dtype == torch.int8 and scales[len(arrivals) :].isnan().all()
        for place, (expert, source, row) in enumerate(arrivals):
            wide = case.x[source][row] * smooth[rank * case.local + expert]
            assert scales[place].item() == pytest.approx(wide.abs().max().item() / 127)
            assert (rows[place] - wide / scales[place]).abs().max() <= 0.501
        return case.combine(rank, case.dispatch(rank))

    for rank, y in enumerate(on_all(case, task)):
        torch.testing.assert_close(y.double(), case.expected(rank), rtol=0, atol=0.3)


def test_two_dispatches_may_be_open_at_once() -> None:
    case = start(MESH)

    def task(rank: int) -> Tensor:
        first, second = case.dispatch(rank), case.dispatch(rank)
        case.combine(rank, first)
        return case.combine(rank, second)

    on_all(case, task)


def complaint_of(case: Case, task: Callable[[int], Any]) -> str:
    """What all ranks say; it has to be the same but for numbers of ranks."""

    def caught(rank: int) -> str:
        with pytest.raises(ValueError) as error:
            task(rank)
        return str(error.value)

    return on_all(case, caught)[0]


def combined(case: Case, sent: Sequence[tuple[Tensor, ...]], changed: Sequence[dict[str, Any]], rank: int) -> Tensor:
    return case.combine(rank, sent[rank], **changed[rank])


def test_combine_refuses_what_is_not_of_its_dispatch() -> None:
    case = start(MESH)
    kept = on_all(case, case.dispatch)
    on_all(case, lambda rank: case.combine(rank, kept[rank]))
    assert "of no dispatch that waits" in complaint_of(case, lambda rank: case.combine(rank, kept[rank]))  # a second time
    first, second = on_all(case, case.dispatch), on_all(case, case.dispatch)
    changes: list[tuple[Callable[[int], dict[str, Any]], str]] = [
        (lambda rank: {"expert_ids": case.ids[rank].flip(0)}, "expert_ids differ"),
        (lambda rank: {"ep_send_counts": first[rank][4] + 1}, "ep_send_counts differ"),
        (lambda rank: {"ep_send_counts": first[rank][4].long()}, "ep_send_counts is torch.int64"),
        (lambda rank: {"assist_info_for_combine": torch.zeros_like(first[rank][2])}, "of no dispatch that waits"),
        (lambda rank: {"assist_info_for_combine": first[rank][2][:-1]}, "assist_info_for_combine has shape"),
        (lambda rank: {"expand_x": first[rank][0][:-1]}, "expand_x has shape"),
        (lambda rank: {"ori_x": None}, "ori_x is not given for 3 copy experts"),
        (lambda rank: {"ori_x": case.x[rank].bfloat16()}, "ori_x is torch.bfloat16"),
        (lambda rank: {"expert_scales": case.weights[rank].bfloat16()}, "expert_scales is torch.bfloat16"),
        (lambda rank: {"shared_expert_num": 1}, "shared_expert_num is 1"),
        (lambda rank: {"comm_quant_mode": 2}, "comm_quant_mode is 2"),
        (lambda rank: {"zero_expert_num": 1, "copy_expert_num": 4}, "those of dispatch were"),
        (lambda rank: {"comm_alg": "fullmesh_v1"}, "those of dispatch were"),
        (lambda rank: {"x_active_mask": torch.tensor([True, True, False])}, "has 2 rows, that of dispatch 3"),
        (lambda rank: {"expand_x": first[rank][0].int()}, "expand_x is torch.int32"),
    ]
    for changed, complaint in changes:
        said = complaint_of(case, partial(combined, case, first, [changed(rank) for rank in range(case.world)]))
        assert "npu_moe_distribute_combine_v2: " in said and complaint in said
        first = on_all(case, case.dispatch)  # a refusal may come after the dispatch was closed
    mixed = [second[0], first[1]]
    assert "combines its dispatch" in complaint_of(case, lambda rank: case.combine(rank, mixed[rank]))


WIDE = torch.zeros(257, 1024)
IDS257 = torch.arange(4, dtype=torch.int32).expand(257, 4).contiguous()


def same(**changed: Any) -> Callable[[Case, int], dict[str, Any]]:
    return lambda case, rank: changed


REFUSED: list[tuple[dict[str, Any], Callable[[Case, int], dict[str, Any]], str]] = [
    ({}, same(shared_expert_num=1), "shared_expert_num is 1"),
    ({}, lambda case, rank: {"expert_ids": case.ids[rank].long()}, "expert_ids is torch.int64"),
    ({}, lambda case, rank: {"expert_ids": case.ids[rank] * 0}, "expert_ids of row 0 are not distinct"),
    ({}, lambda case, rank: {"expert_ids": case.ids[rank] + 6}, "allowed are 0 to 12"),
    ({}, lambda case, rank: {"expert_ids": case.ids[rank][:2]}, "x has shape"),
    ({}, lambda case, rank: {"x": case.x[rank].to(torch.int8)}, "x is torch.int8"),
    ({}, same(moe_expert_num=7), "moe_expert_num 7 is no multiple of 2 ranks"),
    ({}, same(moe_expert_num=1026), "1026, allowed are 1 to 1024"),
    ({"options": {"comm_alg": "hierarchy"}}, same(moe_expert_num=514), "514, allowed are 1 to 512"),
    ({"topk": 17, "copy": 20}, same(), "is 17, allowed are 1 to 16"),
    ({"topk": 13, "options": {"comm_alg": "fullmesh_v2"}}, same(), "is 13, allowed are 1 to 12"),
    ({"hidden": 512}, same(), "H on A3 default is 512, allowed are 1024 to 8192"),
    ({"hidden": 8200}, same(), "8200"),
    ({"soc": "A2", "hidden": 7200}, same(), "H on A2 default is 7200, allowed are 1 to 7168"),
    ({"soc": "A2"}, same(comm_alg="fullmesh_v1"), "comm_alg is 'fullmesh_v1', which A2 does not have"),
    ({"soc": "A2"}, same(ep_world_size=12, moe_expert_num=12), "ep_world_size is 12"),
    ({}, same(ep_world_size=1), "ep_world_size is 1"),
    ({}, same(ep_rank_id=2), "ep_rank_id is 2"),
    ({"soc": "A2"}, same(comm_alg="hierarchy"), "ep_world_size is 2"),
    ({"soc": "A2"}, same(comm_alg="hierarchy", ep_world_size=16, moe_expert_num=16), "no zero or copy experts"),
    (
        {"soc": "A2", "zero": 0, "copy": 0},
        same(comm_alg="hierarchy", ep_world_size=16, moe_expert_num=16),
        "expert_scales are not given",
    ),
    (
        {"soc": "A2", "zero": 0, "copy": 0},
        same(comm_alg="hierarchy", ep_world_size=16, moe_expert_num=16, x_active_mask=torch.ones(3, dtype=torch.bool)),
        "x_active_mask is given",
    ),
    ({"soc": "A2"}, same(x=WIDE, expert_ids=IDS257), "rows on A2 default is 257, allowed are 1 to 256"),
    ({}, same(x=WIDE, expert_ids=IDS257, comm_alg="fullmesh_v2"), "is 257, allowed are 1 to 256"),
    ({}, same(global_bs=1026), "rows on A3 default is 513"),
    ({}, same(global_bs=7), "global_bs 7 is no multiple of 2 ranks"),
    ({}, lambda case, rank: {"x": case.x[rank][:0], "expert_ids": case.ids[rank][:0]}, "is 0, allowed are 1 to 512"),
    ({"rows": (3, 2)}, same(), "and global_bs is 0"),
    ({"rows": (3, 2)}, same(global_bs=4), "rank 0 has 3 rows, global_bs 4 allows 2 a rank"),
    ({}, lambda case, rank: {"quant_mode": 2 * rank}, "rank 1 has [number of dispatch"),
    ({}, same(quant_mode=1), "quant_mode is 1"),
    ({}, same(scales=torch.ones(8, 1024)), "quant_mode with scales is 0"),
    ({}, same(scales=torch.ones(4, 1024), quant_mode=2), "scales has shape [4, 1024]"),
    ({}, same(expert_scales=torch.ones(3, 3)), "expert_scales has shape"),
    ({}, same(x_active_mask=torch.tensor([True, False, True])), "rows that count after rows that do not"),
    ({}, same(x_active_mask=torch.ones(2, dtype=torch.bool)), "x_active_mask has shape"),
    ({}, same(const_expert_num=1), "const_expert_num is 1"),
    ({}, same(group_tp="tp"), "group_tp is 'tp'"),
    ({}, same(expert_token_nums_type=2), "expert_token_nums_type is 2"),
    ({}, same(group_ep="nobody"), "group_ep 'nobody' is no communicator"),
    ({}, same(elastic_info=torch.ones(1)), "elastic_info is given"),
]


@pytest.mark.parametrize(("case", "changed", "complaint"), REFUSED)
def test_dispatch_refuses(case: dict[str, Any], changed: Callable[[Case, int], dict[str, Any]], complaint: str) -> None:
    made = start(replace(MESH, **case))
    said = complaint_of(made, lambda rank: made.dispatch(rank, **changed(made, rank)))
    assert said.startswith("npu_moe_distribute_dispatch_v2: ") and complaint in said


@pytest.mark.parametrize(
    ("soc", "comm_alg", "world", "buffer"),
    [
        ("A2", "", 2, 2 * (3 * 2 * 1024 * 2 * 4 + 2 * 2**20)),
        ("A3", "", 2, 2 * (4 * 3 * 2 * 2560 + 4 * 3 * 2048)),
    ],
)
def test_the_buffer_has_to_hold_what_travels(soc: str, comm_alg: str, world: int, buffer: int) -> None:
    case = start(replace(MESH, soc=soc, options={"comm_alg": comm_alg}))
    dispatch.choose_soc(soc, buffer_mib=0)
    assert f"buffer of {buffer} bytes, it has 0" in complaint_of(case, case.dispatch)


def test_a_name_is_taken_once() -> None:
    start(MESH)
    with pytest.raises(ValueError, match="registered already"):
        groups.register_group(NAME, groups.thread_exchange(2))
    with pytest.raises(ValueError, match="without a name"):
        groups.register_group("", groups.thread_exchange(2))
    with pytest.raises(ValueError, match="A9"):
        dispatch.choose_soc("A9")


def test_ranks_exchange_over_gloo() -> None:
    """The ranks are threads here too, each with its own member of a gloo group."""
    case = replace(MESH, rows=(1, 3), active=(0, 3), options={"global_bs": 6}, dtype=torch.bfloat16)
    store = dist.HashStore()

    def joined(rank: int) -> groups.Exchange:
        return groups.gloo_exchange(dist.ProcessGroupGloo(store, rank, case.world, timedelta(seconds=20)))

    members = on_all(case, joined)
    groups.register_group(NAME, lambda rank, item: members[rank](rank, item))
    for rank, y in enumerate(on_all(case, lambda rank: case.combine(rank, case.dispatch(rank)))):
        n = case.num_active(rank)
        torch.testing.assert_close(y[:n].double(), case.expected(rank), rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="rank 1 of the operator is rank 0 of its group"):
        members[0](1, (torch.ones(1),))
