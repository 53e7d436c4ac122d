"""Every part of the model split over an axis of its own says what one rank says: experts by each dispatch, dense MLPs,
embeddings, n-gram tables, the head; alone and together, in prefill and in decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.schema import ParallelConfig
from tests.parity.conftest import MakeCheckpoint
from tests.parity.test_groups import SLOTS, check
from tests.parity.test_ranks import NUM_DECODED, check_equal

CP = {"cp_size": 2}
KVP = {"kvp_size": 2, "attn_tp_size": 2}
ONE_AXIS = ("dense_tp_size", "moe_tp_size", "ep_size", "embed_tp_size", "lmhead_tp_size", "ngram_embed_tp_size")


@pytest.mark.parametrize("base", [CP, KVP], ids=["prefill", "decode"])
@pytest.mark.parametrize("axis", ONE_AXIS)
def test_one_axis(tiny: MakeCheckpoint, base: dict[str, int], axis: str) -> None:
    check_equal(tiny("2.0"), ParallelConfig(**base, **{axis: 2}), 0 if base is CP else NUM_DECODED)


DISPATCHES = [{"moe_dispatch": "gather"}, {"moe_dispatch": "all_to_all"}, {"moe_dispatch": "two_level", "node_size": 2}]


@pytest.mark.parametrize("base", [{"cp_size": 4}, {"kvp_size": 4, "attn_tp_size": 4}], ids=["prefill", "decode"])
@pytest.mark.parametrize("dispatch", DISPATCHES, ids=lambda dispatch: dispatch["moe_dispatch"])
def test_experts_of_four_ranks(tiny: MakeCheckpoint, base: dict[str, int], dispatch: dict[str, Any]) -> None:
    parallel = ParallelConfig(**base, ep_size=4, **dispatch)
    check_equal(tiny("2.0"), parallel, 0 if "cp_size" in base else NUM_DECODED)


GROUPS = {"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2}
WHOLE = {"dp_size": 2, "attn_tp_size": 2}  # every rank of a group has the whole cache; prompts are sequence parallel
TABLES = {"embed_tp_size": 4, "ngram_embed_tp_size": 4, "lmhead_tp_size": 4}
GROUPED: dict[str, dict[str, Any]] = {
    "gather": {**GROUPS, "ep_size": 4},
    "all_to_all": {**GROUPS, "ep_size": 4, "moe_dispatch": "all_to_all"},
    "two_level": {**GROUPS, "ep_size": 4, "moe_dispatch": "two_level", "node_size": 2},
    "everything, over all groups": {**GROUPS, **TABLES, "ep_size": 4, "dense_tp_size": 4},
    "everything, inside groups": {
        **GROUPS,
        "ep_size": 2,
        "dense_tp_size": 2,
        "lmhead_tp_size": 2,
        "embed_tp_size": 2,
        "moe_dispatch": "all_to_all",
    },
    "experts in parts": {**GROUPS, "moe_tp_size": 4, "dense_tp_size": 2},
    "sequence parallel": {**WHOLE, **TABLES, "ep_size": 4, "moe_dispatch": "all_to_all"},
    "sequence parallel, all split": {**WHOLE, **TABLES, "moe_tp_size": 4, "dense_tp_size": 4},
    "sequence parallel, inside groups": {**WHOLE, "ep_size": 2, "dense_tp_size": 2, "embed_tp_size": 2},
}


# each way to bring rows to experts is in another row too, among groups and among ranks that see the whole cache
RARE = {"gather", "all_to_all", "experts in parts", "sequence parallel, inside groups"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in GROUPED])
def test_groups(tiny: MakeCheckpoint, name: str) -> None:
    """Groups with uneven loads, one of them idle or full (see ``check``)."""
    parallel, num_drafts = ParallelConfig(**GROUPED[name]), 3 if "everything" in name else 0
    check(tiny("2.0+predictable"), parallel, num_drafts, has_logprobs="sequence" not in name)


@pytest.mark.parametrize("num_drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_split_head_without_log_probs(tiny: MakeCheckpoint, num_drafts: int) -> None:
    check(tiny("2.0+predictable"), ParallelConfig(dp_size=2, lmhead_tp_size=2), num_drafts, has_logprobs=False)


@pytest.mark.slow
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_compiled(tiny: MakeCheckpoint, tmp_path: Path, has_logprobs: bool) -> None:
    """One graph with all logits and one with the best only; each step takes one of them."""
    parallel = ParallelConfig(
        dp_size=2, ep_size=2, dense_tp_size=2, embed_tp_size=2, ngram_embed_tp_size=2, lmhead_tp_size=2
    )
    compiled = {"exe_mode": "inductor", "buckets": (SLOTS,), "compile_cache": str(tmp_path), "max_num_seqs": 2 * SLOTS}
    check(tiny("2.0+predictable"), parallel, 3, has_logprobs=has_logprobs, **compiled)


def test_the_layout_of_lite(tiny: MakeCheckpoint) -> None:
    """Attention TP 4 x DP 2, dense MLPs whole, experts, n-gram tables and head over all eight ranks."""
    parallel = ParallelConfig(
        dp_size=2,
        attn_tp_size=4,
        ep_size=8,
        ngram_embed_tp_size=8,
        lmhead_tp_size=8,
        moe_dispatch="all_to_all",
    )
    check(tiny("lite", "n_routed_experts=16"), parallel)
