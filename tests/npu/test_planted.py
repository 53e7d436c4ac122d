"""Planted mistakes: the NPU table calls one operator otherwise than it should, and a test of the table has to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tests.npu import test_table_experts, test_table_fused, test_table_rows
from tests.npu.kernels import dispatch, groups

Arguments = dict[str, Any]
Check = Callable[[], object]


@contextmanager
def altered(operator: str, change: Callable[[Arguments], Arguments]) -> Iterator[list[Arguments]]:
    """``torch.ops.npu.<operator>`` gets what ``change`` makes of its arguments, all of them by name; yields the calls."""
    real, calls = getattr(torch.ops.npu, operator), []
    names = [argument.name for argument in real.default._schema.arguments]
    if isinstance(change, partial):  # else the refusal of an unknown name would pass for what finds the mistake
        assert {*change.args[0]} <= {*names}, f"{operator} has no {sorted({*change.args[0]} - {*names})}"

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(change(dict(zip(names, args, strict=False)) | kwargs))
        return real(**calls[-1])

    setattr(torch.ops.npu, operator, call)
    try:
        yield calls
    finally:
        setattr(torch.ops.npu, operator, real)


@dataclass(frozen=True)
class Planted:
    """``change`` of the calls of ``operator``, and the test that goes red."""

    operator: str
    change: Callable[[Arguments], Arguments]
    check: Check


def given(**changed: Any) -> Callable[[Arguments], Arguments]:
    """Other values than those that the table gives, of arguments that the operator has."""
    return partial(_with, changed)


def _with(changed: Arguments, arguments: Arguments) -> Arguments:
    return arguments | changed


def renamed(old: str, new: str) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {new if name == old else name: value for name, value in arguments.items()}


def left_out(name: str) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {other: value for other, value in arguments.items() if other != name}


def turned(name: str) -> Callable[[Arguments], Arguments]:
    """A matrix in the other layout."""
    return lambda arguments: arguments | {name: arguments[name].transpose(-1, -2).contiguous()}


FLOAT = torch.float32


def norms() -> None:
    test_table_rows.test_norms_and_activation(FLOAT, 5)


def int8_products() -> None:
    test_table_rows.test_int8_products(FLOAT, 7)


def maps() -> None:
    test_table_rows.test_maps(FLOAT, 7)


def routing() -> None:
    test_table_experts.test_routing(9, False)


def rows_by_expert() -> None:
    test_table_experts.test_rows_by_expert(FLOAT, test_table_experts.COUNTS[0], False)


def int8_rows_by_expert() -> None:
    test_table_experts.test_rows_by_expert(FLOAT, test_table_experts.COUNTS[0], True)


def grouped() -> None:
    test_table_experts.test_grouped_experts(FLOAT, "mixed", False)


def int8_grouped() -> None:
    test_table_experts.test_grouped_experts(FLOAT, "mixed", True)


def negative_ids() -> None:
    test_table_experts.test_grouped_experts(FLOAT, "below zero", False)


def fused(case: str) -> Check:
    def check() -> None:
        test_table_fused.test_there_and_back(("A3", ""), case)

    return check


def hierarchy() -> None:
    test_table_fused.test_there_and_back_where_copies_do_not_travel({})


PLANTED = {
    "a norm's epsilon by another name": Planted("npu_rms_norm", renamed("epsilon", "eps"), norms),
    "a norm's default epsilon": Planted("npu_rms_norm", left_out("epsilon"), norms),
    "sums with a default epsilon": Planted("npu_add_rms_norm", left_out("epsilon"), norms),
    "gating over rows": Planted("npu_swiglu", given(dim=0), norms),
    "no scales of rows": Planted("npu_quant_matmul", given(pertoken_scale=None), int8_products),
    "an int8 weight as it is loaded": Planted("npu_quant_matmul", turned("x2"), int8_products),
    "int8 results": Planted("npu_quant_matmul", left_out("output_dtype"), int8_products),
    "heads stay behind": Planted("npu_transpose_batchmatmul", given(perm_x1=[0, 1, 2]), maps),
    "no bias of the choice": Planted("npu_moe_gating_top_k", given(bias=None), routing),
    "weights without their factor": Planted("npu_moe_gating_top_k", left_out("routed_scaling_factor"), routing),
    "counts as running sums": Planted("npu_grouped_matmul", given(group_list_type=0), rows_by_expert),
    "running sums as counts": Planted("npu_moe_init_routing_v2", given(expert_tokens_num_type=0), grouped),
    "silu on the right": Planted("npu_dequant_swiglu_quant", given(activate_left=False), int8_rows_by_expert),
    "a static second quantisation": Planted("npu_dequant_swiglu_quant", given(quant_mode=0), int8_rows_by_expert),
    "one scale for all experts": Planted(
        "npu_dequant_swiglu_quant",
        lambda a: a | {"weight_scale": a["weight_scale"][:1].expand_as(a["weight_scale"]).contiguous()},
        int8_rows_by_expert,
    ),
    "no scales in the second product": Planted("npu_grouped_matmul", given(per_token_scale=None), int8_rows_by_expert),
    "rows leave without scales": Planted("npu_moe_init_routing_v2", given(scale=None), int8_grouped),
    "places by source": Planted("npu_moe_init_routing_v2", given(row_idx_type=1), grouped),
    "ids below zero": Planted(
        "npu_moe_init_routing_v2",
        lambda a: a | {"expert_idx": torch.where(a["expert_idx"] > 9999, -1, a["expert_idx"])},
        negative_ids,
    ),
    "choices by columns": Planted("npu_moe_finalize_routing", given(drop_pad_mode=1), grouped),
    "missing rows are read": Planted("npu_moe_finalize_routing", given(drop_pad_mode=2), grouped),
    "no weights of choices": Planted(
        "npu_moe_finalize_routing", lambda a: a | {"scales": torch.ones_like(a["scales"])}, grouped
    ),
    "a shared expert by default": Planted("npu_moe_distribute_dispatch_v2", left_out("shared_expert_num"), fused("mixed")),
    "floats travel": Planted("npu_moe_distribute_dispatch_v2", given(quant_mode=0), fused("int8")),
    "running sums of what came": Planted("npu_moe_distribute_dispatch_v2", given(expert_token_nums_type=0), fused("mixed")),
    "copies that give nothing": Planted(
        "npu_moe_distribute_combine_v2",
        lambda a: a | {"copy_expert_num": 0, "zero_expert_num": a["copy_expert_num"]},
        fused("mixed"),
    ),
    "nothing to copy": Planted("npu_moe_distribute_combine_v2", given(ori_x=None), fused("mixed")),
    "masks on one way only": Planted("npu_moe_distribute_combine_v2", given(x_active_mask=None), fused("masks")),
    "unweighted sums": Planted(
        "npu_moe_distribute_combine_v2",
        lambda a: a | {"expert_scales": torch.ones_like(a["expert_scales"])},
        fused("mixed"),
    ),
    "weights that stay at home": Planted("npu_moe_distribute_dispatch_v2", given(expert_scales=None), hierarchy),
    "weights that do not come back": Planted("npu_moe_distribute_combine_v2", given(expand_scales=None), hierarchy),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    monkeypatch.setattr(test_table_fused, "PATIENCE_S", 2.0)
    try:
        with (
            altered(planted.operator, planted.change) as calls,  # before what follows: its own complaint is no find
            pytest.raises((AssertionError, ValueError, RuntimeError, TypeError)),
        ):
            planted.check()
        assert calls, "what was planted was never called"
    finally:
        groups.unregister_group(test_table_fused.NAME)
        dispatch.forget_dispatches()


@pytest.mark.parametrize(
    "check", {planted.check: None for planted in PLANTED.values()}, ids=lambda check: check.__qualname__
)
def test_without_a_mistake_nothing_is_seen(check: Check) -> None:
    try:
        check()
    finally:
        groups.unregister_group(test_table_fused.NAME)
        dispatch.forget_dispatches()
        dispatch.choose_soc("A3")
