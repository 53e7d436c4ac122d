from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from tests.releases import CHAT, FULL_2_0, LITE, YARN_2_0


def config(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | changes)


def without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in names}


def test_features_follow_from_their_fields_alone() -> None:
    chat = config(CHAT, architectures=["LongcatCausalLM"], attention_method="LSA")
    assert chat.indexer is None and chat.over_embedding is None and chat.draft is None and chat.rope_scaling is None
    full = config(FULL_2_0, attention_method="MLA")
    assert full.indexer is not None and full.over_embedding is not None and full.draft is not None


@pytest.mark.parametrize(
    ("base", "sigma", "q_scale", "kv_scale"),
    [(CHAT, 0.0721688, 2.0, 3.464102), (LITE, 0.1092301, 1.414214, 2.449490), (FULL_2_0, 0.1578114, 2.309401, 4.0)],
)
def test_scales_of_the_releases(base: dict[str, Any], sigma: float, q_scale: float, kv_scale: float) -> None:
    assert config(base).softmax_scale == pytest.approx(sigma, rel=1e-6)
    assert config(base).q_lora_scale == pytest.approx(q_scale, rel=1e-6)
    assert config(base).kv_lora_scale == pytest.approx(kv_scale, rel=1e-6)
    plain = config(base, mla_scale_q_lora=False, mla_scale_kv_lora=False)
    assert (plain.q_lora_scale, plain.kv_lora_scale) == (1.0, 1.0)


def test_yarn_frequencies_of_the_releases() -> None:
    full, lite, chat = config(FULL_2_0), config(LITE), config(CHAT)
    assert full.rope_scaling is not None and full.rope_scaling.correction_range(1e6, 64) == (8, 17)
    assert lite.rope_scaling is not None and lite.rope_scaling.correction_range(5e6, 64) == (10, 18)
    wanted = {0: 1.0, 8: 0.0316228, 10: 0.01039653, 15: 3.521869e-4, 31: 1.283272e-8}
    assert {i: full.rope_frequencies[i] for i in wanted} == pytest.approx(wanted, rel=1e-6)
    assert lite.rope_frequencies[12] == pytest.approx(2.383351e-3, rel=1e-6)
    assert lite.rope_frequencies[31] == pytest.approx(3.238716e-8, rel=1e-6)
    assert chat.rope_frequencies[5] == pytest.approx(1e7 ** (-10 / 64))
    assert len(chat.rope_frequencies) == 32


def test_yarn_magnitude_is_counted_once() -> None:
    assert config(FULL_2_0).rope_magnitude == 1.0
    only_all_dim = config(FULL_2_0, rope_scaling=without(YARN_2_0, "mscale"))
    assert only_all_dim.rope_magnitude == pytest.approx(1.4787492)
    assert only_all_dim.softmax_scale == pytest.approx(0.1578114, rel=1e-6)
    neither = config(FULL_2_0, rope_scaling=without(YARN_2_0, "mscale", "mscale_all_dim"))
    assert neither.rope_magnitude == pytest.approx(1.4787492)
    assert neither.softmax_scale == pytest.approx(192**-0.5)
    assert config(CHAT).rope_magnitude == 1.0


def test_rope_parameters_replace_both_older_fields() -> None:
    newer = config(
        without(FULL_2_0, "rope_theta", "rope_scaling"), rope_parameters=YARN_2_0 | {"rope_theta": 1e6, "type": "yarn"}
    )
    assert newer.rope_frequencies == config(FULL_2_0).rope_frequencies
    default = config(without(CHAT, "rope_theta"), rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert default.rope_theta == 5.0 and default.rope_scaling is None


def test_original_length_defaults_to_the_length_before_stretching() -> None:
    lite = config(LITE, rope_scaling={"rope_type": "yarn", "factor": 10})
    assert lite.rope_scaling is not None and lite.rope_scaling.original_max_position_embeddings == 32768


def test_ngram_tables_of_the_releases() -> None:
    full, lite = config(FULL_2_0), config(LITE)
    assert full.over_embedding is not None and lite.over_embedding is not None
    sizes = full.over_embedding.table_sizes
    assert (sizes[0], sizes[15], len(sizes), sum(sizes)) == (16476898, 16476928, 16, 263630608)
    sizes = lite.over_embedding.table_sizes
    assert (sizes[0], sizes[11], len(sizes), sum(sizes)) == (10223617, 10223639, 12, 122683536)
    assert (full.oe_width, lite.oe_width, config(CHAT).oe_width) == (512, 256, 0)
    assert full.over_embedding.powers_of(0) == (1, 163840, 0, 0, 0)
    assert full.over_embedding.powers_of(15) == (1, 163840, 2629888, 9182720, 5026048)
    assert lite.over_embedding.powers_of(11)[:2] == (1, 131072)
    assert [full.over_embedding.order_of(b) for b in (0, 3, 4, 15)] == [2, 2, 3, 5]


def test_spelling_of_ngram_fields_decides_the_spelling_of_tensors() -> None:
    lite, full = config(LITE).over_embedding, config(FULL_2_0).over_embedding
    assert lite is not None and lite.tensor_family == "ngram_embeddings"
    assert full is not None and full.tensor_family == "oe_embed"


def test_hash_uses_the_text_vocabulary_and_ranges_are_half_open() -> None:
    tables = config(FULL_2_0, text_vocab_size=1000, ignored_token_ids="5:7,100:200").over_embedding
    assert tables is not None and tables.table_sizes[0] == 100567 + 1
    assert tables.ignored_ranges == ((5, 7), (100, 200))


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("ffn_hidden_size", "intermediate_size"),
        ("expert_ffn_hidden_size", "moe_intermediate_size"),
        ("moe_topk", "num_experts_per_tok"),
        ("n_routed_experts", "num_experts"),
        ("n_routed_experts", "num_local_experts"),
    ],
)
def test_aliases(name: str, alias: str) -> None:
    renamed = ModelConfig.from_dict(without(CHAT, name) | {alias: CHAT[name]})
    assert renamed == config(CHAT)


def test_own_name_wins_over_an_alias() -> None:
    assert config(CHAT, num_experts_per_tok=3).moe_topk == 12


def test_num_hidden_layers_counts_attentions_for_this_family() -> None:
    bare = without(CHAT, "num_layers")
    assert ModelConfig.from_dict(bare | {"num_hidden_layers": 56}).num_layers == 28
    assert ModelConfig.from_dict(bare | {"num_hidden_layers": 28, "model_type": "other"}).num_layers == 28
    assert config(CHAT, num_hidden_layers=99).num_layers == 28
    with pytest.raises(ConfigError, match="num_hidden_layers = 57"):
        ModelConfig.from_dict(bare | {"num_hidden_layers": 57})


def test_lora_epsilon_follows_the_others_unless_told() -> None:
    assert config(CHAT, rms_norm_eps=3e-5).lora_norm_eps == 3e-5
    assert config(CHAT, lora_norm_eps=1e-6).lora_norm_eps == 1e-6


def test_index_owners() -> None:
    assert [config(FULL_2_0).owns_index(a) for a in range(4)] == [True, False, True, False]
    assert [config(FULL_2_0, cli_factor=1).owns_index(a) for a in range(3)] == [True, True, True]
    assert not config(CHAT).owns_index(0)


def test_eos_may_be_a_list_and_null_is_absent() -> None:
    assert config(CHAT, eos_token_id=[2, 7]).eos_token_id == (2, 7)
    assert config(CHAT, index_topk=None, mtp_num_layers=None).indexer is None


def test_draft_alias() -> None:
    draft = config(CHAT, num_nextn_predict_layers=1).draft
    assert draft is not None and draft.mtp_num_layers == 1 and draft.dsa_mtp_cli


@pytest.mark.parametrize(
    ("base", "changes", "param"),
    [
        (CHAT, {"hidden_size": None}, "hidden_size"),
        (CHAT, {"hidden_size": "6144"}, "hidden_size"),
        (CHAT, {"hidden_size": 0}, "hidden_size"),
        (CHAT, {"hidden_size": True}, "hidden_size"),
        (CHAT, {"hidden_size": 10**400}, "hidden_size"),
        (CHAT, {"rope_theta": 10**400}, "rope_theta"),
        (FULL_2_0, {"oe_vocab_size_ratio": math.inf}, "oe_vocab_size_ratio"),
        (FULL_2_0, {"oe_vocab_size_ratio": math.nan}, "oe_vocab_size_ratio"),
        (CHAT, {"zero_expert_type": "noise"}, "zero_expert_type"),
        (CHAT, {"torch_dtype": "float16"}, "torch_dtype"),
        (CHAT, {"moe_topk": 1000}, "moe_topk"),
        (CHAT, {"attention_bias": True}, "attention_bias"),
        (CHAT, {"router_bias": True}, "router_bias"),
        (CHAT, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (CHAT, {"eos_token_id": 131072}, "eos_token_id"),
        (CHAT, {"eos_token_id": []}, "eos_token_id"),
        (CHAT, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (CHAT, {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling.rope_type"),
        (CHAT, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
        (CHAT, {"rope_scaling": "yarn"}, "rope_scaling"),
        (LITE, {"emb_neighbor_num": 1}, "emb_neighbor_num"),
        (LITE, {"emb_neighbor_num": None}, "oe_neighbor_num"),
        (LITE, {"emb_split_num": 5}, "oe_split_num"),
        (LITE, {"ignored_token_ids": "5-7"}, "ignored_token_ids"),
        (FULL_2_0, {"index_topk": 1039}, "index_topk"),
        (FULL_2_0, {"index_head_dim": 32}, "index_head_dim"),
        (FULL_2_0, {"index_k_norm_type": "batch"}, "index_k_norm_type"),
        (FULL_2_0, {"cli_factor": 4}, "cli_factor"),
    ],
)
def test_a_bad_field_is_named(base: dict[str, Any], changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(base, **changes)
    assert raised.value.param == param
    assert param in raised.value.message


def test_load_reads_config_json_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FULL_2_0 | {"some_other_key": 1}))
    assert ModelConfig.load(tmp_path) == config(FULL_2_0)
