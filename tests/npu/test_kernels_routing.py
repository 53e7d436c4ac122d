"""Routing kernels against slow loops, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.device import install
from tests.npu.kernels.routing import define_own

install()
define_own()
npu = torch.ops.npu
DRAW = torch.Generator().manual_seed(13)
ROUTED, ROWS, TOPK, WIDTH = 6, 5, 3, 8


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=dtype)


IDS = torch.stack([torch.randperm(ROUTED + 2, generator=DRAW)[:TOPK] for _ in range(ROWS)]).int()  # 6 and 7: no weights


def test_gating_chooses_with_the_bias_and_weighs_without() -> None:
    x, bias = normal(4, 10), normal(10) * 0.1
    weights, ids, scores = npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=1, group_count=1, renorm=0, norm_type=0, out_flag=True, routed_scaling_factor=6.0
    )
    assert ids.dtype == torch.int32
    for row, (logits, chosen, factors) in enumerate(zip(x.tolist(), ids.tolist(), weights.tolist(), strict=True)):
        total = sum(math.exp(value) for value in logits)
        p = [math.exp(value) / total for value in logits]
        best = sorted(range(10), key=lambda e, p=p: -(p[e] + bias[e].item()))[:3]  # type: ignore[misc]
        assert chosen == best
        assert factors == pytest.approx([6.0 * p[e] for e in best], rel=1e-5)
        assert scores[row].tolist() == pytest.approx(p, rel=1e-5)
    assert npu.npu_moe_gating_top_k(x, 3)[2].isnan().all()


def test_gating_takes_the_lower_of_equal_experts() -> None:
    assert npu.npu_moe_gating_top_k(torch.zeros(1, 6), 2)[1].tolist() == [[0, 1]]


def sorted_slowly(ids: Tensor, low: int, high: int) -> list[int]:
    """Flat sources by expert."""
    flat = ids.flatten().tolist()
    return [place for expert in range(low, high) for place, chosen in enumerate(flat) if chosen == expert]


@pytest.mark.parametrize(("low", "high"), [(0, ROUTED), (2, 4), (5, 6)])
@pytest.mark.parametrize("kind", [0, 1])
def test_init_routing_keeps_the_range_in_front(low: int, high: int, kind: int) -> None:
    x, scale = normal(ROWS, WIDTH), normal(ROWS)
    rows, index, counts, scales = npu.npu_moe_init_routing_v2(
        x,
        IDS,
        scale=scale,
        expert_num=ROUTED,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[low, high],
        row_idx_type=kind,
    )
    sources = sorted_slowly(IDS, low, high)
    used = len(sources)
    assert 0 < used < ROWS * TOPK and rows.shape == (ROWS * TOPK, WIDTH)
    assert torch.equal(rows[:used], x[[place // TOPK for place in sources]])
    assert torch.equal(scales[:used], scale[[place // TOPK for place in sources]])
    assert rows[used:].isnan().all() and scales[used:].isnan().all()
    assert counts.dtype == torch.int64 and counts.tolist() == [IDS.flatten().tolist().count(e) for e in range(low, high)]
    if kind == 1:
        assert index[:used].tolist() == sources
        assert index[used:].min() > 1_000_000
    else:
        assert index.tolist() == [sources.index(place) if place in sources else -1 for place in range(ROWS * TOPK)]


def test_init_routing_quantises_and_moves_int8() -> None:
    x = normal(ROWS, WIDTH, dtype=torch.bfloat16)
    common: dict[str, Any] = {"expert_num": ROUTED, "expert_tokens_num_flag": True}
    q, _, sums, scales = npu.npu_moe_init_routing_v2(x, IDS, quant_mode=1, expert_tokens_num_type=0, **common)
    sources = sorted_slowly(IDS, 0, ROUTED)
    assert sums.tolist() == [int((expert >= IDS).sum()) for expert in range(ROUTED)]
    row_q, row_scale = npu.npu_dynamic_quant(x)
    rows = [place // TOPK for place in sources]
    assert torch.equal(q[: len(rows)], row_q[rows]) and torch.equal(scales[: len(rows)], row_scale[rows])
    assert scales[len(rows) :].isnan().all()
    moved, *_ = npu.npu_moe_init_routing_v2(row_q, IDS, quant_mode=-1, expert_tokens_num_type=1, **common)
    assert moved.dtype == torch.int8 and torch.equal(moved[: len(rows)], row_q[rows])
    smooth = normal(2, WIDTH)
    q, _, _, scales = npu.npu_moe_init_routing_v2(x, IDS, scale=smooth, quant_mode=1, active_expert_range=[2, 4], **common)
    for place, source in enumerate(sorted_slowly(IDS, 2, 4)):
        wanted = x[source // TOPK].float() * smooth[int(IDS.flatten()[source]) - 2]
        assert scales[place].item() == pytest.approx(wanted.abs().max().item() / 127)
        assert (q[place] - wanted / scales[place]).abs().max() <= 0.501
    assert npu.npu_moe_init_routing_v2(x, IDS, expert_num=ROUTED)[2].min() > 1_000_000


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finalize_routing_reads_its_index_by_mode(mode: int, dtype: torch.dtype) -> None:
    total = ROWS * TOPK
    rows = normal(total, WIDTH, dtype=dtype)
    places = torch.randperm(total, generator=DRAW).view(ROWS, TOPK)
    if mode in (1, 3):
        places[1, 2] = places[4, 0] = -1
        rows[0] = torch.nan  # nobody's, unless it is somebody's below
        places[places == 0] = -1
    scales, skip1, skip2 = (
        normal(ROWS, TOPK, dtype=dtype),
        normal(ROWS, WIDTH, dtype=dtype),
        normal(ROWS, WIDTH, dtype=dtype),
    )
    bias, experts = normal(ROUTED, WIDTH, dtype=dtype), torch.randint(0, ROUTED, (ROWS, TOPK), generator=DRAW).int()
    given = rows.view(3, 5, WIDTH) if mode == 1 else rows.unsqueeze(1) if mode == 3 else rows
    index = (places if mode in (2, 3) else places.t()).flatten().int()
    for has_skips, has_bias in ((True, True), (False, False)):
        y = npu.npu_moe_finalize_routing(
            given,
            skip1 if has_skips else None,
            skip2 if has_skips else None,
            bias if has_bias else None,
            scales,
            index,
            experts if has_bias else None,
            drop_pad_mode=mode,
        )
        expected = (skip1.double() + skip2.double()) if has_skips else torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for t in range(ROWS):
            for k in range(TOPK):
                if places[t, k] >= 0:
                    extra = bias[experts[t, k]].double() if has_bias else 0.0
                    expected[t] += scales[t, k].double() * (rows[places[t, k]].double() + extra)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=0.004 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_finalize_routing_without_scales_takes_k() -> None:
    rows = normal(4, WIDTH)
    y = npu.npu_moe_finalize_routing(rows, None, None, None, None, ints([3, 0, 1, 2]), None, drop_pad_mode=2, k=2)
    assert torch.equal(y, torch.stack((rows[3] + rows[0], rows[1] + rows[2])))


def test_routing_there_and_back_is_the_mixture() -> None:
    """Experts of one rank, here multiplications by their number; choices of others contribute nothing."""
    x, weights = normal(ROWS, WIDTH), normal(ROWS, TOPK)
    rows, index, counts, _ = npu.npu_moe_init_routing_v2(
        x,
        IDS,
        expert_num=ROUTED,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[1, 5],
    )
    factors = torch.arange(1, 5).repeat_interleave(counts).unsqueeze(1)
    rows[: len(factors)] *= factors
    y = npu.npu_moe_finalize_routing(rows.unsqueeze(1), None, None, None, weights, index, None, drop_pad_mode=3)
    is_here = (IDS >= 1) & (IDS < 5)
    torch.testing.assert_close(y, x * (weights * IDS * is_here).sum(-1, keepdim=True))


def test_re_routing_brings_experts_together() -> None:
    counts = [[2, 0, 1], [1, 3, 0]]
    tokens, scales = normal(9, WIDTH), normal(9)
    runs, start = {}, 0
    for rank in range(2):
        for expert in range(3):
            runs[rank, expert] = list(range(start, start + counts[rank][expert]))
            start += counts[rank][expert]
    order = [row for expert in range(3) for rank in range(2) for row in runs[rank, expert]]
    out, moved, index, totals = npu.npu_moe_re_routing(tokens, ints(counts, dtype=torch.int64), per_token_scales=scales)
    assert index.dtype == torch.int32 and index[:7].tolist() == order and index[7:].min() > 1_000_000
    assert torch.equal(out[:7], tokens[order]) and torch.equal(moved[:7], scales[order])
    assert out[7:].isnan().all() and moved[7:].isnan().all()
    assert totals.tolist() == [3, 3, 1]


N, K = 4, 2
MODS = (torch.randint(900, 1100, (N - 1, K), generator=DRAW)).int()
WEIGHTS = torch.randint(0, 900, (N - 1, K, N), generator=DRAW).int()
STARTS = ints([0, *range(1100, 1100 * (N - 1) * K + 1, 1100)])


def table_args(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, rows and columns of two requests in a table of 4 rows of 12."""
    return torch.arange(50, 50 + sum(lengths), dtype=torch.int32), ints([3, 1], dtype=torch.int64), ints([0, 5])


def test_the_token_table_takes_what_is_not_ignored() -> None:
    tokens, rows, columns = table_args([3, 4])
    table = torch.full((4, 12), 9, dtype=torch.int32)
    torch.ops.flash.npu_update_oe_token_table(tokens, ints([3, 4]), rows, columns, ints([51, 54]), 2, 12, table)
    assert table[3].tolist() == [50, -1, 52, *[9] * 9]
    assert table[1].tolist() == [*[9] * 5, 53, -1, 55, 56, 9, 9, 9]
    assert (table[[0, 2]] == 9).all()


def test_hashes_look_back_to_the_start_or_a_negative_entry() -> None:
    tokens, rows, columns = table_args([3, 4])
    table = torch.full((4, 12), 9, dtype=torch.int32)
    torch.ops.flash.npu_update_oe_token_table(tokens, ints([3, 4]), rows, columns, ints([54]), 2, 12, table)
    ids = npu.compute_n_gram_ids(WEIGHTS, MODS, STARTS, tokens, ints([3, 7]), table, rows, columns, 2, N, K, 12)
    assert ids.dtype == torch.int32
    expected = []
    for row, column, length in ((3, 0, 3), (1, 5, 4)):
        for place in range(column, column + length):
            hashes = []
            for n in range(2, N + 1):
                for k in range(K):
                    total = 0
                    for back in range(n):
                        if place - back < 0 or (token := int(table[row, place - back])) < 0:
                            break
                        total += token * int(WEIGHTS[n - 2, k, back])
                    hashes.append(total % int(MODS[n - 2, k]) + int(STARTS[(n - 2) * K + k]))
            expected.append(hashes)
    assert ids.tolist() == expected


X = normal(ROWS, WIDTH)
INIT = npu.npu_moe_init_routing_v2
LAST, SCALES, INDEX = normal(15, WIDTH), normal(ROWS, TOPK), torch.arange(15, dtype=torch.int32)
COUNTS = ints([[1, 2], [2, 0]])


def finalize(**changed: Any) -> Any:
    given = {
        "expanded_permuted_rows": LAST,
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": SCALES,
        "expanded_src_to_dst_row": INDEX,
        "export_for_source_row": None,
        "drop_pad_mode": 2,
    }
    return npu.npu_moe_finalize_routing(**(given | changed))


def hashes(**changed: Any) -> Any:
    tokens, rows, columns = table_args([3, 4])
    given = {
        "oe_weights": WEIGHTS,
        "oe_mods": MODS,
        "exclusive_oe_embeder_size_sums": STARTS,
        "tokens": tokens,
        "exclusive_req_len_sums": ints([3, 7]),
        "oe_token_table": torch.zeros(4, 12, dtype=torch.int32),
        "row_indices": rows,
        "column_starts": columns,
        "batch_size": 2,
        "oe_n": N,
        "oe_k": K,
        "max_context_len": 12,
    }
    return npu.compute_n_gram_ids(**(given | changed))


REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (npu.npu_moe_gating_top_k, (X, 0), {}, "npu_moe_gating_top_k: k is 0"),
    (npu.npu_moe_gating_top_k, (X, WIDTH + 1), {}, "k is 9, allowed are 1 to 8"),
    (npu.npu_moe_gating_top_k, (torch.zeros(1, 2049), 2), {}, "2049"),
    (npu.npu_moe_gating_top_k, (X.int(), 2), {}, "x is torch.int32"),
    (npu.npu_moe_gating_top_k, (X, 2), {"bias": torch.ones(WIDTH).bfloat16()}, "bias is torch.bfloat16"),
    (npu.npu_moe_gating_top_k, (X, 2), {"bias": torch.ones(WIDTH - 1)}, "bias has shape"),
    (npu.npu_moe_gating_top_k, (X, 2), {"renorm": 1}, "renorm is 1"),
    (npu.npu_moe_gating_top_k, (X, 2), {"norm_type": 1}, "norm_type is 1"),
    (npu.npu_moe_gating_top_k, (X, 2), {"k_group": 2}, "k_group is 2"),
    (INIT, (X, IDS.long()), {"expert_num": ROUTED}, "npu_moe_init_routing_v2: expert_idx is torch.int64"),
    (INIT, (X, IDS[:4]), {"expert_num": ROUTED}, "expert_idx has shape"),
    (INIT, (X, IDS - 3), {"expert_num": ROUTED}, "below 0"),
    (INIT, (X, IDS), {}, "expert_num is -1"),
    (INIT, (X, IDS), {"expert_num": 4, "active_expert_range": [2, 5]}, "2 to 5 of 4 experts"),
    (INIT, (X, IDS), {"expert_num": 4, "active_expert_range": [3, 3]}, "3 to 3"),
    (INIT, (X, IDS), {"expert_num": 4, "quant_mode": 0}, "quant_mode is 0"),
    (INIT, (X, IDS), {"expert_num": 4, "drop_pad_mode": 1}, "drop_pad_mode is 1"),
    (INIT, (X, IDS), {"expert_num": 4, "active_num": 4}, "active_num is 4"),
    (INIT, (X, IDS), {"expert_num": 4, "row_idx_type": 2}, "row_idx_type is 2"),
    (INIT, (X, IDS), {"expert_num": 4, "expert_tokens_num_type": 2}, "expert_tokens_num_type is 2"),
    (INIT, (X, IDS), {"expert_num": 4, "scale": torch.ones(4)}, "scale has shape"),
    (INIT, (X, IDS), {"expert_num": 4, "scale": torch.ones(5).half()}, "scale is torch.float16"),
    (INIT, (X.to(torch.int8), IDS), {"expert_num": 4, "quant_mode": 1}, "x is torch.int8"),
    (INIT, (X, IDS), {"expert_num": 4, "quant_mode": 1, "scale": torch.ones(3, WIDTH)}, "scale has shape"),
    (finalize, (), {"drop_pad_mode": 4}, "npu_moe_finalize_routing: drop_pad_mode is 4"),
    (finalize, (), {"drop_pad_mode": 3}, "expanded_permuted_rows has shape"),
    (finalize, (), {"expanded_permuted_rows": LAST[:14]}, "expanded_permuted_rows has shape"),
    (finalize, (), {"expanded_src_to_dst_row": INDEX.long()}, "expanded_src_to_dst_row is torch.int64"),
    (finalize, (), {"expanded_src_to_dst_row": INDEX - 1}, "outside 0 to 14"),
    (finalize, (), {"expanded_src_to_dst_row": INDEX + 1}, "outside 0 to 14"),
    (
        finalize,
        (),
        {"drop_pad_mode": 3, "expanded_permuted_rows": LAST.unsqueeze(1), "expanded_src_to_dst_row": INDEX - 2},
        "outside -1 to 14",
    ),
    (finalize, (), {"expanded_src_to_dst_row": INDEX[:14]}, "no multiple of K = 3"),
    (finalize, (), {"scales": SCALES.bfloat16()}, "scales is torch.bfloat16"),
    (finalize, (), {"scales": SCALES[:4]}, "scales has shape"),
    (finalize, (), {"skip2": X}, "skip1 is not"),
    (finalize, (), {"skip1": X.bfloat16()}, "skip1 is torch.bfloat16"),
    (finalize, (), {"bias": X}, "export_for_source_row is not given"),
    (finalize, (), {"bias": X, "export_for_source_row": IDS}, "outside 0 to 4"),
    (npu.npu_moe_re_routing, (X, COUNTS.float()), {}, "npu_moe_re_routing: expert_token_num_per_rank is torch.float32"),
    (npu.npu_moe_re_routing, (X, COUNTS * 2), {}, "covers 10 rows of 5"),
    (npu.npu_moe_re_routing, (X, COUNTS[0]), {}, "expert_token_num_per_rank has shape"),
    (npu.npu_moe_re_routing, (torch.zeros(5, 16384), COUNTS), {}, "16384"),
    (npu.npu_moe_re_routing, (X, COUNTS), {"idx_type": 1}, "idx_type is 1"),
    (npu.npu_moe_re_routing, (X, COUNTS), {"expert_token_num_type": 0}, "expert_token_num_type is 0"),
    (npu.npu_moe_re_routing, (X, COUNTS), {"per_token_scales": torch.ones(4)}, "per_token_scales has shape"),
    (hashes, (), {"oe_mods": MODS.long()}, "compute_n_gram_ids: oe_mods is torch.int64"),
    (hashes, (), {"row_indices": ints([3, 1])}, "row_indices is torch.int32"),
    (hashes, (), {"row_indices": ints([3, 4], dtype=torch.int64)}, "row_indices is 4, allowed are 0 to 3"),
    (hashes, (), {"column_starts": ints([0, 9])}, "columns 9 to 13 lie beyond a table of 12"),
    (hashes, (), {"exclusive_oe_embeder_size_sums": STARTS[:-1]}, "exclusive_oe_embeder_size_sums has shape"),
    (hashes, (), {"exclusive_req_len_sums": ints([3, 8])}, "covers 8 rows of 7"),
]


@pytest.mark.parametrize(("call", "tensors", "keywords", "complaint"), REFUSED)
def test_refused(call: Callable[..., Any], tensors: tuple[Any, ...], keywords: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call(*tensors, **keywords)


def test_the_given_arguments_are_accepted() -> None:
    finalize()
    hashes()
    npu.npu_moe_re_routing(X, COUNTS)
