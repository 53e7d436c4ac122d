"""Calls of attention over latents, of the indexer, and of what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.case import FLOAT, HALF, Case, Draw
from tests.npu.compare import Arguments, Close, Exact, Opaque, Positions, Rule
from tests.npu.kernels.attention import MASK

HEADS, LATENT, ROPE = 16, 512, 64
BLOCK, BLOCKS, COLUMNS = 128, 8, 3
QUERIES, KEYS = (2, 3), (300, 131)  # of two requests
ROWS = sum(QUERIES)
SCALE = 192**-0.5
INDEX_HEADS, INDEX_WIDTH = 64, 128
SPARSE = Close(outliers=0.01)


def sums(counts: Sequence[int]) -> list[int]:
    return torch.tensor(counts).cumsum(0).tolist()


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def queries(draw: Draw, *lead: int) -> dict[str, Tensor]:
    return {"query": draw.normal(*lead, HEADS, LATENT), "query_rope": draw.normal(*lead, HEADS, ROPE)}


def block_table(draw: Draw) -> Tensor:
    """No block is of two requests; what a request does not need is 0."""
    order, table = draw.order(BLOCKS), torch.zeros(2, COLUMNS, dtype=torch.int32)
    table[0] = order[:3]
    table[1, :2] = order[3:5]
    return table


def fused_attention(draw: Draw) -> dict[str, Any]:
    """A decode step: pages, the last queries of each request, the mask that is aligned to the end."""
    latent = draw.normal(BLOCKS, BLOCK, LATENT)
    return queries(draw, ROWS) | {
        "key": latent,
        "value": latent,
        "key_rope": draw.normal(BLOCKS, BLOCK, ROPE),
        "atten_mask": torch.ones(MASK, MASK, dtype=torch.bool).triu(1),
        "actual_seq_qlen": sums(QUERIES),
        "actual_seq_kvlen": list(KEYS),
        "block_table": block_table(draw),
        "num_query_heads": HEADS,
        "num_key_value_heads": 1,
        "softmax_scale": SCALE,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": BLOCK,
        "return_softmax_lse": True,
    }


def fused_attention_heads_first(draw: Draw) -> dict[str, Any]:
    """Everything is seen, and the result lies by heads."""
    given = fused_attention(draw) | {"sparse_mode": 0, "input_layout": "TND_NTD"}
    del given["atten_mask"]
    return given


def fused_attention_unpaged(draw: Draw) -> dict[str, Any]:
    """A prompt: keys beside each other, key lengths are running sums too."""
    given = fused_attention(draw)
    latent, rope = draw.normal(sum(KEYS), 1, LATENT), draw.normal(sum(KEYS), 1, ROPE)
    del given["block_table"]
    return given | {"key": latent, "value": latent, "key_rope": rope, "actual_seq_kvlen": sums(KEYS), "block_size": 0}


def fused_attention_batch(draw: Draw) -> dict[str, Any]:
    """BSND with pages, two queries each, all of them defined."""
    given = fused_attention(draw) | queries(draw, 2, 2) | {"input_layout": "BSND", "sparse_mode": 0}
    del given["atten_mask"]
    return given | {"actual_seq_qlen": [2, 2], "return_softmax_lse": False}


_OLD_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}


def fused_attention_v1(draw: Draw) -> dict[str, Any]:
    return {_OLD_NAMES.get(name, name): value for name, value in fused_attention(draw).items()}


PICKED = 96


def picks(draw: Draw, keys: Sequence[int]) -> Tensor:
    """Distinct positions that the row sees; fewer than there is room for in the second row."""
    found = torch.full((ROWS, 1, PICKED), -1, dtype=torch.int32)
    row = 0
    for num_queries, num_keys in zip(QUERIES, keys, strict=True):
        for back in reversed(range(num_queries)):
            count = PICKED if row != 1 else PICKED // 2
            found[row, 0, :count] = draw.order(num_keys - back)[:count].int()
            row += 1
    return found


def sparse_attention(draw: Draw) -> dict[str, Any]:
    latent = draw.normal(BLOCKS, BLOCK, 1, LATENT)
    return queries(draw, ROWS) | {
        "key": latent,
        "value": latent,
        "sparse_indices": picks(draw, KEYS),
        "scale_value": SCALE,
        "block_table": block_table(draw),
        "actual_seq_lengths_query": int32(sums(QUERIES)),
        "actual_seq_lengths_kv": int32(KEYS),
        "key_rope": draw.normal(BLOCKS, BLOCK, 1, ROPE),
        "sparse_block_size": 1,
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
        "return_softmax_lse": False,
    }


def sparse_attention_unpaged(draw: Draw) -> dict[str, Any]:
    """The form that has the largest score and the sum, which partial results are merged by."""
    latent = draw.normal(sum(KEYS), 1, LATENT)
    given = sparse_attention(draw)
    del given["block_table"]
    return given | {
        "key": latent,
        "value": latent,
        "key_rope": draw.normal(sum(KEYS), 1, ROPE),
        "actual_seq_lengths_kv": int32(sums(KEYS)),
        "layout_kv": "TND",
        "return_softmax_lse": True,
    }


def indexer(count: int) -> Any:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "query": draw.normal(ROWS, INDEX_HEADS, INDEX_WIDTH),
            "key": draw.normal(BLOCKS, BLOCK, 1, INDEX_WIDTH),
            "weights": draw.normal(ROWS, INDEX_HEADS),
            "actual_seq_lengths_query": int32(sums(QUERIES)),
            "actual_seq_lengths_key": int32(KEYS),
            "block_table": block_table(draw),
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "sparse_count": count,
            "sparse_mode": 3,
            "return_value": False,
        }

    return make


def quant_indexer(draw: Draw) -> dict[str, Any]:
    given = indexer(64)(draw)
    del given["return_value"]
    return given | {
        "query": draw.int8(ROWS, INDEX_HEADS, INDEX_WIDTH),
        "key": draw.int8(BLOCKS, BLOCK, 1, INDEX_WIDTH),
        "weights": draw.normal(ROWS, INDEX_HEADS, dtype=HALF),
        "query_dequant_scale": draw.uniform(ROWS, INDEX_HEADS, low=0.01, high=0.03, dtype=HALF),
        "key_dequant_scale": draw.uniform(BLOCKS, BLOCK, 1, low=0.01, high=0.03, dtype=HALF),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
    }


def scores(given: Arguments) -> Tensor:
    """[rows, longest request], -inf for what a row does not see; written apart from the CPU kernel."""
    q, k = given["query"].double(), given["key"].double()
    if "key_dequant_scale" in given:
        q = q * given["query_dequant_scale"].double().unsqueeze(-1)
        k = k * given["key_dequant_scale"].double().unsqueeze(-1)
    found, row = torch.full((ROWS, max(KEYS)), -torch.inf, dtype=torch.float64), 0
    for request, (num_queries, num_keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        table = given["block_table"][request].long()
        mine = torch.cat([k[block].squeeze(1) for block in table])[:num_keys]
        for back in reversed(range(num_queries)):
            products = (mine @ q[row].T).clamp(min=0) @ given["weights"][row].double()
            found[row, : num_keys - back] = products[: num_keys - back]
            row += 1
    return found


def attention_update(update_type: int) -> Any:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "lse": [draw.normal(ROWS * HEADS, dtype=FLOAT) for _ in range(4)],
            "local_out": [draw.normal(ROWS * HEADS, LATENT) for _ in range(4)],
            "update_type": update_type,
        }

    return make


def scatter(draw: Draw) -> dict[str, Any]:
    """Rows of a cache that is seen as [slots, width]."""
    slots = draw.order(BLOCKS * BLOCK)[:ROWS].unsqueeze(1)
    return {"input": draw.normal(BLOCKS * BLOCK, ROPE), "indices": slots, "updates": draw.normal(ROWS, ROPE)}


def transpose_batchmatmul(draw: Draw) -> dict[str, Any]:
    """What brings latents back to the width of a head: [T, N, 512] and [N, 512, 128] -> [T, N, 128]."""
    return {
        "input": draw.normal(ROWS, HEADS, LATENT),
        "weight": draw.normal(HEADS, LATENT, 128, size=LATENT**-0.5),
        "perm_x1": [1, 0, 2],
        "perm_x2": [0, 1, 2],
        "perm_y": [1, 0, 2],
    }


_FUSED: tuple[Rule, ...] = (Close(rtol=2**-6, outliers=0.01), Close(rtol=2**-7))
_TOP = Positions(scores)

CASES = (
    Case("npu_fused_infer_attention_score_v2", "pages", fused_attention, _FUSED),
    Case("npu_fused_infer_attention_score_v2", "by heads", fused_attention_heads_first, _FUSED),
    Case("npu_fused_infer_attention_score_v2", "a prompt", fused_attention_unpaged, _FUSED),
    Case("npu_fused_infer_attention_score_v2", "a batch", fused_attention_batch, (_FUSED[0], Opaque())),
    Case("npu_fused_infer_attention_score", "pages", fused_attention_v1, _FUSED),
    Case("npu_sparse_flash_attention", "pages", sparse_attention, (SPARSE, Opaque(), Opaque())),
    Case("npu_sparse_flash_attention", "with sums", sparse_attention_unpaged, (SPARSE, Close(), Close())),
    Case("npu_lightning_indexer", "64 of 300", indexer(64), (_TOP, Opaque())),
    Case(
        "npu_lightning_indexer",
        "2048 of 300",
        indexer(2048),
        (_TOP, Opaque()),
        idle=dict.fromkeys(("query", "weights"), "every key that is seen is among the best")
        | dict.fromkeys(("key", "block_table"), "every key that is seen is among the best"),
    ),
    Case("npu_quant_lightning_indexer", "64 of 300", quant_indexer, (_TOP,)),
    Case("npu_attention_update", "with the merged lse", attention_update(1), (Close(), Close(rtol=2**-10))),
    Case("npu_attention_update", "without it", attention_update(0), (Close(), Opaque())),
    Case("npu_scatter_nd_update_", "rows", scatter, (Exact(),), {"input": Exact()}),
    Case("npu_scatter_nd_update", "rows", scatter, (Exact(),)),
    Case("npu_transpose_batchmatmul", "latents to heads", transpose_batchmatmul, (Close(),)),
)
