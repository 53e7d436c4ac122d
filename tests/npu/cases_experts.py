"""Calls of routing and of products of many experts; and of the fused pair, which takes two cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.npu.case import BF16, FLOAT, Case, Draw
from tests.npu.compare import Arguments, Close, Exact, Int8, Opaque, Rule

COUNTS, TOTAL = (3, 0, 2, 4), 12  # rows of each expert; the last rows are of none
USED = sum(COUNTS)
INNER, WIDTH = 256, 512
SCALE = Close(rtol=1e-4, floor=0)
SCALE_OF_USED = Close(rtol=1e-4, floor=0, rows=USED)


def grouped_matmul(draw: Draw) -> dict[str, Any]:
    return {
        "x": [draw.normal(TOTAL, INNER)],
        "weight": [draw.normal(len(COUNTS), INNER, WIDTH, size=INNER**-0.5)],
        "group_list": torch.tensor(COUNTS),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    }


def grouped_matmul_sums(draw: Draw) -> dict[str, Any]:
    """Groups as running sums."""
    return grouped_matmul(draw) | {"group_list": torch.tensor(COUNTS).cumsum(0), "group_list_type": 0}


def grouped_matmul_int8(draw: Draw) -> dict[str, Any]:
    return grouped_matmul(draw) | {
        "x": [draw.int8(TOTAL, INNER)],
        "weight": [draw.int8(len(COUNTS), INNER, WIDTH)],
        "scale": [draw.uniform(len(COUNTS), WIDTH, low=5e-4, high=2e-3, dtype=BF16)],
        "per_token_scale": [draw.uniform(TOTAL, low=5e-3, high=2e-2)],
        "output_dtype": BF16,
    }


def grouped_matmul_raw(draw: Draw) -> dict[str, Any]:
    given = grouped_matmul_int8(draw) | {"output_dtype": torch.int32}
    return {name: value for name, value in given.items() if name not in ("scale", "per_token_scale")}


def grouped_matmul_swiglu_quant(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.int8(TOTAL, INNER),
        "weight": [draw.int8(len(COUNTS), INNER, WIDTH)],
        "weight_scale": [draw.uniform(len(COUNTS), WIDTH, low=5e-4, high=2e-3)],
        "x_scale": draw.uniform(TOTAL, low=5e-3, high=2e-2),
        "group_list": torch.tensor(COUNTS).cumsum(0),
        "dequant_mode": 0,
        "dequant_dtype": FLOAT,
        "quant_mode": 0,
        "quant_dtype": torch.int8,
        "group_list_type": 0,
    }


ROWS, EXPERTS, CHOICES, HIDDEN = 6, 24, 4, 1024
LOCAL = (4, 12)  # the experts that are kept


def gating(draw: Draw) -> dict[str, Any]:
    """No two choices of a row are near each other, with or without the bias (checked by ``test_cases``)."""
    levels = torch.arange(EXPERTS) * 0.4
    return {
        "x": torch.stack([levels[draw.order(EXPERTS)] * (1 + 0.05 * row) for row in range(ROWS)]),
        "k": CHOICES,
        "bias": draw.uniform(EXPERTS, low=-0.004, high=0.004),
        "k_group": 1,
        "group_count": 1,
        "group_select_mode": 0,
        "renorm": 0,
        "norm_type": 0,
        "out_flag": True,
        "routed_scaling_factor": 6.0,
    }


def gating_bias_decides(draw: Draw) -> dict[str, Any]:
    """Weights come from the scores without the bias, which overturns their order."""
    return gating(draw) | {"bias": torch.arange(EXPERTS)[draw.order(EXPERTS)] * 0.3}


def choices(draw: Draw, rows: int = ROWS, experts: int = EXPERTS) -> Tensor:
    """Distinct in a row."""
    return torch.stack([draw.order(experts)[:CHOICES] for _ in range(rows)]).int()


def num_kept(given: Arguments) -> int:
    low, high = given["active_expert_range"]
    ids = given["expert_idx"]
    return int(((ids >= low) & (ids < high)).sum())


def init_routing(draw: Draw) -> dict[str, Any]:
    return {
        "expert_idx": choices(draw),
        "x": draw.normal(ROWS, HIDDEN),
        "active_num": ROWS * CHOICES,
        "expert_num": EXPERTS,
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": list(LOCAL),
        "row_idx_type": 0,
    }


def init_routing_int8(draw: Draw) -> dict[str, Any]:
    """Rows that are quantised already, and their scales travel along; the index says where rows came from."""
    return init_routing(draw) | {"x": draw.int8(ROWS, HIDDEN), "scale": draw.uniform(ROWS), "row_idx_type": 1}


def init_routing_quantises(draw: Draw) -> dict[str, Any]:
    return init_routing(draw) | {"quant_mode": 1}


def routing_case(name: str, make: Any, *rules: Any) -> Case:
    """``rules`` of the rows, the index, the counts and the scales; each is given the rows that are kept."""
    kept = num_kept(make(Draw(f"moe_init_routing_v2-{name}")))
    return Case("npu_moe_init_routing_v2", name, make, tuple(rule(kept) for rule in rules))


def finalize_routing(draw: Draw) -> dict[str, Any]:
    """Row-major places, -1 for experts of others, on top of a row that is there already."""
    index = draw.order(ROWS * CHOICES).int()
    index[draw.order(ROWS * CHOICES)[:5]] = -1
    return {
        "expanded_permuted_rows": draw.normal(ROWS * CHOICES, 1, HIDDEN),
        "skip1": draw.normal(ROWS, HIDDEN),
        "skip2": None,
        "bias": None,
        "scales": draw.uniform(ROWS, CHOICES, dtype=BF16),
        "expanded_src_to_dst_row": index,
        "export_for_source_row": None,
        "drop_pad_mode": 3,
    }


def finalize_routing_dropless(draw: Draw) -> dict[str, Any]:
    index = draw.order(ROWS * CHOICES).int()
    rows = draw.normal(ROWS * CHOICES, HIDDEN)
    return finalize_routing(draw) | {
        "expanded_permuted_rows": rows,
        "expanded_src_to_dst_row": index,
        "skip1": None,
        "drop_pad_mode": 2,
    }


def re_routing(draw: Draw) -> dict[str, Any]:
    """From two ranks, to three experts."""
    counts = torch.tensor([[2, 0, 3], [1, 4, 1]])
    rows = int(counts.sum())
    return {
        "tokens": draw.normal(rows, HIDDEN),
        "expert_token_num_per_rank": counts,
        "per_token_scales": draw.uniform(rows),
        "expert_token_num_type": 1,
        "idx_type": 0,
    }


def re_routing_int8(draw: Draw) -> dict[str, Any]:
    given = re_routing(draw)
    return given | {"tokens": draw.int8(len(given["tokens"]), HIDDEN)}


def whole(_: int) -> Rule:
    return Exact()


def opaque(_: int) -> Rule:
    return Opaque()


def scale_of(kept: int) -> Rule:
    return Close(rtol=1e-4, floor=0, rows=kept)


_MOVED: tuple[Rule, ...] = (Exact(), Exact(), Exact(), Exact())
_GATED: tuple[Rule, ...] = (Close(rtol=1e-4, floor=0), Exact(), Close(rtol=1e-4, floor=0))

CASES = (
    Case("npu_grouped_matmul", "bf16", grouped_matmul, (Close(rows=USED),)),
    Case("npu_grouped_matmul", "running sums", grouped_matmul_sums, (Close(rows=USED),)),
    Case("npu_grouped_matmul", "in the matrix unit's format", grouped_matmul, (Close(rows=USED),), {}, ("weight",)),
    Case("npu_grouped_matmul", "int8", grouped_matmul_int8, (Close(rows=USED),), {}, ("weight",)),
    Case("npu_grouped_matmul", "raw sums", grouped_matmul_raw, (Exact(USED),), {}, ("weight",)),
    Case(
        "npu_grouped_matmul_swiglu_quant_v2",
        "int8",
        grouped_matmul_swiglu_quant,
        (Int8(USED), SCALE_OF_USED),
        {},
        ("weight",),
    ),
    Case(
        "npu_moe_gating_top_k",
        "small bias",
        gating,
        _GATED,
        idle={"bias": "it changes no choice; that of the next case does"},
    ),
    Case("npu_moe_gating_top_k", "the bias decides", gating_bias_decides, _GATED),
    routing_case("bf16", init_routing, Exact, whole, whole, opaque),
    routing_case("int8 with scales", init_routing_int8, Exact, Exact, whole, Exact),
    routing_case("quantises", init_routing_quantises, Int8, whole, whole, scale_of),
    Case("npu_moe_finalize_routing", "experts of others", finalize_routing, (Close(),)),
    Case("npu_moe_finalize_routing", "all rows", finalize_routing_dropless, (Close(),)),
    Case("npu_moe_re_routing", "bf16", re_routing, _MOVED),
    Case("npu_moe_re_routing", "int8", re_routing_int8, _MOVED),
)


@dataclass(frozen=True)
class FusedCase:
    """Dispatch, something for experts to do, and combine, on ``world`` ranks at once."""

    name: str
    quant_mode: int = 0
    world: int = 2
    rows: int = 8
    routed: int = 8
    copy: int = 2

    def __str__(self) -> str:
        return f"moe_distribute_v2-{self.name}"

    def arguments(self, rank: int) -> dict[str, Any]:
        """Of dispatch on one rank, without the communicator's name; and the weights of combine, as ``expert_scales``."""
        draw = Draw(f"{self} {rank}")
        return {
            "x": draw.normal(self.rows, HIDDEN),
            "expert_ids": choices(draw, self.rows, self.routed + self.copy),
            "expert_scales": draw.uniform(self.rows, CHOICES),
        }

    def common(self, rank: int, communicator: str) -> dict[str, Any]:
        return {
            "group_ep": communicator,
            "ep_world_size": self.world,
            "ep_rank_id": rank,
            "moe_expert_num": self.routed,
            "shared_expert_num": 0,
            "global_bs": 0,
            "copy_expert_num": self.copy,
        }


FUSED_OPERATORS = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
FUSED = (FusedCase("bf16"), FusedCase("int8", quant_mode=2))


def fused(case: FusedCase, rank: int, communicator: str, device: str = "cpu") -> dict[str, Tensor]:
    """Both calls of one rank; experts multiply by their number plus 1. On CPU: what is defined of the results."""
    ops, given = torch.ops.npu, {name: tensor.to(device) for name, tensor in case.arguments(rank).items()}
    common = case.common(rank, communicator)
    x, ids, weights = given["x"], given["expert_ids"], given["expert_scales"]
    rows, scales, assist, counts, received, tp_received, _ = ops.npu_moe_distribute_dispatch_v2(
        x, ids, quant_mode=case.quant_mode, expert_token_nums_type=1, **common
    )
    each = counts.cpu()
    num_rows = int(each.sum())
    first = rank * len(each)
    factors = torch.zeros(len(rows), 1)
    factors[:num_rows, 0] = (torch.arange(len(each)) + first + 1).repeat_interleave(each).float()
    factors = factors.to(device)
    wide = rows.float() * scales.unsqueeze(1) if case.quant_mode else rows.float()
    results = torch.where(factors > 0, wide * factors, 0).to(BF16)
    y = ops.npu_moe_distribute_combine_v2(
        results, ids, assist, received, weights, tp_send_counts=tp_received, ori_x=x, **common
    )
    found = {"rows": rows.cpu()[:num_rows], "counts": each, "y": y.cpu()}
    return found | ({"scales": scales.cpu()[:num_rows]} if case.quant_mode else {})


FUSED_RULES: dict[int, dict[str, Rule]] = {
    0: {"rows": Exact(), "counts": Exact(), "y": Close()},
    2: {"rows": Int8(), "scales": SCALE, "counts": Exact(), "y": Close(rtol=2**-6)},
}
