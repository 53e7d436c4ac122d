"""Bytes on the wire, counted and computed: of a mixture of experts by each dispatch, across nodes, of a decode step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine.plan import Segment, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.models.batch import Rows
from longcat_pd.parallel.mesh import Mesh
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.parity.test_experts import HIDDEN, ROUTED, draw_rows, experts, weights_of
from tests.slots import GREEDY, admit

NOWHERE = Path("/nonexistent")
RANKS, TOPK, NUM_ROWS = 4, 4, 6
ROW = 4 * HIDDEN  # bytes of a row, in fp32 both ways
ROUTING = 8 * TOPK  # of an id and a weight for each choice


def traffic(spec: RankSpec, mesh: Mesh) -> tuple[dict[str, int], int, list[list[int]]]:
    """Bytes sent by axis, bytes sent to ranks of the other node (ranks 0 and 1 are one), and the experts of the rows."""
    made = experts(weights_of(None), is_steady=False, mesh=mesh, kind=spec.instance.parallel.moe_dispatch)
    x = draw_rows(NUM_ROWS, mesh.rank)
    with torch.inference_mode():
        ids, _ = made.router(x)
        made(x, Rows(NUM_ROWS, NUM_ROWS))
    node = (0, 1) if mesh.rank < 2 else (2, 3)
    sent = {axis: found.sent_bytes for axis, found in mesh.traffic.axes.items()}
    return sent, mesh.traffic.crossing_bytes(mesh.rank, node), ids.tolist()


def measured(collectives: str = "pairwise", **split: object) -> list[tuple[dict[str, int], int, list[list[int]]]]:
    parallel = ParallelConfig(cp_size=RANKS, ep_size=RANKS, **split)  # type: ignore[arg-type]
    return on_ranks(rank_specs(NOWHERE, parallel), traffic, collectives=collectives)


def away(ids: list[list[int]], ranks: range) -> int:
    """Choices of experts that lie on these ranks."""
    each = ROUTED // RANKS
    return sum(expert // each in ranks for row in ids for expert in row if expert < ROUTED)


def returned(everyones: list[list[list[int]]], rank: int, but: range) -> int:
    """Results that ``rank`` sends to ranks outside ``but``."""
    return sum(away(ids, range(rank, rank + 1)) for other, ids in enumerate(everyones) if other not in but)


COLLECTIVES = pytest.mark.parametrize("collectives", ["pairwise", "native"])


@COLLECTIVES
def test_gather(collectives: str) -> None:
    for sent, crossing, _ in measured(collectives, moe_dispatch="gather"):
        assert sent == {"ep": (RANKS - 1) * NUM_ROWS * (ROW + ROUTING + ROW)}
        assert crossing == 2 * NUM_ROWS * (ROW + ROUTING + ROW)


@COLLECTIVES
def test_two_level_crosses_nodes_once_each_way_and_all_to_all_once_for_every_choice(collectives: str) -> None:
    plain = measured(collectives, moe_dispatch="all_to_all")
    levels = measured(collectives, moe_dispatch="two_level", node_size=2)
    everyones = [ids for _, _, ids in plain]
    assert everyones == [ids for _, _, ids in levels]
    counts = (RANKS - 1) * ROUTED // RANKS * 4  # how many come for each expert
    for rank, (sent, crossing, ids) in enumerate(plain):
        others = [r for r in range(RANKS) if r != rank]
        node = range(2) if rank < 2 else range(2, 4)
        rows_out = sum(away(ids, range(r, r + 1)) for r in others)
        rows_back = returned(everyones, rank, range(rank, rank + 1))
        assert sent == {"ep": counts + (rows_out + rows_back) * ROW}
        other_node = range(2, 4) if rank < 2 else range(2)
        choices = away(ids, other_node) + returned(everyones, rank, node)
        assert crossing == 2 * ROUTED // RANKS * 4 + choices * ROW
    for _, crossing, _ in levels:
        assert crossing == NUM_ROWS * (ROW + ROW) + 4  # a row in, a sum out, and how many rows there are
    assert sum(crossing for _, crossing, _ in levels) < sum(crossing for _, crossing, _ in plain)


def test_zero_experts_never_travel() -> None:
    """Nothing but counts is exchanged when every row chooses zero experts only."""
    parallel = ParallelConfig(cp_size=RANKS, ep_size=RANKS, moe_dispatch="all_to_all")
    for sent in on_ranks(rank_specs(NOWHERE, parallel), only_zero):
        assert sent == {"ep": (RANKS - 1) * ROUTED // RANKS * 4}


def only_zero(spec: RankSpec, mesh: Mesh) -> dict[str, int]:
    made = experts(weights_of(range(ROUTED, ROUTED + TOPK)), is_steady=False, mesh=mesh, kind="all_to_all")
    with torch.inference_mode():
        made(draw_rows(NUM_ROWS, mesh.rank), Rows(NUM_ROWS, NUM_ROWS))
    return {axis: found.sent_bytes for axis, found in mesh.traffic.axes.items()}


# -- a whole decode step of D(dp 2, kvp 2, ep 4)

STEP = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, dense_tp_size=2, ep_size=4, embed_tp_size=2, lmhead_tp_size=4)
GROUP, ALL = 2, 4  # ranks that share rows; ranks that share experts and the head


def step_bytes(spec: RankSpec, mesh: Mesh, num_logprobs: int | None) -> dict[str, int]:
    """Bytes that a rank sends by axis in one decode step."""
    runner = ModelRunner(spec, mesh)
    pools = [GroupPool(group, GROUP, spec.instance.engine.num_blocks) for group in range(2)]
    # two of the first group, one of the second, whose batch is padded
    slots = (0, 1, spec.instance.engine.max_num_seqs // 2)
    sampling = replace(GREEDY, num_logprobs=num_logprobs)
    admits = tuple(
        admit(pools[int(slot > 1)], slot, [5 + slot, 6, 7, 8], block_size=BLOCK_SIZE, room=4, sampling=sampling)
        for slot in slots
    )
    prompts = tuple(Segment(slot=slot, start=0, num_tokens=4, is_last=True) for slot in slots)
    windows = tuple(Segment(slot=slot, start=-1, num_tokens=1, is_last=True) for slot in slots)
    runner.execute(StepPlan(step_id=1, phase="prefill", admit=admits, segments=prompts))
    before = sent_by(mesh)
    runner.execute(StepPlan(step_id=2, phase="decode", segments=windows))
    after = sent_by(mesh)
    return {axis: after[axis] - before[axis] for axis in after}


def sent_by(mesh: Mesh) -> dict[str, int]:
    return {axis: found.sent_bytes for axis, found in mesh.traffic.axes.items()}


@pytest.mark.parametrize("num_logprobs", [None, 0])
def test_a_decode_step(tiny: MakeCheckpoint, num_logprobs: int | None) -> None:
    path = tiny("chat")
    config = ModelConfig.load(path)
    rows, share, hidden = 2, 1, config.hidden_size * 4
    heads, latent, rope = config.num_attention_heads // GROUP, config.kv_lora_rank, config.qk_rope_head_dim
    queries, partials = rows * heads * (latent + rope) * 4, rows * heads * (latent + 1) * 4
    o_proj, dense, word = rows * hidden, rows * hidden, rows * hidden
    experts = share * (hidden + 8 * config.moe_topk + hidden)
    if num_logprobs is None:  # of each part of the vocabulary one logit and its id
        parts, whole = share * 8, share * ALL * 8
    else:
        parts, whole = share * config.vocab_size // ALL * 4, share * config.vocab_size * 4
    layers = config.num_layers
    expected = {
        "kvp": 2 * layers * (GROUP - 1) * (queries + partials),
        "attn_tp": (GROUP - 1) * (layers * (2 * o_proj + share * hidden) + whole),
        "dense_tp": 2 * layers * (GROUP - 1) * dense,
        "ep": layers * (ALL - 1) * experts,
        "embed_tp": (GROUP - 1) * word,
        "lmhead_tp": (ALL - 1) * (share * hidden + parts),
    }
    assert on_ranks(rank_specs(path, STEP), step_bytes, num_logprobs) == [expected] * STEP.world_size
