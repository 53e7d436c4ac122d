"""What cards of the 192 hold, against sums done by hand; who shares a communicator; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import HcclConfig, HcclOptions, InstanceSpec, NpuConfig, RankSpec
from longcat_pd.parallel import joining
from longcat_pd.parallel.communicators import communicators
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.platform import platform_of
from longcat_pd.sizing.capacity import capacity, card_findings
from longcat_pd.sizing.card_memory import MIB, CardNeeds
from longcat_pd.sizing.cards import CARDS, card_of, usable_bytes
from longcat_pd.sizing.memory import GIB, block_bytes, instance_memory
from longcat_pd.sizing.preflight import memory_findings, total_memory_findings

FILE = Path(__file__).parents[2] / "deploy" / "config" / "cluster" / "longcat2-a2-192.yaml"
HIDDEN, VOCABULARY, BLOCKS = 8192, 163840, 128


def told(name: str, *overrides: str) -> tuple[InstanceSpec, ModelConfig]:
    config = load(FILE, overrides)
    return instance_spec(config, name), ModelConfig.load(config.model.path)


def int8(rows: int, columns: int) -> int:
    """A matrix with an fp32 scale for each row."""
    return rows * columns + 4 * rows


# -- by hand


def test_a_decode_rank_by_hand() -> None:
    spec, model = told("d0")
    ranks = instance_memory(spec, model)
    expert = 2 * int8(2048, HIDDEN) + int8(HIDDEN, 2048)
    assert 6 * 38 * expert == 11_486_822_400
    dense = (2 * int8(12288, HIDDEN) + int8(HIDDEN, 12288)) // 8
    heads = 8 * (192 * 1536 + 256 * 512 + 128 * HIDDEN)
    attention = 2 * ((1536 + 576) * HIDDEN + 1536 + 512 + heads)
    indexer = 2 * (32 * 128 * 1536 + 128 * HIDDEN + 128) + 4 * 32 * HIDDEN
    router = 4 * 896 * (HIDDEN + 1)
    layer = 2 * attention + indexer + 4 * 2 * HIDDEN + router + 2 * dense + 6 * expert
    word, head = 2 * VOCABULARY * HIDDEN, 2 * (VOCABULARY // 16 + 1) * HIDDEN
    assert ranks[77].parts["weights"] == 38 * layer + word + head
    rows = 263_630_608
    projections = 16 * 512 * HIDDEN * 2
    assert ranks[77].parts["n-gram tables"] == 2_059_615 * 512 * 2 + projections
    assert ranks[127].parts["n-gram tables"] == (rows - 127 * 2_059_615) * 512 * 2 + projections
    tokens = spec.engine.num_blocks * BLOCKS
    assert ranks[0].parts["cache"] == tokens * 76 * 576 * 2
    assert ranks[0].parts["index keys"] == tokens * 38 * 128 * 2
    mlp, join = dense, 2 * (2 * HIDDEN + 5) * HIDDEN
    assert ranks[0].parts["drafts"] == word + join + attention + indexer + mlp + tokens * 704 * 2
    assert ranks[0].host_parts["n-gram tables"] == 0


def test_prefill_ranks_of_the_first_stage_have_their_tables_in_the_memory_of_the_node() -> None:
    spec, model = told("p0")
    on_host = instance_memory(spec, model)
    assert on_host[0].parts["n-gram tables"] == 16 * 512 * HIDDEN * 2
    assert sum(rank.host_parts["n-gram tables"] for rank in on_host) == 263_630_608 * 512 * 2
    assert [rank.rank for rank in on_host if rank.host_parts["n-gram tables"]] == list(range(8))
    spec, model = told("p0", "prefill.parallel.ngram_tables=device")
    on_card = instance_memory(spec, model)
    moved = on_card[3].parts["n-gram tables"] - on_host[3].parts["n-gram tables"]
    assert moved == on_host[3].host_parts["n-gram tables"] == 263_630_608 // 8 * 1024
    assert on_card[3].host_parts["n-gram tables"] == 0


def test_on_a_processor_tables_of_the_host_are_those_of_the_rank() -> None:
    spec, model = told("p0")
    (rank, *_) = instance_memory(replace(spec, device="cpu"), model)
    assert rank.host_parts == {} and rank.parts["n-gram tables"] > 31 * GIB
    assert rank.machine_bytes == rank.total_bytes
    assert not {"graphs", "buffers"} & rank.parts.keys()


# -- beside weights and cache


def test_buffers_are_two_of_each_communicator_and_two_small_ones_of_each_neighbour_and_lane() -> None:
    spec, model = told("d0")
    group, experts, tables, head = 4 * [2 * 200 * MIB]
    needs = CardNeeds(spec, model, num_lanes=64)
    assert needs.buffers(5) == group + experts + tables + head + 64 * 2 * MIB
    together = replace(spec, npu=replace(spec.npu, is_moe_overlapped=False))
    assert CardNeeds(together, model).buffers(5) == 3 * 2 * 200 * MIB
    spec, model = told("p0", "env.HCCL_BUFFSIZE='100'", "env.P2P_HCCL_BUFFSIZE='20'")
    needs = CardNeeds(spec, model, num_lanes=128)
    assert [needs.buffers(rank) // MIB for rank in (0, 8, 63)] == [600 + 40 * (n + 128) for n in (1, 2, 1)]


def test_buffers_of_one_name_count_once_and_a_size_of_its_own_counts() -> None:
    spec, model = told("d0")
    named = HcclConfig(lmhead_tp=HcclOptions(buffer_name="x"), ngram_embed_tp=HcclOptions(buffer_name="x", buffer_mb=300))
    npu = NpuConfig(soc="A3", hccl=named)
    assert CardNeeds(replace(spec, npu=npu), model).buffers(0) == (2 * 200 + 2 * 200 + 2 * 300) * MIB  # group, ep, x


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_rank_makes_the_groups_that_are_counted(monkeypatch: pytest.MonkeyPatch, name: str, is_overlapped: bool) -> None:
    spec, _ = told(name)
    spec = replace(spec, npu=replace(spec.npu, is_moe_overlapped=is_overlapped))
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(joining.dist, "new_group", lambda ranks, **_: made.append(tuple(ranks)) or len(made))
    layout = ParallelLayout.of(spec.parallel)
    rank = RankSpec(
        instance=spec,
        rank=9,
        incarnation="t",
        plan_endpoint="",
        output_endpoint="",
        rendezvous_host="",
        rendezvous_port=1,
    )
    groups = joining._make_groups(rank, layout, platform_of("cpu"))
    counted = communicators(layout, 9, spec.npu)
    assert sorted(made[int(group) - 1] for group in set(groups.values())) == sorted(
        wanted.ranks for wanted in set(counted.values())
    )
    assert groups.keys() == counted.keys()


def test_experts_take_what_the_documentation_says_of_gather() -> None:
    """docs/ascend.md: 24 MiB sorted, 48 behind the first product, 48 of results, 96 of these in fp32, for 3072 choices."""
    spec, model = told("d0")
    classic = replace(spec, parallel=replace(spec.parallel, moe_dispatch="all_to_all"))
    saved = workspace(spec, model) - workspace(classic, model)
    assert saved == (24 + 48 + 96) * MIB * (3072 - 48) // 3072
    small, model = told("p0", "prefill.engine.max_num_batched_tokens=4096")
    large, _ = told("p0")
    whole, quarter = workspace(large, model), workspace(small, model)
    experts = 12 * (HIDDEN + HIDDEN * 6) + HIDDEN * 6
    assert whole - quarter > (16384 - 4096) * experts > (whole - quarter) * 0.8


def workspace(spec: InstanceSpec, model: ModelConfig) -> int:
    return CardNeeds(spec, model).parts(0)["workspace"]


def test_each_graph_keeps_what_it_computes_in() -> None:
    spec, model = told("d0")
    whole = 3 * workspace(spec, model) + 6 * (64 << 20)  # check, check_best, verify; three drafts
    assert CardNeeds(spec, model).graphs() == whole
    eager = replace(spec, engine=replace(spec.engine, exe_mode="eager"))
    assert CardNeeds(eager, model).graphs() == 0
    both = replace(spec, role="standalone")
    assert workspace(both, model) > 5 * workspace(spec, model), "it has chunks of prompts too"
    assert CardNeeds(both, model).graphs() == whole, "which are not compiled"


# -- against the card


def test_every_figure_of_a_card_says_where_it_comes_from() -> None:
    for card in CARDS.values():
        assert len(card.figures) == 10
        assert all(figure.value > 0 and len(figure.source) > 5 for figure in card.figures.values())
        assert card.usable_gib.value < card.memory_gib.value


def test_what_is_usable_can_be_told() -> None:
    spec, _ = told("d0")
    card = card_of(spec)
    assert card is CARDS["A2"] and usable_bytes(spec) == int(60.9 * GIB)
    assert usable_bytes(replace(spec, device_memory_gib=29.5)) == int(29.5 * GIB)
    assert usable_bytes(replace(spec, device="cpu")) is None


def test_a_card_that_is_too_small_is_refused_with_the_parts_of_the_fullest() -> None:
    spec, model = told("p0", "device_memory_gib=32")
    (line,) = memory_findings(spec, instance_memory(spec, model), available_bytes=1 << 60)
    assert line.startswith("prefill p0 needs 58.4 GiB a card, 32.0 available: weights 27.6, cache 11.2, index keys 1.2, ")
    assert line.endswith("(rank 8, card 8 of 10.0.2.1)")
    exact = max(rank.total_bytes for rank in instance_memory(spec, model))
    assert list(card_findings(spec, instance_memory(spec, model), usable_bytes=exact)) == []
    assert len(list(card_findings(spec, instance_memory(spec, model), usable_bytes=exact - 1))) == 1


def test_instances_on_one_machine_share_its_memory_and_not_their_cards() -> None:
    spec, _ = told("p0")
    assert not list(total_memory_findings([spec], available_bytes=500 * GIB))
    assert list(total_memory_findings([spec], available_bytes=400 * GIB))  # 252 of tables, 3 for each of 64


def test_the_most_blocks_fit_exactly() -> None:
    spec, model = told("d0")
    usable = int(60.9 * GIB)
    able = capacity(spec, model, instance_memory(spec, model), usable_bytes=usable)
    assert able.most_blocks is not None
    assert block_bytes(0, spec, model) == BLOCKS * 2 * (76 * 576 + 38 * 128 + 704)
    for number, fits in ((able.most_blocks, True), (able.most_blocks + 1, False)):
        more = replace(spec, engine=replace(spec.engine, num_blocks=number))
        assert (max(rank.total_bytes for rank in instance_memory(more, model)) <= usable) == fits


@pytest.mark.parametrize(
    ("name", "length", "count"),
    [("d0", 1_000_000, 32), ("d0", 524_288, 48), ("d0", 8192, 64), ("p0", 1_000_000, 8)],
)
def test_sequences_that_fit(name: str, length: int, count: int) -> None:
    """A group of d0 has 2047 x 8 blocks; a million tokens are 7813 and take 977 of each shard."""
    spec, model = told(name)
    able: Any = capacity(spec, model, instance_memory(spec, model), usable_bytes=None)
    assert able.sequences[length] == count and able.most_blocks is None
    if name == "d0":
        assert able.tokens == 2047 * 8 * 128 * 16
