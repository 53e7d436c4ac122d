"""Operations and bytes of each part against sums done by hand, for a model with sizes small enough to do so."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.sizing.work import Counter, Load, Work, capped_mean, expected_experts, routed_picks
from tests.releases import CHAT

SMALL: dict[str, Any] = CHAT | {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 2,
    "ffn_hidden_size": 10,
    "expert_ffn_hidden_size": 6,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}
INDEXER: dict[str, Any] = {
    "index_n_heads": 3,
    "index_head_dim": 4,
    "index_topk": 8,
    "index_init_tokens": 1,
    "index_local_tokens": 2,
    "index_k_norm_type": "rms",
    "cli_factor": 2,
}
MODEL = ModelConfig.from_dict(SMALL)
SPARSE = ModelConfig.from_dict(SMALL | INDEXER)
LOAD = Load(rows=3, visible=20, selected=20, keys=20)


def counter(model: ModelConfig = MODEL, **sizes: Any) -> Counter:
    return Counter(model=model, parallel=ParallelConfig(**sizes), width=2)


def test_one_attention_by_pencil() -> None:
    parts = counter().attention(LOAD, owns_index=False)
    down, up, absorbed, values, out = 8 * 10, 4 * 10, 2 * 3 * 4, 2 * 4 * 3, 6 * 8
    assert parts["projections"].bf16_flops == 2 * 3 * (down + up + absorbed + values + out) == 1296
    moved = 3 * ((8 + 10) + (4 + 10) + 2 * (3 + 4) + 2 * (4 + 3) + (6 + 8))
    assert parts["projections"].hbm_bytes == 2 * (80 + 40 + 24 + 24 + 48) + 2 * moved
    assert parts["attention"].bf16_flops == 2 * 3 * 2 * 20 * (6 + 4)
    assert parts["attention"].hbm_bytes == 2 * (20 * 6 + 3 * 2 * 10)
    assert set(parts) == {"projections", "attention"}


def test_heads_are_shared_by_attn_tp_and_keys_by_kvp() -> None:
    whole, half = (counter(attn_tp_size=size).attention(LOAD, owns_index=False) for size in (1, 2))
    assert half["attention"].bf16_flops == whole["attention"].bf16_flops / 2
    assert half["projections"].bf16_flops == 2 * 3 * (80 + (40 + 24 + 24 + 48) / 2)
    shards = counter(attn_tp_size=2, kvp_size=2).attention(LOAD, owns_index=False)["attention"]
    assert shards.bf16_flops == whole["attention"].bf16_flops / 2  # all heads, half of the keys
    assert shards.hbm_bytes == 2 * (10 * 6 + 3 * 2 * 10)


def test_an_indexer_scores_what_is_there_and_attention_reads_what_it_picked() -> None:
    picked = replace(LOAD, selected=8)
    parts = counter(SPARSE).attention(picked, owns_index=True)
    projections = 2 * 3 * (4 * 3 * 4 + 8 * 4)
    assert parts["indexer"].bf16_flops == projections + 2 * 3 * 20 * 3 * 4
    assert parts["indexer"].fp32_flops == 2 * 3 * 8 * 3
    assert parts["attention"].bf16_flops == 2 * 3 * 2 * 8 * (6 + 4)
    assert parts["attention"].hbm_bytes == 2 * (3 * 8 * 6 + 3 * 2 * 10)  # each row reads its own keys
    short = counter(SPARSE).attention(replace(LOAD, visible=8, selected=8, keys=8), owns_index=True)
    assert short["indexer"].bf16_flops == projections  # nothing to choose


def test_mlps_router_experts_and_head_by_pencil() -> None:
    one = counter()
    assert one.mlp(3, has_int8=False).bf16_flops == 2 * 3 * 8 * 20 + 2 * 3 * 10 * 8
    assert one.mlp(3, has_int8=False).hbm_bytes == 2 * (160 + 80) + 2 * 3 * (28 + 18)
    assert (one.router(3).fp32_flops, one.router(3).hbm_bytes) == (2 * 3 * 8 * 6, 4 * 48 + 2 * 3 * 14)
    experts = one.experts(3, has_int8=False)
    picks = 3 * 2 * 4 / 6
    assert experts.bf16_flops == pytest.approx(picks * 6 * 8 * 6)
    read = Fraction(4) * (1 - Fraction(4, 6) ** 3) * 3 * 8 * 6 * 2
    assert experts.hbm_bytes == pytest.approx(float(read) + 2 * picks * (8 * 8 + 6 * 6))
    assert one.head(3).bf16_flops == 2 * 3 * 8 * 32
    assert counter(lmhead_tp_size=4).head(3).bf16_flops == 2 * 3 * 8 * 8


def test_rows_that_all_ranks_get_have_room_for_all_their_choices() -> None:
    """See docs/ascend.md: for 256 rows of 12 choices a rank has 3072, whatever its experts are."""
    gathered, sent = (counter(ep_size=2, moe_dispatch=way).experts(6, has_int8=False) for way in ("gather", "all_to_all"))
    assert gathered.bf16_flops == sent.bf16_flops
    assert gathered.hbm_bytes - sent.hbm_bytes == pytest.approx(2 * (6 * 2 - 6 * routed_picks(MODEL) / 2) * 100)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_expected_experts_are_what_all_choices_have_on_average(rows: int) -> None:
    """All sets of 2 among 4 experts and 2 without weights, for every row; here are the first three experts."""
    every = list(product(combinations(range(6), 2), repeat=rows))
    touched = sum(len({expert for picked in choice for expert in picked if expert < 3}) for choice in every)
    assert expected_experts(rows, 3, MODEL) == pytest.approx(touched / len(every))


def test_int8_halves_the_bytes_of_weights() -> None:
    one = counter()
    for part in (one.mlp, one.experts):
        bf16, int8 = (part(0, has_int8=kind) for kind in (False, True))
        assert int8.hbm_bytes == bf16.hbm_bytes / 2
    assert one.mlp(3, has_int8=True).int8_ops == one.mlp(3, has_int8=False).bf16_flops


def test_tables_on_the_host_are_read_there() -> None:
    tables = {"oe_vocab_size_ratio": 2, "oe_neighbor_num": 3, "oe_split_num": 2}
    model = ModelConfig.from_dict(SMALL | tables)
    device, host = (counter(model, ngram_tables=place).ngrams(3) for place in ("device", "host"))
    assert (device.host_bytes, host.host_bytes) == (0, 3 * 8 * 2)
    assert device.hbm_bytes - host.hbm_bytes == 3 * 8 * 2


def test_means_of_capped_numbers() -> None:
    for first, count, cap in ((1, 5, 10), (1, 20, 7), (9, 4, 5), (3, 1, 3)):
        numbers = [min(first + place, cap) for place in range(count)]
        assert capped_mean(first, count, cap) == pytest.approx(sum(numbers) / count)


def test_work_adds_up() -> None:
    one = Work(bf16_flops=1, hbm_bytes=2, operators=3)
    assert one + one.times(2) == Work(bf16_flops=3, hbm_bytes=6, operators=9)
