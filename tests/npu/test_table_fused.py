"""The fused pair among threads against one rank with all experts: every way to travel, int8, masks, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels import NpuSettings, Ops
from longcat_pd.kernels.expert_ops import ExpertGroup
from longcat_pd.kernels.npu.fused import with_stand_ins
from longcat_pd.kernels.npu.fused_limits import check_fused, fused_buffer_bytes
from longcat_pd.kernels.refusal import Unsupported
from tests.npu.expert_rig import HIDDEN, REFERENCE, Experts, close, drawn_ids, npu_ops, randn
from tests.npu.kernels import dispatch, groups
from tests.npu.kernels.dispatch_limits import VARIANTS, Shape

NAME = "ep of the table"
PATIENCE_S = 10.0  # of ranks with one that failed


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    groups.unregister_group(NAME)
    dispatch.forget_dispatches()
    dispatch.choose_soc("A3")


@dataclass
class Case:
    """``ranks`` ranks with ``rows`` rows each, of which some are real."""

    ranks: int = 2
    rows: int = 5
    experts: int = 8
    copies: int = 3
    topk: int = 4
    is_int8: bool = False
    series: str = "A3"
    algorithm: str = ""
    dtype: torch.dtype = torch.float32
    real: tuple[int, ...] = ()
    among: range | None = None  # ids that are chosen from
    hidden: int = HIDDEN

    def __post_init__(self) -> None:
        among = self.among or range(self.experts + self.copies)
        self.topk = min(self.topk, len(among))
        seeds = range(self.ranks)
        self.ids = [drawn_ids(self.rows, among=len(among), topk=self.topk, seed=s).int() + among.start for s in seeds]
        self.x = [randn(self.rows, self.hidden, seed=10 + s, dtype=self.dtype) for s in seeds]
        self.weights = [randn(self.rows, self.topk, seed=20 + s).abs() for s in seeds]
        self.matrices = Experts.drawn(is_int8=self.is_int8, dtype=self.dtype, count=self.experts, hidden=self.hidden)

    def ops(self) -> Ops:
        is_a3 = self.series == "A3"
        return npu_ops(self.dtype, dispatch_algorithm=self.algorithm, is_series_a3=is_a3)

    def group(self, rank: int) -> ExpertGroup:
        return ExpertGroup(NAME, self.ranks, rank, self.experts, self.copies)

    def mask(self, rank: int) -> Tensor | None:
        return torch.arange(self.rows) < self.real[rank] if self.real else None

    def one(self, rank: int) -> Tensor:
        """There and back."""
        ops, each = self.ops(), self.experts // self.ranks
        own = {name: part[rank * each : (rank + 1) * each] for name, part in self.matrices.given.items()}
        routed: dict[str, Any] = {"weights": self.weights[rank], "is_real": self.mask(rank), "group": self.group(rank)}
        assert ops.moe_dispatch is not None and ops.moe_combine is not None
        sent = ops.moe_dispatch(self.x[rank], self.ids[rank], is_int8=self.is_int8, **routed)
        y = ops.expert_rows(sent.x, sent.counts, row_scale=sent.row_scale, **Experts(own).prepared(ops))
        return ops.moe_combine(y, sent, x=self.x[rank], expert_ids=self.ids[rank], **routed)

    def on_all(self, task: Callable[[int], Any] | None = None) -> list[Any]:
        dispatch.choose_soc(self.series)
        groups.register_group(NAME, groups.thread_exchange(self.ranks, PATIENCE_S))
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(task or self.one, range(self.ranks)))

    def expected(self, rank: int) -> Tensor:
        ids, weights, x = self.ids[rank].long(), self.weights[rank], self.x[rank].float()
        given = {name: part if part.dtype == torch.int8 else part.float() for name, part in self.matrices.given.items()}
        routed = REFERENCE.grouped_experts(x, ids, weights=weights, **given)
        return routed + x * (weights * (ids >= self.experts)).sum(-1, keepdim=True)

    def check(self) -> None:
        for rank, got in enumerate(self.on_all()):
            real = slice(0, self.real[rank] if self.real else self.rows)
            assert got.dtype == self.dtype
            close(got[real], self.expected(rank)[real], self.dtype)


WAYS = [(series, algorithm) for series, algorithm in VARIANTS if (series, algorithm) != ("A2", "hierarchy")]
CASES = {
    "mixed": {},
    "four ranks": {"ranks": 4, "rows": 3},
    "int8": {"is_int8": True},
    "bf16": {"dtype": torch.bfloat16},
    "int8 bf16 four ranks": {"is_int8": True, "dtype": torch.bfloat16, "ranks": 4},
    "masks": {"real": (2, 5)},
    "nothing real on a rank": {"real": (0, 3)},
    "copies only": {"among": range(8, 11)},
    "one rank's": {"among": range(4)},
    "no copies": {"copies": 0},
    "one row": {"rows": 1},
}


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(way: tuple[str, str], case: str) -> None:
    series, algorithm = way
    Case(series=series, algorithm=algorithm, **CASES[case]).check()


TREE: dict[str, Any] = {"series": "A2", "algorithm": "hierarchy", "ranks": 16, "rows": 2, "experts": 32, "copies": 8}


@pytest.mark.parametrize(
    "more",
    [{}, {"is_int8": True}, {"real": (1,) * 16}, {"among": range(32, 40)}, {"copies": 0}, {"dtype": torch.bfloat16}],
    ids=["mixed", "int8", "masks", "copies only", "no copies", "bf16"],
)
def test_there_and_back_where_copies_do_not_travel(more: dict[str, Any]) -> None:
    Case(**(TREE | more)).check()


def test_stand_ins_are_distinct_and_spread() -> None:
    experts, copies, topk, rows = 32, 16, 12, 40
    ids, weights = drawn_ids(rows, among=experts + copies, topk=topk), torch.rand(rows, topk) + 0.1
    ids[0] = torch.arange(topk)  # what the first row would take for itself
    ids[1] = torch.arange(experts, experts + topk)
    got, left = with_stand_ins(ids, weights, ExpertGroup(NAME, 16, 3, experts, copies))
    is_copy = ids >= experts
    assert ((got >= 0) & (got < experts)).all() and got.dtype == torch.int32
    assert all(len(set(row)) == topk for row in got.tolist())
    assert torch.equal(got[~is_copy], ids[~is_copy].int()) and torch.equal(left[~is_copy], weights[~is_copy])
    assert (left[is_copy] == 0).all()
    assert torch.bincount(got[is_copy].long(), minlength=experts).max() < 3 * is_copy.sum() / experts


LARGE = {"hidden": 8192, "ep_size": 128, "rows": 64, "num_experts": 768, "topk": 12}


def refused(settings: NpuSettings, **changed: int) -> str:
    with pytest.raises(Unsupported) as caught:
        check_fused(settings, **(LARGE | changed))
    return caught.value.message


def test_the_large_model_travels_on_a3_only_or_by_fewer_ranks() -> None:
    text = refused(NpuSettings())
    assert "hidden size 8192, allowed are 1 to 7168" in text
    assert "'hierarchy' with ep_size 64" in text and "Atlas A3" in text and "gather, two_level" in text
    check_fused(NpuSettings(is_series_a3=True), **LARGE)
    check_fused(NpuSettings(dispatch_algorithm="hierarchy"), **(LARGE | {"ep_size": 64}))
    assert "ep_size 128, allowed are 16, 32 or 64" in refused(NpuSettings(dispatch_algorithm="hierarchy"))


@pytest.mark.parametrize(
    ("settings", "changed", "text"),
    [
        ({}, {"hidden": 6144, "ep_size": 12}, "ep_size 12"),
        ({}, {"hidden": 6144, "rows": 257}, "257 rows of a rank at once, allowed are 1 to 256"),
        ({"dispatch_algorithm": "hierarchy"}, {"ep_size": 64, "rows": 513}, "513 rows"),
        ({"dispatch_algorithm": "hierarchy"}, {"ep_size": 16, "num_experts": 16}, "16 experts with 12 for each row"),
        ({"is_series_a3": True}, {"rows": 513}, "513 rows"),
        ({"is_series_a3": True}, {"rows": 0}, "0 rows"),
        ({"is_series_a3": True}, {"hidden": 512}, "hidden size 512, allowed are 1024 to 8192"),
        ({"is_series_a3": True}, {"topk": 17}, "17 experts for each row, at most 16"),
        ({"is_series_a3": True, "dispatch_algorithm": "fullmesh_v2"}, {"topk": 13}, "13 experts for each row, at most 12"),
        ({"is_series_a3": True, "dispatch_algorithm": "hierarchy"}, {}, "768 experts, at most 512"),
        ({"is_series_a3": True}, {"num_experts": 1152}, "1152 experts, at most 1024"),
        ({"is_series_a3": True}, {"ep_size": 100}, "no multiple of 100"),
        ({"dispatch_algorithm": "fullmesh_v1"}, {}, "no such algorithm; there are '', 'fullmesh', 'hierarchy'"),
    ],
)
def test_limits(settings: dict[str, Any], changed: dict[str, int], text: str) -> None:
    assert text in refused(NpuSettings(**settings), **changed)


def test_limits_are_the_kernels_own() -> None:
    """Of the operators' kernels in these tests, which were written apart: sizes at and beyond every border."""
    for (series, algorithm), variant in VARIANTS.items():
        settings = NpuSettings(is_series_a3=series == "A3", dispatch_algorithm=algorithm)
        base = {"hidden": 2048, "ep_size": 16, "rows": 8, "num_experts": 64, "topk": 8}
        for name, values in {
            "hidden": (1023, 1024, 7168, 7169, 8192, 8193, 10240, 10241),
            "rows": (1, 256, 257, 512, 513),
            "ep_size": (2, 8, 9, 12, 16, 64, 128, 256, 512, 769),
            "topk": (12, 13, 16, 17),
            "num_experts": (512, 528, 1024, 1040),
        }.items():
            for value in values:
                asked = base | {name: value}
                if name == "ep_size":
                    asked["num_experts"] = value
                    if value < 32 and series == "A2":
                        asked["num_experts"] = 16 * value
                wanted = (
                    variant.hidden[0] <= asked["hidden"] <= variant.hidden[1]
                    and 1 <= asked["rows"] <= variant.max_rows
                    and asked["ep_size"] in variant.worlds
                    and asked["topk"] <= variant.max_choices
                    and asked["num_experts"] <= variant.max_experts
                )
                try:
                    check_fused(settings, **asked)
                    is_taken = True
                except Unsupported:
                    is_taken = False
                assert is_taken == wanted, (series, algorithm, asked)


@pytest.mark.parametrize("way", VARIANTS, ids=" ".join)
def test_buffers(way: tuple[str, str]) -> None:
    settings = NpuSettings(is_series_a3=way[0] == "A3", dispatch_algorithm=way[1])
    asked = {"hidden": 5120, "ep_size": 32, "rows": 33, "num_experts": 256, "topk": 12}
    shape = Shape(rows=33, hidden=5120, topk=12, world=32, local=8)
    assert fused_buffer_bytes(settings, **asked) == VARIANTS[way].buffer_bytes(shape)


def test_sizes_beyond_the_limits_never_reach_the_operator() -> None:
    case = Case(series="A2", hidden=8192, rows=1)
    with pytest.raises(AssertionError, match="hidden size 8192"):
        case.one(0)
    nameless = Case()
    given = {"weights": nameless.weights[0], "is_real": None, "group": nameless.group(0)._replace(communicator="")}
    with pytest.raises(AssertionError, match="no communicator"):
        nameless.ops().moe_dispatch(nameless.x[0], nameless.ids[0], is_int8=False, **given)  # type: ignore[misc]
