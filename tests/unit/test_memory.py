"""Bytes of a rank against what the releases are known to hold, and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, TransferConfig
from longcat_pd.sizing.memory import RankMemory, instance_memory, show_parts, show_total, stage_of, sum_of_parts
from tests.releases import CHAT, FULL_2_0, LITE


def spec(role: str = "standalone", *, layers: tuple[int, ...] = (1,), **sizes: int) -> InstanceSpec:
    return InstanceSpec(
        name="x",
        role=role,  # type: ignore[arg-type]
        host="127.0.0.1",
        http_port=30000,
        device="cpu",
        model=ModelSection(path="/x", dtype="bfloat16"),
        parallel=ParallelConfig(layers_per_stage=layers, pp_size=len(layers), **sizes),
        engine=EngineConfig(block_size=16, num_blocks=11, max_model_len=160, max_num_seqs=2, max_num_batched_tokens=32),
        transfer=TransferConfig(),
    )


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        (CHAT, 561_862_880_256 - 1_197_899_776),  # published total without the draft module
        (LITE, 68_562_465_024),
        (FULL_2_0, 1_775_560_491_136 - 136_943_683_712),
    ],
    ids=["chat", "lite", "2.0"],
)
def test_the_releases_weigh_what_their_cards_say(fields: dict[str, Any], elements: int) -> None:
    model = ModelConfig.from_dict(fields)
    (rank,) = instance_memory(spec(layers=(model.num_layers,)), model)
    # The router and the weights of index heads are counted in float32.
    counted = (rank.parts["weights"] + rank.parts["n-gram tables"]) / 2
    assert counted == pytest.approx(elements, rel=3e-4)
    assert counted > elements * (1 - 2e-5)


@pytest.mark.parametrize(
    ("fields", "elements", "cached"),
    [(CHAT, 1_197_899_776, 576), (FULL_2_0, 136_943_683_712 - 134_978_871_296 - 16 * 8192 * 512, 704)],
)
def test_a_draft_layer_weighs_what_the_files_hold(fields: dict[str, Any], elements: int, cached: int) -> None:
    """On the last stage only, with its own cache; the large one's file has n-gram tables for it that nobody reads."""
    model = ModelConfig.from_dict(fields)
    with_drafts = replace(spec(layers=(20, model.num_layers - 20)), engine=replace(spec().engine, num_draft_tokens=3))
    first, last = instance_memory(with_drafts, model)
    assert first.parts["drafts"] == 0
    fp32 = model.indexer.index_n_heads * model.hidden_size if model.indexer else 0  # counted as two of bfloat16
    assert last.parts["drafts"] / 2 - 11 * 16 * cached - fp32 == pytest.approx(elements, rel=1e-5)


def test_the_cache_of_the_large_one_is_that_of_its_card() -> None:
    model = ModelConfig.from_dict(FULL_2_0)
    (rank,) = instance_memory(spec(layers=(38,)), model)
    tokens = 11 * 16
    assert rank.parts["cache"] == tokens * 87_552
    assert rank.parts["index keys"] == tokens * 9_728


def test_stages_share_layers_and_only_the_ends_hold_tables_and_vocabulary() -> None:
    model = ModelConfig.from_dict(FULL_2_0)
    whole = instance_memory(spec("prefill", layers=(38,)), model)
    split = instance_memory(spec("prefill", layers=(20, 10, 8), cp_size=2), model)
    assert [stage_of(rank, spec(layers=(20, 10, 8), cp_size=2).parallel) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [rank.parts["n-gram tables"] > 0 for rank in split] == [True, True, False, False, False, False]
    # The two ranks of a stage are copies of each other in weights, so the even ones make up one model.
    assert sum(rank.parts["weights"] for rank in split[::2]) == whole[0].parts["weights"]
    final_norm = 8192 * 2
    assert split[0].parts["weights"] - split[4].parts["weights"] + final_norm == 12 * split[2].parts["weights"] // 10
    assert split[0].parts["cache"] == split[1].parts["cache"] == 2 * split[2].parts["cache"]


def test_a_decode_group_splits_heads_and_nothing_else() -> None:
    model = ModelConfig.from_dict(CHAT)
    one = instance_memory(spec("decode", layers=(28,)), model)[0]
    eight = instance_memory(spec("decode", layers=(28,), kvp_size=8, attn_tp_size=8), model)
    heads = 64 * (192 * 1536 + 256 * 512 + 128 * 6144)
    assert len(eight) == 8
    assert one.parts["weights"] - eight[3].parts["weights"] == 2 * 56 * heads * 7 // 8


def difference(fields: dict[str, Any], **sizes: int) -> dict[str, int]:
    """Bytes that rank 0 of a decode pool holds less of, by part, than a rank that is all of it."""
    model = ModelConfig.from_dict(fields)
    base = spec("decode", layers=(model.num_layers,))
    whole = instance_memory(replace(base, engine=replace(base.engine, num_draft_tokens=1)), model)[0]
    sized = spec("decode", layers=(model.num_layers,), dp_size=max(sizes.values()), **sizes)
    split = instance_memory(replace(sized, engine=replace(base.engine, num_draft_tokens=1)), model)
    assert len(split) == max(sizes.values())
    parts = {name: value - split[0].parts[name] for name, value in whole.parts.items()}
    return {name: value for name, value in parts.items() if value and name != "workspace"}


def test_each_size_splits_its_own_part_and_no_other() -> None:
    dense, expert = 3 * 12288 * 6144 * 2, 3 * 2048 * 6144 * 2
    vocabulary = 131072 * 6144 * 2
    assert difference(CHAT, dense_tp_size=4) == {"weights": 56 * dense * 3 // 4, "drafts": dense * 3 // 4}
    assert difference(CHAT, ep_size=8) == {"weights": 28 * 448 * expert}
    assert difference(CHAT, moe_tp_size=8) == {"weights": 28 * 448 * expert}
    assert difference(CHAT, embed_tp_size=2) == {"weights": vocabulary // 2, "drafts": vocabulary // 2}
    assert difference(CHAT, lmhead_tp_size=2) == {"weights": vocabulary // 2}
    assert difference(LITE, ngram_embed_tp_size=1, embed_tp_size=2).keys() == {"weights", "drafts"}


def test_rows_of_all_tables_are_cut_into_runs_of_which_the_last_is_shorter() -> None:
    model = ModelConfig.from_dict(LITE)
    assert model.over_embedding is not None
    num_rows = sum(model.over_embedding.table_sizes)
    projections = 12 * 256 * 3072 * 2
    ranks = instance_memory(spec("decode", layers=(14,), dp_size=5, ngram_embed_tp_size=5), model)
    rows = [(rank.parts["n-gram tables"] - projections) / (256 * 2) for rank in ranks]
    assert num_rows % 5 and sum(rows) == num_rows
    assert len(set(rows[:-1])) == 1 and 0 < rows[-1] < rows[0]


def test_a_group_keeps_one_copy_of_its_cache_or_every_rank_the_whole() -> None:
    """Blocks are those of a shard; how many a shard has is the resolver's."""
    model = ModelConfig.from_dict(LITE)
    shared = instance_memory(spec("decode", layers=(14,), kvp_size=4, attn_tp_size=4), model)
    whole = instance_memory(spec("standalone", layers=(14,), attn_tp_size=4), model)
    assert (
        [rank.parts["cache"] for rank in shared] == [rank.parts["cache"] for rank in whole] == 4 * [11 * 16 * 28 * 576 * 2]
    )
    assert shared[0].parts["weights"] == whole[0].parts["weights"]


def test_the_step_of_a_group_is_smaller_than_that_of_all_rows() -> None:
    model = ModelConfig.from_dict(CHAT)
    one, two = (instance_memory(spec("decode", layers=(28,), dp_size=n), model)[0].parts["workspace"] for n in (1, 2))
    padding = 5 * model.vocab_size  # what its slot has said
    assert two - padding == pytest.approx((one - padding) / 2, rel=0.01)
    far = instance_memory(spec("decode", layers=(28,), dp_size=2, ep_size=2), model)[0].parts["workspace"]
    assert two < far <= one * 1.05


def test_dtype_doubles_weights_and_cache() -> None:
    model = ModelConfig.from_dict(LITE)
    half = spec(layers=(14,))
    full = replace(half, model=replace(half.model, dtype="float32"))
    (small,), (large,) = instance_memory(half, model), instance_memory(full, model)
    assert large.parts["cache"] == 2 * small.parts["cache"]
    assert large.parts["n-gram tables"] == 2 * small.parts["n-gram tables"]


def test_int8_counts_what_is_stored_and_leaves_ignored_modules_alone() -> None:
    section = int8_section(["model.layers.0.mlps.1", r"re:model\.layers\.1\.mlp\.experts\.\d+\.down_proj"])
    (plain,), (small,) = (
        instance_memory(spec(layers=(2,)), ModelConfig.from_dict(CHAT | {"num_layers": 2} | extra))
        for extra in ({}, {"quantization_config": section})
    )
    dense, expert = 3 * 12288 * 6144, 3 * 2048 * 6144
    halved = 3 * dense + 2 * 512 * expert - 512 * expert // 3
    scales = 3 * (2 * 12288 + 6144) + 2 * 512 * (2 * 2048 + 6144) - 512 * 6144
    assert plain.parts["weights"] - small.parts["weights"] == halved - 4 * scales
    assert {name for name, value in plain.parts.items() if value != small.parts[name]} == {"weights", "workspace"}
    rows = spec().engine.max_num_batched_tokens
    in_fp64 = 2 * (rows * 12 + rows) * 6144 * (8 - 4)
    assert small.parts["workspace"] - plain.parts["workspace"] == in_fp64, "sums of experts"


def test_sums_of_experts_are_wider_than_the_model() -> None:
    """Of every choice the result, as it is and weighted; of every row the sum, here and on its way."""
    model, half = ModelConfig.from_dict(CHAT), spec("prefill", layers=(28,))
    one, none = (instance_memory(half, replace(model, moe_topk=topk))[0].parts["workspace"] for topk in (1, 0))
    assert one - none == half.engine.max_num_batched_tokens * (2 * 6144 * 4 + 3 * 2048 * 2)


def test_a_chunk_over_cp_counts_what_the_scheduler_lets_one_rank_have() -> None:
    model, base = ModelConfig.from_dict(CHAT), spec("prefill", layers=(28,), cp_size=4)
    sizes = {tokens: replace(base.engine, max_num_batched_tokens=tokens) for tokens in (16, 64, 80)}
    one, level, odd = (instance_memory(replace(base, engine=e), model)[0].parts["workspace"] for e in sizes.values())
    assert one == level, "a block at least"
    assert odd > level, "five blocks over four ranks are two on one of them"


def test_sums_and_their_line() -> None:
    ranks = tuple(RankMemory(rank=rank, parts={"weights": 3 << 30, "cache": 1 << 29, "process": 1}) for rank in (0, 1))
    assert sum_of_parts(ranks) == {"weights": 6 << 30, "cache": 1 << 30, "process": 2}
    assert ranks[0].total_bytes == (3 << 30) + (1 << 29) + 1
    assert show_parts(sum_of_parts(ranks)) == "weights 6.0, cache 1.0"
    assert show_parts({"process": 1}) == "all parts below 0.1"
    assert show_total({"weights": 3 << 20, "cache": 1 << 19}) == "3.5 MiB: weights 3.0, cache 0.5"
    assert show_total({"weights": 30 << 30, "cache": 1 << 29}) == "30.5 GiB: weights 30.0, cache 0.5"
