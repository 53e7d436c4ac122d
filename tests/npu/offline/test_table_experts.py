"""Norms, products, experts and the fused pair of the NPU table as GE graphs of the release: which nodes, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.offline.capture import Captured, ge_graph
from tests.npu.offline.shapes import empty, fake

from longcat_pd import kernels  # isort: skip
from longcat_pd.kernels import NpuSettings, Ops  # isort: skip
from longcat_pd.kernels.expert_ops import ExpertGroup  # isort: skip

ROWS, HIDDEN, INNER, EXPERTS, ROUTED, COPIES, TOPK, RANKS = 8, 2048, 512, 8, 64, 32, 12, 8
FLOAT, INT8, INT32, INT64 = torch.float32, torch.int8, torch.int32, torch.int64
PLUMBING = {"Unsqueeze", "Reshape", "Data", "RefData", "Const", "ConstPlaceHolder", "NetOutput", "Identity", "NoOp"}
SOC_OF = {False: "Ascend910B3", True: "Ascend910_9391"}


@dataclass
class Setting:
    is_series_a3: bool = False
    is_int8: bool = False
    algorithm: str = ""
    ranks: int = RANKS

    def ops(self) -> Ops:
        settings = NpuSettings(is_series_a3=self.is_series_a3, dispatch_algorithm=self.algorithm)
        return kernels.load("npu", exe_mode="ge_graph", npu=settings)

    def matrices(self, ops: Ops) -> dict[str, Tensor]:
        if not self.is_int8:
            loaded = {"gate_up": empty(EXPERTS, HIDDEN, 2 * INNER), "down": empty(EXPERTS, INNER, HIDDEN)}
            return {name: ops.prepare(weight, "experts") for name, weight in loaded.items()}
        return {
            "gate_up": ops.prepare(empty(EXPERTS, 2 * INNER, HIDDEN, dtype=INT8), "experts_int8"),
            "down": ops.prepare(empty(EXPERTS, HIDDEN, INNER, dtype=INT8), "experts_int8"),
            "gate_up_scale": empty(EXPERTS, 2 * INNER, dtype=FLOAT),
            "down_scale": ops.prepare(empty(EXPERTS, HIDDEN, dtype=FLOAT), "experts_scale"),
        }

    def group(self) -> ExpertGroup:
        return ExpertGroup("ep", self.ranks, 0, EXPERTS * self.ranks, COPIES)

    def graph(self, make: Callable[[Ops], Callable[..., Any]], *inputs: tuple[tuple[int, ...], torch.dtype]) -> Captured:
        soc = SOC_OF[self.is_series_a3]
        with fake(soc):
            arguments = [empty(*shape, dtype=dtype) for shape, dtype in inputs]
            return ge_graph(make(self.ops()), *arguments, soc=soc)


def launches(captured: Captured) -> dict[str, int]:
    """What runs on the device: not the empty lists that stand for what was not given to a grouped product."""
    nothing = captured.of("Fill")
    empty_lists = {node.name for fill in nothing for node in (fill, *captured.writers(fill))}
    return dict(Counter(n.type for n in captured.nodes if n.type not in PLUMBING and n.name not in empty_lists))


X = ((ROWS, HIDDEN), torch.bfloat16)
IDS, WEIGHTS = ((ROWS, TOPK), INT32), ((ROWS, TOPK), FLOAT)


def grouped(setting: Setting) -> Callable[[Ops], Callable[..., Any]]:
    def make(ops: Ops) -> Callable[..., Any]:
        matrices = setting.matrices(ops)
        return lambda x, ids, weights: ops.grouped_experts(x, ids, weights=weights, **matrices)

    return make


def there_and_back(setting: Setting) -> Callable[[Ops], Callable[..., Any]]:
    def make(ops: Ops) -> Callable[..., Any]:
        matrices, group = setting.matrices(ops), setting.group()

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            routed: dict[str, Any] = {"weights": weights, "is_real": None, "group": group}
            assert ops.moe_dispatch is not None and ops.moe_combine is not None
            sent = ops.moe_dispatch(x, ids, is_int8=setting.is_int8, **routed)
            y = ops.expert_rows(sent.x, sent.counts, row_scale=sent.row_scale, **matrices)
            return ops.moe_combine(y, sent, x=x, expert_ids=ids, **routed)

        return run

    return make


GROUPED = {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "MoeFinalizeRoutingV2": 1}


def stored(ops: Ops) -> Callable[..., Any]:
    def store(cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
        ops.store(cache, slots, values)
        return values + 1  # a result, so that there is a graph

    return store


@pytest.mark.parametrize("is_a3", [False, True])
@pytest.mark.parametrize("is_int8", [False, True])
def test_grouped_experts(is_a3: bool, is_int8: bool) -> None:
    """Besides the operators: ids below zero, and results in fp32."""
    setting = Setting(is_series_a3=is_a3, is_int8=is_int8)
    between = {"DynamicQuant": 1, "DequantSwigluQuant": 1} if is_int8 else {"SwiGlu": 1}
    assert launches(setting.graph(grouped(setting), X, IDS, WEIGHTS)) == GROUPED | between | {"FloorMod": 1, "Cast": 1}


@pytest.mark.parametrize("is_a3", [False, True])
@pytest.mark.parametrize("is_int8", [False, True])
def test_fused_pair(is_a3: bool, is_int8: bool) -> None:
    setting = Setting(is_series_a3=is_a3, is_int8=is_int8)
    wanted = {"MoeDistributeDispatchV2": 1, "GroupedMatmul": 2, "MoeDistributeCombineV2": 1}
    between = "DequantSwigluQuant" if is_int8 else "SwiGlu"
    assert launches(setting.graph(there_and_back(setting), X, IDS, WEIGHTS)) == wanted | {between: 1}


def test_what_goes_to_the_fused_pair() -> None:
    setting = Setting(is_int8=True, is_series_a3=True, algorithm="fullmesh_v1")
    graph = setting.graph(there_and_back(setting), X, IDS, WEIGHTS)
    (out,), (back,) = graph.of("MoeDistributeDispatchV2"), graph.of("MoeDistributeCombineV2")
    for node in (out, back):
        assert (node.attrs["shared_expert_num"], node.attrs["copy_expert_num"]) == (0, COPIES)
        assert (node.attrs["ep_world_size"], node.attrs["moe_expert_num"]) == (RANKS, RANKS * EXPERTS)
        assert node.attrs["comm_alg"] == "fullmesh_v1"
    assert out.attrs["quant_mode"] == 2


def test_the_pair_with_copies_outside_converts() -> None:
    """Integers of two types are not compared, nothing is sorted stably, and so on."""
    setting = Setting(algorithm="hierarchy", ranks=16)
    graph = setting.graph(there_and_back(setting), X, IDS, WEIGHTS)
    (out,) = graph.of("MoeDistributeDispatchV2")
    assert out.attrs["copy_expert_num"] == 0 and out.attrs["comm_alg"] == "hierarchy"
    assert sum(launches(graph).values()) <= 41  # of which those of constants alone are folded


BF16 = torch.bfloat16
ROW_OPERATORS: dict[str, tuple[Callable[[Ops], Callable[..., Any]], list[Any], dict[str, int]]] = {
    "route_topk": (
        lambda ops: lambda x, b: ops.route_topk(x, b, topk=TOPK, factor=6.0, is_normalized=False),
        [((ROWS, 96), FLOAT), ((96,), FLOAT)],
        {"MoeGatingTopK": 1},
    ),
    "route_topk normalised": (
        lambda ops: lambda x, b: ops.route_topk(x, b, topk=TOPK, factor=6.0, is_normalized=True),
        [((ROWS, 96), FLOAT), ((96,), FLOAT)],
        {"MoeGatingTopK": 1, "ReduceSum": 1, "RealDiv": 1, "Mul": 1, "Cast": 1},
    ),
    "rms_norm": (lambda ops: lambda x, w: ops.rms_norm(x, w, 1e-5), [X, ((HIDDEN,), BF16)], {"RmsNorm": 1}),
    "add_rms_norm": (
        lambda ops: lambda x, d, w: ops.add_rms_norm(x, d, weight=w, eps=1e-5),
        [X, X, ((HIDDEN,), BF16)],
        {"AddRmsNorm": 1},
    ),
    "layer_norm": (
        lambda ops: lambda x, w, b: ops.layer_norm(x, w, bias=b, eps=1e-5),
        [X, ((HIDDEN,), BF16), ((HIDDEN,), BF16)],
        {"LayerNormV4": 1},
    ),
    "swiglu": (lambda ops: ops.swiglu, [X], {"SwiGlu": 1}),
    "linear": (lambda ops: ops.linear, [X, ((HIDDEN, 96), BF16)], {"MatMul": 1}),
    "linear_int8": (
        lambda ops: ops.linear_int8,
        [X, ((HIDDEN, 96), INT8), ((96,), FLOAT)],
        {"DynamicQuant": 1, "QuantBatchMatmulV3": 1},
    ),
    "head_linear": (
        lambda ops: ops.head_linear,
        [((ROWS, 4, 512), BF16), ((4, 512, 128), BF16)],
        {"TransposeBatchMatMul": 1},
    ),
    "store": (stored, [((4, 128, 512), BF16), ((ROWS,), INT64), ((ROWS, 512), BF16)], {"ScatterNdUpdate": 1, "Add": 1}),
}


@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_operators_of_rows(name: str) -> None:
    make, inputs, wanted = ROW_OPERATORS[name]
    assert launches(Setting().graph(make, *inputs)) == wanted


def test_ngram_ids_convert() -> None:
    def make(ops: Ops) -> Callable[..., Any]:
        return lambda w, p, m, e, i: ops.ngram_ids(w, powers=p, moduli=m, eos=e, ignored=i)

    inputs = [((ROWS, 5), INT64), ((16, 5), INT64), ((16,), INT64), ((2,), INT64), ((3, 2), INT64)]
    assert sum(launches(Setting().graph(make, *inputs)).values()) <= 24
