"""Single operators through the release's own dispatcher, shape functions and graph compiler, on both processors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.npu.offline.capture import Demand, ge_graph
from tests.npu.offline.real import SOCS, torchair
from tests.npu.offline.shapes import empty, fake

ops = torch.ops.npu
INT8, INT32, INT64, FLOAT = torch.int8, torch.int32, torch.int64, torch.float32
TOKENS, HEADS, PAGES, PAGE = 4, 64, 10, 128


def query() -> tuple[torch.Tensor, torch.Tensor]:
    return empty(TOKENS, HEADS, 512), empty(TOKENS, HEADS, 64)


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    return empty(PAGES, PAGE, 1, 512), empty(PAGES, PAGE, 1, 64)


def lengths() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the queries, of the keys, and the block table."""
    return empty(2, dtype=INT32), empty(2, dtype=INT32), empty(2, 5, dtype=INT32)


def mla_prolog() -> Any:
    return ops.npu_mla_prolog_v3(
        empty(TOKENS, 1024),
        empty(1024, 1536),
        empty(1536, HEADS * 192),
        empty(HEADS, 128, 512),
        empty(1024, 576),
        empty(1536),
        empty(512),
        empty(TOKENS, 64),
        empty(TOKENS, 64),
        *pages(),
        cache_index=empty(TOKENS, dtype=INT64),
        cache_mode="PA_BSND",
        query_norm_flag=True,
        qc_qr_scale=0.8,
        kc_scale=1.4,
    )


def kv_cache(operator: Any) -> Any:
    rope = (empty(TOKENS, 1, 1, 64), empty(TOKENS, 1, 1, 64))
    latent, rotated = pages()
    index = empty(TOKENS, dtype=INT64)
    return operator(empty(TOKENS, 1, 1, 576), empty(512), *rope, index, rotated, latent, epsilon=1e-5, cache_mode="PA")


def fused_attention(call: Callable[..., Any], query_lengths: Any, key_lengths: Any, layout: str = "TND") -> Any:
    (latent, rotated), (nope, rope) = pages(), query()
    return call(
        nope,
        latent,
        latent,
        query_rope=rope,
        key_rope=rotated,
        actual_seq_qlen=query_lengths,
        actual_seq_kvlen=key_lengths,
        block_table=lengths()[2],
        num_query_heads=HEADS,
        num_key_value_heads=1,
        softmax_scale=0.1,
        input_layout=layout,
        sparse_mode=0,
        block_size=PAGE,
        return_softmax_lse=True,
    )


def indexer(*, values: bool) -> Any:
    queries, keys, table = lengths()
    return ops.npu_lightning_indexer(
        empty(TOKENS, 64, 128),
        empty(PAGES, PAGE, 1, 128),
        empty(TOKENS, 64),
        actual_seq_lengths_query=queries,
        actual_seq_lengths_key=keys,
        block_table=table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=2048,
        sparse_mode=3,
        return_value=values,
    )


def sparse_attention(*, paged: bool, lse: bool) -> Any:
    (nope, rope), (queries, keys, table) = query(), lengths()
    latent, rotated = pages() if paged else (empty(300, 1, 512), empty(300, 1, 64))
    return ops.npu_sparse_flash_attention(
        nope,
        latent,
        latent,
        empty(TOKENS, 1, 2048, dtype=INT32),
        0.1,
        block_table=table if paged else None,
        actual_seq_lengths_query=queries,
        actual_seq_lengths_kv=keys,
        query_rope=rope,
        key_rope=rotated,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND" if paged else "TND",
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=lse,
    )


def dispatch() -> Any:
    return ops.npu_moe_distribute_dispatch_v2(
        empty(TOKENS, 1024),
        empty(TOKENS, 4, dtype=INT32),
        "ep",
        8,
        0,
        16,
        scales=None,
        quant_mode=2,
        global_bs=0,
        shared_expert_num=0,
        shared_expert_rank_num=0,
        expert_token_nums_type=1,
        comm_alg="",
        copy_expert_num=4,
    )


def combine() -> Any:
    rows = 8 * TOKENS * 2
    return ops.npu_moe_distribute_combine_v2(
        empty(rows, 1024),
        empty(TOKENS, 4, dtype=INT32),
        empty(rows * 128, dtype=INT32),
        empty(16, dtype=INT32),
        empty(TOKENS, 4, dtype=FLOAT),
        "ep",
        8,
        0,
        16,
        ori_x=empty(TOKENS, 1024),
        shared_expert_num=0,
        shared_expert_rank_num=0,
        global_bs=0,
        comm_alg="",
        copy_expert_num=4,
    )


def grouped_matmul() -> Any:
    return ops.npu_grouped_matmul(
        [empty(8, 64, dtype=INT8)],
        [empty(2, 64, 32, dtype=INT8)],
        scale=[empty(2, 32)],
        per_token_scale=[empty(8, dtype=FLOAT)],
        group_list=empty(2, dtype=INT64),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.bfloat16,
    )


def dequant_swiglu_quant() -> Any:
    return ops.npu_dequant_swiglu_quant(
        empty(8, 128, dtype=INT32),
        weight_scale=empty(2, 128, dtype=FLOAT),
        activation_scale=empty(8, 1, dtype=FLOAT),
        group_index=empty(2, dtype=INT64),
        activate_left=True,
        quant_mode=1,
    )


def init_routing() -> Any:
    return ops.npu_moe_init_routing_v2(
        empty(TOKENS, 64),
        empty(TOKENS, 4, dtype=INT32),
        active_num=TOKENS * 4,
        expert_num=16,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, 8],
        row_idx_type=0,
    )


def finalize_routing() -> Any:
    rows, index = empty(TOKENS * 4, 1, 64), empty(TOKENS * 4, dtype=INT32)
    return ops.npu_moe_finalize_routing(rows, None, None, None, empty(TOKENS, 4), index, None, drop_pad_mode=3)


def quant_matmul() -> Any:
    weight, scale = empty(64, 32, dtype=INT8), empty(32, dtype=FLOAT)
    return ops.npu_quant_matmul(
        empty(8, 64, dtype=INT8), weight, scale, pertoken_scale=empty(8, dtype=FLOAT), output_dtype=torch.bfloat16
    )


def quant_indexer() -> Any:
    queries, keys, table = lengths()
    half = torch.float16
    return ops.npu_quant_lightning_indexer(
        empty(TOKENS, 64, 128, dtype=INT8),
        empty(PAGES, PAGE, 1, 128, dtype=INT8),
        empty(TOKENS, 64, dtype=half),
        empty(TOKENS, 64, dtype=half),
        empty(PAGES, PAGE, 1, dtype=half),
        0,
        0,
        actual_seq_lengths_query=queries,
        actual_seq_lengths_key=keys,
        block_table=table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=2048,
    )


def prefetch() -> Any:
    weight, before = empty(64, 64), empty(64)
    ops.npu_prefetch(weight, before, 4096, 0)
    return before + 1


NODES: dict[str, tuple[Callable[[], Any], str]] = {
    "rms_norm": (lambda: ops.npu_rms_norm(empty(4, 64), empty(64), epsilon=1e-6), "RmsNorm"),
    "add_rms_norm": (lambda: ops.npu_add_rms_norm(empty(4, 64), empty(4, 64), empty(64), epsilon=1e-6), "AddRmsNorm"),
    "swiglu": (lambda: ops.npu_swiglu(empty(4, 64), dim=-1), "SwiGlu"),
    "dynamic_quant": (lambda: ops.npu_dynamic_quant(empty(4, 64), dst_type=INT8), "DynamicQuant"),
    "quant_matmul": (quant_matmul, "QuantBatchMatmulV3"),
    "dequant_swiglu_quant": (dequant_swiglu_quant, "DequantSwigluQuant"),
    "grouped_matmul": (grouped_matmul, "GroupedMatmul"),
    "kv_rmsnorm_rope_cache": (lambda: kv_cache(ops.npu_kv_rmsnorm_rope_cache), "KvRmsNormRopeCache"),
    "kv_rmsnorm_rope_cache_v2": (lambda: kv_cache(ops.npu_kv_rmsnorm_rope_cache_v2), "KvRmsNormRopeCache"),
    "interleave_rope": (
        lambda: ops.npu_interleave_rope(empty(4, 8, 1, 64), empty(4, 1, 1, 64), empty(4, 1, 1, 64)),
        "InterleaveRope",
    ),
    "rotary_mul": (lambda: ops.npu_rotary_mul(empty(4, 8, 1, 64), empty(4, 1, 1, 64), empty(4, 1, 1, 64)), "RotaryMul"),
    "mla_prolog_v3": (mla_prolog, "MlaPrologV3"),
    "fused_infer_attention_score_v2": (
        lambda: fused_attention(ops.npu_fused_infer_attention_score_v2, [2, 4], [90, 7]),
        "FusedInferAttentionScore",
    ),
    "lightning_indexer": (lambda: indexer(values=False), "LightningIndexer"),
    "lightning_indexer with values": (lambda: indexer(values=True), "LightningIndexer"),
    "quant_lightning_indexer": (quant_indexer, "QuantLightningIndexer"),
    "sparse_flash_attention": (lambda: sparse_attention(paged=True, lse=False), "SparseFlashAttention"),
    "sparse_flash_attention un-paged": (lambda: sparse_attention(paged=False, lse=True), "SparseFlashAttention"),
    "attention_update": (
        lambda: ops.npu_attention_update([empty(8, dtype=FLOAT)] * 2, [empty(8, 512)] * 2, 1),
        "AttentionUpdate",
    ),
    "scatter_nd_update_": (
        lambda: ops.npu_scatter_nd_update_(empty(64, 512), empty(4, 1, dtype=INT64), empty(4, 512)) + 1,
        "ScatterNdUpdate",
    ),
    "moe_gating_top_k": (
        lambda: ops.npu_moe_gating_top_k(
            empty(4, 16, dtype=FLOAT), 4, bias=empty(16, dtype=FLOAT), routed_scaling_factor=6.0
        ),
        "MoeGatingTopK",
    ),
    "moe_init_routing_v2": (init_routing, "MoeInitRoutingV3"),
    "moe_finalize_routing": (finalize_routing, "MoeFinalizeRoutingV2"),
    "moe_re_routing": (lambda: ops.npu_moe_re_routing(empty(8, 64), empty(4, 2, dtype=INT32)), "MoeReRouting"),
    "moe_distribute_dispatch_v2": (dispatch, "MoeDistributeDispatchV2"),
    "moe_distribute_combine_v2": (combine, "MoeDistributeCombineV2"),
    "transpose_batchmatmul": (
        lambda: ops.npu_transpose_batchmatmul(
            empty(4, 64, 512), empty(64, 512, 128), perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        ),
        "TransposeBatchMatMul",
    ),
    "prefetch": (prefetch, "Cmo"),
}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("name", NODES)
def test_an_operator_becomes_its_node(name: str, soc: str) -> None:
    call, node = NODES[name]

    def function(x: torch.Tensor) -> Any:
        return call(), x + 1  # an input of the graph, so that there is one

    with fake(soc):
        histogram = ge_graph(function, empty(1), soc=soc).histogram()
    assert histogram[node] == 1


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (
            lambda: ops.npu_rms_norm_quant(empty(4, 64), empty(64), empty(64), empty(1), empty(1, dtype=INT8)),
            "npu_rms_norm_quant",
        ),
        (lambda: ops.npu_top_k_top_p(empty(4, 64), empty(4), empty(4, dtype=INT32)), "npu_top_k_top_p"),
        (lambda: ops.npu_moe_token_permute(empty(4, 64), empty(4, 2, dtype=INT64)), "npu_moe_token_permute"),
    ],
)
def test_an_operator_without_a_converter_fails(call: Callable[[], Any], operator: str) -> None:
    with fake(), pytest.raises(Exception, match=operator):
        ge_graph(lambda x: (call(), x + 1), empty(1))


def test_demands_on_cann_are_recorded() -> None:
    with fake():
        graph = ge_graph(lambda x: (dequant_swiglu_quant(), x + 1), empty(1))
    given = ("weight_scale", "activation_scale", "group_index")
    assert graph.demands == (Demand("DequantSwigluQuant", given, ("activate_left", "quant_mode")),)
    assert set(given) < set(graph.uses()["DequantSwigluQuant"][0])


def test_lengths_as_tensors_stay_inputs_of_the_graph_and_lists_become_constants() -> None:
    def baked(x: torch.Tensor) -> Any:
        return fused_attention(ops.npu_fused_infer_attention_score_v2, [2, 4], [90, 7])

    def read(queries: torch.Tensor, keys: torch.Tensor) -> Any:
        return fused_attention(torchair.ops.npu_fused_infer_attention_score_v2, queries, keys)

    with fake():
        for function, arguments, source in ((baked, [empty(1)], "Const"), (read, [empty(2, dtype=INT64)] * 2, "Data")):
            graph = ge_graph(function, *arguments)
            (node,) = graph.of("FusedInferAttentionScore")
            names = dict(zip(node.arguments, node.inputs, strict=True))
            sources = {other.name: other.type for other in graph.nodes}
            for argument in ("actual_seq_lengths", "actual_seq_lengths_kv"):
                assert sources[names[argument].rpartition(":")[0]] == source


def test_shapes_of_attention() -> None:
    """The maximum and the sum of sparse attention are right for un-paged keys alone: pages take their length for heads."""
    with fake():
        for paged, statistics in ((False, (1, TOKENS, HEADS)), (True, (PAGE, TOKENS, 0))):
            out, *others = sparse_attention(paged=paged, lse=True)
            assert out.shape == (TOKENS, HEADS, 512)
            assert [tuple(other.shape) for other in others] == [statistics] * 2
        for layout, shape in (("TND", (TOKENS, HEADS, 512)), ("TND_NTD", (HEADS, TOKENS, 512))):
            out, lse = fused_attention(ops.npu_fused_infer_attention_score_v2, [2, 4], [90, 7], layout)
            assert (out.shape, lse.shape, lse.dtype) == (shape, (TOKENS, HEADS, 1), FLOAT)
        indices, values = indexer(values=True)
        assert (indices.shape, indices.dtype, values.shape, values.dtype) == (
            (TOKENS, 1, 2048),
            INT32,
            (TOKENS, 1, 2048),
            torch.bfloat16,
        )
