"""Which sizes go together: every rule once broken and once kept, with the key and the numbers in the message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.layout_checks import check_layout_fits, num_nodes
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import load, standalone
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.ngram import run_of
from tests.unit.test_resolve import CHECKPOINT, cluster, refusal

__all__ = ["cluster"]

TABLES: dict[str, Any] = {"oe_vocab_size_ratio": 2, "oe_neighbor_num": 3, "oe_split_num": 2}


def folder(cluster: Path) -> Path:
    return cluster.parent / "weights" / "longcat-tiny"


def checkpoint(cluster: Path, **fields: Any) -> None:
    (folder(cluster) / "config.json").write_text(json.dumps(CHECKPOINT | fields))


def alone(cluster: Path, *overrides: str) -> ParallelConfig:
    path = str(cluster.parent / "weights" / "longcat-tiny")
    items = ["engine.block_size=16", "engine.max_num_seqs=8", *overrides]
    return standalone(path, items, host="127.0.0.1", port=8081).parallel


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["prefill.parallel.ep_size=0"], "prefill.parallel.ep_size=0: must be at least 1"),
        (["decode.parallel.dense_tp_size=-1"], "decode.parallel.dense_tp_size=-1: must be at least 1"),
        (["decode.parallel.node_size=-1"], "decode.parallel.node_size=-1: must be at least 0"),
        (["decode.parallel.ngram_embed_tp_size=-1"], "decode.parallel.ngram_embed_tp_size=-1: must be at least 0"),
        (["prefill.parallel.dp_size=2"], "prefill.parallel.dp_size=2: must be 1 in a prefill pool"),
        (["decode.parallel.cp_size=2"], "decode.parallel.cp_size=2: must be 1 in a decode pool"),
        (
            ["prefill.parallel.ep_size=4"],
            "prefill.parallel.ep_size=4: does not divide the 2 ranks of a pipeline stage",
        ),
        (
            ["decode.parallel.lmhead_tp_size=4"],
            "decode.parallel.lmhead_tp_size=4: does not divide the 2 ranks of the instance",
        ),
        (
            [
                "decode.parallel={dp_size: 3, kvp_size: 4, attn_tp_size: 4, dense_tp_size: 6}",
                "decode.engine.max_num_seqs=9",
            ],
            "decode.parallel.dense_tp_size=6: neither divides attn_tp_size=4 nor is a multiple of it",
        ),
        (
            ["decode.parallel.ep_size=2", "decode.parallel.moe_tp_size=2"],
            "decode.parallel.ep_size=2 and decode.parallel.moe_tp_size=2: only one of them may be above 1",
        ),
        (
            ["decode.parallel.dp_size=3"],
            "decode.engine.max_num_seqs=8: must be a multiple of decode.parallel.dp_size=3",
        ),
        (
            ["decode.parallel.moe_dispatch=fused"],
            "decode.parallel.moe_dispatch=fused: the operators of device=cpu lack the fused dispatch and combine",
        ),
        (
            ["decode.parallel.ep_size=2", "decode.parallel.moe_dispatch=all_to_all", "decode.engine.exe_mode=inductor"],
            "decode.parallel.moe_dispatch=all_to_all: exchanges counts, so decode.engine.exe_mode=inductor has no shape to "
            "compile; use gather",
        ),
        (
            ["prefill.parallel.ep_size=2", "prefill.parallel.node_size=2"],
            "prefill.parallel.node_size=2: has no effect with moe_dispatch=gather; it is for two_level",
        ),
        (
            ["prefill.parallel.ep_size=2", "prefill.parallel.node_size=3", "prefill.parallel.moe_dispatch=two_level"],
            "prefill.parallel.node_size=3: does not divide prefill.parallel.ep_size=2",
        ),
        (["prefill.parallel.moe_dispatch=ring"], "prefill.parallel.moe_dispatch=ring: must be one of gather, all_to_all"),
        (
            ["decode.parallel={dp_size: 3, kvp_size: 1, ep_size: 3}", "decode.engine.max_num_seqs=9"],
            "decode.parallel.ep_size=3: does not divide the checkpoint's 8 routed experts",
        ),
        (
            ["decode.parallel={dp_size: 3, moe_tp_size: 3}", "decode.engine.max_num_seqs=9"],
            "decode.parallel.moe_tp_size=3: does not divide the checkpoint's expert_ffn_hidden_size 32",
        ),
        (
            ["decode.parallel={dp_size: 5, dense_tp_size: 5}", "decode.engine.max_num_seqs=10"],
            "decode.parallel.dense_tp_size=5: does not divide the checkpoint's ffn_hidden_size 96",
        ),
        (
            ["prefill.parallel.cp_size=3", "prefill.parallel.embed_tp_size=3"],
            "prefill.parallel.embed_tp_size=3: does not divide the checkpoint's vocab_size 320",
        ),
        (
            ["prefill.parallel.cp_size=3", "prefill.parallel.lmhead_tp_size=3"],
            "prefill.parallel.lmhead_tp_size=3: does not divide the checkpoint's vocab_size 320",
        ),
        (
            ["decode.parallel.ngram_embed_tp_size=2"],
            "decode.parallel.ngram_embed_tp_size=2: has no effect, the checkpoint has no n-gram tables; leave it out",
        ),
        (
            [
                "devices_per_node=3",
                "decode.parallel={dp_size: 2, kvp_size: 2, attn_tp_size: 2}",
                "prefill.parallel.cp_size=1",
            ],
            "decode.parallel: dp_size 2 x kvp_size 2 = 4, but decode.instances[0] has 1 nodes x devices_per_node 3 = 3",
        ),
    ],
)
def test_every_rule_names_its_key_and_the_numbers(cluster: Path, overrides: list[str], line: str) -> None:
    lines = refusal(cluster, *overrides)
    assert lines[0].startswith(line), lines
    same_for_the_other_instance = [other.replace("instances[1]", "instances[0]") for other in lines]
    assert set(same_for_the_other_instance) == {lines[0]}, lines


@pytest.mark.parametrize(
    "overrides",
    [
        ["prefill.parallel={pp_size: 2, cp_size: 2, ep_size: 2, embed_tp_size: 2, lmhead_tp_size: 2, dense_tp_size: 2}"],
        ["decode.parallel={dp_size: 2, kvp_size: 2, attn_tp_size: 2, ep_size: 4, dense_tp_size: 2, lmhead_tp_size: 4}"],
        ["decode.parallel={dp_size: 2, kvp_size: 2, attn_tp_size: 2, moe_tp_size: 4, dense_tp_size: 1}"],
        ["decode.parallel={dp_size: 4, ep_size: 2, moe_dispatch: two_level, node_size: 2}"],
        ["decode.parallel={ep_size: 1, moe_dispatch: all_to_all}", "decode.engine.exe_mode=inductor"],
        ["decode.parallel={dp_size: 2, ep_size: 2, moe_dispatch: gather}", "decode.engine.exe_mode=inductor"],
        ["decode.parallel={dp_size: 2, ep_size: 2, node_size: 1}"],
        ["devices_per_node=5", "decode.parallel={dp_size: 4, ep_size: 4, moe_dispatch: two_level}"],
    ],
)
def test_what_fits_passes(cluster: Path, overrides: list[str]) -> None:
    load(cluster, overrides)


def test_the_tables_may_span_what_the_rest_of_the_embedding_does_not(cluster: Path) -> None:
    checkpoint(cluster, **TABLES)
    config = load(cluster, ["decode.parallel={dp_size: 2, kvp_size: 2, attn_tp_size: 2, ngram_embed_tp_size: 4}"])
    assert config.decode is not None and config.decode.parallel.ngram_embed_tp_size == 4


def test_only_alone_every_rank_of_a_group_may_hold_the_whole_cache(cluster: Path) -> None:
    sizes = "standalone.parallel={dp_size: 2, attn_tp_size: 4, ep_size: 8, lmhead_tp_size: 8}"
    assert (alone(cluster, sizes).world_size, alone(cluster, sizes).group_size) == (8, 4)
    assert alone(cluster, "standalone.parallel={kvp_size: 2, attn_tp_size: 2}").world_size == 2
    with pytest.raises(ConfigError) as caught:
        alone(cluster, "standalone.parallel={kvp_size: 2, attn_tp_size: 4}")
    assert caught.value.message == (
        "standalone.parallel.attn_tp_size=4: differs from standalone.parallel.kvp_size=2; "
        "set both to the same value, or kvp_size to 1"
    )
    (line,) = refusal(cluster, "decode.parallel={kvp_size: 1, attn_tp_size: 2}")
    assert line.startswith("decode.parallel.attn_tp_size=2: differs from decode.parallel.kvp_size=1; set both to the same")
    with pytest.raises(ConfigError, match=r"dp_size 2 x attn_tp_size 4 = 8, but .* devices_per_node 4 = 4"):
        alone(cluster, sizes, "devices_per_node=4")


def test_int8_rows_stay_whole_in_experts_and_are_split_by_outputs_elsewhere(cluster: Path) -> None:
    thirds = {"num_attention_heads": 3, "ffn_hidden_size": 96, "n_routed_experts": 9, "vocab_size": 330}
    sizes = "decode.parallel={kvp_size: 3, attn_tp_size: 3, dense_tp_size: 3}"
    split = "decode.parallel={dp_size: 2, moe_tp_size: 2}"
    checkpoint(cluster, **thirds)
    load(cluster, [sizes])
    load(cluster, [split])
    checkpoint(cluster, **thirds, quantization_config=int8_section(["lm_head"]))
    assert [line.split(": ")[0] for line in refusal(cluster, sizes)] == [
        "decode.parallel.attn_tp_size=3",
        "decode.parallel.dense_tp_size=3",
    ]
    assert refusal(cluster, sizes)[1].endswith("hidden_size 64, as int8 weights want")
    (line,) = refusal(cluster, split)
    assert line == (
        "decode.parallel.moe_tp_size=2: must be 1 for int8 experts, whose rows are quantised over their whole inner width; "
        "use ep_size"
    )
    checkpoint(cluster, **thirds, quantization_config=int8_section([r"re:.*\.mlp\.experts\."]))
    load(cluster, [split])


def test_nodes_follow_from_the_machine_only_where_they_count() -> None:
    assert num_nodes(ParallelConfig(ep_size=8), 2) == 1
    assert num_nodes(ParallelConfig(ep_size=8, moe_dispatch="two_level"), 2) == 4
    assert num_nodes(ParallelConfig(ep_size=8, moe_dispatch="two_level"), 16) == 1
    assert num_nodes(ParallelConfig(ep_size=8, moe_dispatch="two_level", node_size=2), 16) == 2


def test_a_group_of_experts_lies_on_whole_parts_of_nodes(cluster: Path) -> None:
    """Found beside that 8 ranks need two nodes, which is not supported yet."""
    sizes = ("devices_per_node=6", "decode.parallel={dp_size: 8, ep_size: 8, moe_dispatch: two_level%s}")
    (line,) = [line for line in refusal(cluster, sizes[0], sizes[1] % "") if "node_size" in line]
    assert line == (
        "decode.parallel.node_size=2 (of devices_per_node=6): is 4 ranks of decode.parallel.ep_size=8 on each node, "
        "which do not divide devices_per_node; set it"
    )
    assert not any("node_size" in line for line in refusal(cluster, sizes[0], sizes[1] % ", node_size: 2"))


def test_every_rank_of_the_tables_has_a_row(cluster: Path) -> None:
    """Tables of 8, 10 and so on rows; a run of three leaves nothing for the last."""
    checkpoint(cluster, **TABLES)
    (total,) = {sum(ModelConfig.load(folder(cluster)).over_embedding.table_sizes)}  # type: ignore[union-attr]
    size = next(n for n in range(2, total) if (n - 1) * -(-total // n) >= total)
    config = ModelConfig.load(folder(cluster))
    found = Findings()
    check_layout_fits("decode", ParallelConfig(layers_per_stage=(5,), ngram_embed_tp_size=size), config, found=found)
    each = -(-total // size)
    with pytest.raises(ConfigError) as caught:
        found.raise_if_any()
    assert caught.value.message == (
        f"decode.parallel.ngram_embed_tp_size={size}: the checkpoint's {total} rows of n-gram tables in runs of {each} "
        f"are for {-(-total // each)} ranks"
    )
    assert not run_of(total, size, size - 1), "whose tensor is empty"
    found = Findings()
    check_layout_fits("decode", ParallelConfig(layers_per_stage=(5,), ngram_embed_tp_size=size - 1), config, found=found)
    found.raise_if_any()


def test_nodes_that_follow_from_the_machine_are_checked_too(cluster: Path) -> None:
    (line,) = [
        line
        for line in refusal(
            cluster, "devices_per_node=3", "decode.parallel={dp_size: 8, ep_size: 8, moe_dispatch: two_level}"
        )
        if "node_size" in line
    ]
    assert line == "decode.parallel.node_size=3 (of devices_per_node=3): does not divide decode.parallel.ep_size=8"
