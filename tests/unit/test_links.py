"""Bytes on links of the 192 by hand. That ranks really send what is counted is shown by tests/parity/test_links.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.parallel.platform import platform_of
from longcat_pd.sizing.exchanges import Exchange
from longcat_pd.sizing.links import (
    NATIVE_DEVICES,
    between_nodes,
    full_chunk,
    full_step,
    link_bytes,
    looked_up,
    token_bytes,
)

FILE = Path(__file__).parents[2] / "deploy" / "config" / "cluster" / "longcat2-a2-192.yaml"
HIDDEN = 8192


def told(name: str, *overrides: str) -> tuple[InstanceSpec, ModelConfig]:
    config = load(FILE, overrides)
    return instance_spec(config, name), ModelConfig.load(config.model.path)


def test_what_a_decode_rank_sends() -> None:
    """16 rows of a group, 2 of each rank; 38 layers of two attentions."""
    spec, model = told("d0")
    links = link_bytes(full_step(spec, model, context=1000), spec, 77)
    ids, rows, sums, back = 2 * 2 * 12 * 4, 2 * HIDDEN * 2, 2 * HIDDEN * 4, 2 * HIDDEN * 2
    experts = 38 * (127 * (ids + rows + sums) + 7 * back)
    assert links.by_part["experts"] == experts
    queries, partials, heads, gathered = 16 * 8 * 576 * 2, 16 * 8 * 513 * 4, 16 * 8 * 128 * 2, 16 * 1024 * 2
    assert links.by_part["attention"] == 76 * 7 * (queries + partials + heads + gathered)
    assert links.by_part["indexer"] == 38 * 7 * 2 * 16 * 1008 * 4, "chosen at any length: the step is compiled"
    assert links.by_part["dense"] == 76 * 7 * (16 * 1536 * 2 + gathered)
    assert links.by_part["n-grams"] == 127 * (2 * 16 * 8 + 2 * HIDDEN * 2) + 7 * back
    assert links.inside + links.between == sum(links.by_part.values())
    far = 112 * (38 * (ids + rows + sums) + 2 * 16 * 8 + 2 * HIDDEN * 2)
    assert links.between == far, "a node has two groups and the head's ranks; only experts and tables leave it"
    assert (links.to_host, links.from_host) == (0, 0)


def test_what_a_prefill_rank_sends() -> None:
    """2048 rows of each rank; 7813 blocks of a million tokens, 977 of a rank; five layers in the second stage."""
    spec, model = told("p0")
    links = link_bytes(full_chunk(spec, model, 1, context=1_000_000), spec, 13)
    assert links.by_part["attention"] == 10 * 7 * 977 * 128 * 576 * 2
    assert links.by_part["indexer"] == 5 * 7 * 977 * 128 * 128 * 2
    assert links.by_part["experts"] == 5 * 7 * 2048 * (2 * 12 * 4 + HIDDEN * 2 + HIDDEN * 4)
    assert links.between == links.by_part["stages"] == 2048 * HIDDEN * 2, "the next stage is on the next node"
    first = link_bytes(full_chunk(spec, model, 0, context=1_000_000), spec, 5)
    assert first.between == 0 and first.by_part["stages"] == 2048 * HIDDEN * 2, "the next stage is on the same node"
    short = link_bytes(full_chunk(spec, model, 1, context=2048), spec, 13)
    assert "indexer" not in short.by_part, "so few keys are not chosen among"


def test_bytes_from_node_to_node_are_those_of_the_ranks() -> None:
    spec, model = told("d0")
    step = full_step(spec, model, context=1000)
    pairs = between_nodes(step, spec, range(128))
    assert len(pairs) == 56 and len(set(pairs.values())) == 1
    assert sum(pairs.values()) == sum(link_bytes(step, spec, rank).between for rank in range(128))
    spec, model = told("p0")
    chunk = full_chunk(spec, model, 1, context=1000)
    assert between_nodes(chunk, spec, range(8, 16)) == {(0, 1): 8 * 2048 * HIDDEN * 2}


def test_what_a_token_leaves_in_caches() -> None:
    spec, model = told("d0")
    assert token_bytes(spec, model) == 2 * (76 * 576 + 38 * 128 + 576 + 128) == 87_552 + 9_728 + 1_408
    assert token_bytes(replace(spec, engine=replace(spec.engine, num_draft_tokens=0)), model) == 97_280


def test_vectors_of_tables_in_host_memory_cross_to_the_device() -> None:
    spec, model = told("p0")
    assert looked_up(spec, model, 0, num_rows=2048) == (8 * 2048 * 16 * 8, 8 * 2048 * HIDDEN * 2)
    assert looked_up(spec, model, 8, num_rows=2048) == (0, 0)
    spec, model = told("d0")
    assert looked_up(spec, model, 0, num_rows=16) == (0, 0)


def test_sums_move_as_the_backend_moves_them() -> None:
    def sums(elements: int) -> Exchange:
        return Exchange(part="dense", axis="dense_tp", kind="all_reduce", elements=elements, width=2, times=3)

    assert sums(1000).bytes_each(8, is_native=False) == 3 * 2000, "small ones whole"
    assert sums(100_001).bytes_each(8, is_native=False) == 3 * 2 * 12_501 * 2
    assert sums(1000).bytes_each(8, is_native=True) == 3 * 2 * 125 * 2


def test_the_devices_with_collectives_of_their_own_are_those_of_the_platforms() -> None:
    assert [kind for kind in ("cpu", "npu") if platform_of(kind).collectives == "native"] == list(NATIVE_DEVICES)


def test_the_fused_pair_is_an_estimate_and_smaller() -> None:
    spec, model = told("d0")
    fused = replace(spec, parallel=replace(spec.parallel, moe_dispatch="fused"))
    step = full_step(fused, model, context=1000)
    assert {(item.part, item.kind) for item in step if item.is_estimate} == {("experts", "all_to_all_rows")}
    plain = link_bytes(full_step(spec, model, context=1000), spec, 0).by_part["experts"]
    assert link_bytes(step, fused, 0).by_part["experts"] < plain / 10
