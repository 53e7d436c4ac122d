"""Names and shapes of whole checkpoints, against the published totals of the releases."""

from __future__ import annotations

import math

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors, is_ignorable, other_spelling

COMMON = {
    "moe_topk": 12,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LARGE = COMMON | {"num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048}
SMALL = COMMON | {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "num_layers": 14,
    "num_attention_heads": 32,
    "ffn_hidden_size": 6144,
    "expert_ffn_hidden_size": 1024,
    "n_routed_experts": 256,
    "zero_expert_num": 128,
}
INDEXER = {
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_init_tokens": 16,
    "index_local_tokens": 1024,
    "index_k_norm_type": "rms",
    "cli_factor": 2,
    "mtp_num_layers": 3,
}
V2_0 = (
    LARGE
    | INDEXER
    | {"vocab_size": 163840, "hidden_size": 8192, "num_layers": 38, "n_routed_experts": 768, "zero_expert_num": 128}
    | {"index_n_heads": 32, "oe_vocab_size_ratio": 100.567, "oe_neighbor_num": 5, "oe_split_num": 4}
)
LITE_SPARSE = SMALL | INDEXER | {"index_n_heads": 16, "oe_vocab_size_ratio": 78, "oe_neighbor_num": 4, "oe_split_num": 4}
LITE = SMALL | {"ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4}
CHAT = LARGE | {
    "vocab_size": 131072,
    "hidden_size": 6144,
    "num_layers": 28,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
}


def totals(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    return len(shapes), sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize(
    ("fields", "unused", "tensors", "elements"),
    [
        # 2.0 stores 32 more draft tensors that nothing reads: copies of the 16 tables and their projections.
        pytest.param(V2_0, (32, 134_978_871_296 + 16 * 8192 * 512), 88_780, 1_775_560_491_136, id="2.0"),
        pytest.param(LITE_SPARSE, (0, 0), 11_220, 69_127_158_912, id="lite-sparse"),
        pytest.param(CHAT, (0, 0), 43_756, 561_862_880_256, id="chat"),
    ],
)
def test_totals_of_the_releases(fields: dict[str, object], unused: tuple[int, int], tensors: int, elements: int) -> None:
    config = ModelConfig.from_dict(fields)
    count, size = totals(expected_tensors(config) | draft_tensors(config))
    assert (count + unused[0], size + unused[1]) == (tensors, elements)


def test_totals_of_lite_without_draft() -> None:
    assert totals(expected_tensors(ModelConfig.from_dict(LITE))) == (11_143, 68_562_465_024)


def test_spelling_of_the_tables_follows_the_fields() -> None:
    lite = expected_tensors(ModelConfig.from_dict(LITE))
    assert lite["model.ngram_embeddings.embedders.11.weight"] == (10_223_639, 256)
    assert lite["model.ngram_embeddings.post_projs.11.weight"] == (3072, 256)
    v2_0 = expected_tensors(ModelConfig.from_dict(V2_0))
    assert v2_0["model.oe_embed_tokens15.weight"] == (16_476_928, 512)
    assert v2_0["model.oe_embed_proj15.weight"] == (8192, 512)


def test_only_owners_have_an_indexer() -> None:
    names = expected_tensors(ModelConfig.from_dict(V2_0))
    assert names["model.layers.37.self_attn.0.indexer.wq_b.weight"] == (32 * 128, 1536)
    assert "model.layers.37.self_attn.1.indexer.wq_b.weight" not in names
    every = expected_tensors(ModelConfig.from_dict(V2_0 | {"cli_factor": 1}))
    assert "model.layers.37.self_attn.1.indexer.wq_b.weight" in every


def test_draft_tensors_may_be_there_unused() -> None:
    config = ModelConfig.from_dict(V2_0)
    assert all(is_ignorable(name) for name in draft_tensors(config))
    assert is_ignorable("model.mtp.oe_embed_tokens3.weight")
    assert not any(is_ignorable(name) for name in expected_tensors(config))


def test_other_spelling_goes_both_ways() -> None:
    for name in ("model.oe_embed_tokens12.weight", "model.ngram_embeddings.post_projs.3.weight"):
        other = other_spelling(name)
        assert other is not None and other != name
        assert other_spelling(other) == name
    for name in ("model.embed_tokens.weight", "model.layers.3.mlps.0.up_proj.weight", "model.mtp.oe_embed_tokens1.weight"):
        assert other_spelling(name) is None
