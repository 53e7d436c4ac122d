"""n ranks <-> one: pipeline stages, context parallelism and KV parallelism give the tokens of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import Admit, Segment, SlotOutput, SlotSampling, StepOutput, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs, run_plans
from tests.slots import admit

CHUNK = 32
NUM_DECODED = 6
# one token; around a block, around a chunk, around and above index_topk = 48; the EOS 2 inside
LENGTHS = (1, 5, 7, 8, 9, 31, 33, 47, 49, 120)


def prompts() -> list[list[int]]:
    ids = [[3 + (37 * i * i + 11 * i + length) % 1000 for i in range(length)] for length in LENGTHS]
    ids[3][4] = 2
    ids[-1][60:62] = [2, 2]
    return ids


def plans_for(parallel: ParallelConfig, num_decoded: int, sampling: Sequence[SlotSampling]) -> list[StepPlan]:
    """Chunks of all prompts in turn, mixed within a budget; then steps for all that decode; then all retire."""
    shard = ParallelLayout.of(parallel).cache_shard(0)
    pool = GroupPool(0, shard.num_ranks, 64)
    admits: list[Admit] = [
        admit(pool, slot, ids, block_size=BLOCK_SIZE, room=num_decoded + 1, sampling=sampling[slot])
        for slot, ids in enumerate(prompts())
    ]
    steps: list[tuple[Segment, ...]] = []
    for start in range(0, max(LENGTHS), CHUNK):
        segments = [
            Segment(slot=slot, start=start, num_tokens=min(CHUNK, length - start), is_last=start + CHUNK >= length)
            for slot, length in enumerate(LENGTHS)
            if start < length
        ]
        steps += [tuple(segments[i : i + 3]) for i in range(0, len(segments), 3)]
    decode = tuple(Segment(slot=slot, start=-1, num_tokens=1, is_last=True) for slot in range(len(LENGTHS)))
    plans = [StepPlan(step_id=1, phase="prefill", admit=tuple(admits))]
    plans += [StepPlan(step_id=2 + i, phase="prefill", segments=s) for i, s in enumerate(steps)]
    plans += [StepPlan(step_id=len(plans) + 1 + i, phase="decode", segments=decode) for i in range(num_decoded)]
    return [*plans, StepPlan(step_id=len(plans) + 1, phase="decode", retire=tuple(range(len(LENGTHS))))]


def samplings() -> list[SlotSampling]:
    """Half of the sequences greedy, half drawn."""
    return [
        SlotSampling(temperature=0.8 * (slot % 2), top_p=0.95, top_k=40, seed=slot, choice=0, num_logprobs=4)
        for slot in range(len(LENGTHS))
    ]


def answers(outputs: Sequence[StepOutput]) -> dict[int, list[SlotOutput]]:
    by_slot: dict[int, list[SlotOutput]] = {}
    for output in outputs:
        for slot in output.slots:
            by_slot.setdefault(slot.slot, []).append(slot)
    return by_slot


def single(path: Path, num_decoded: int) -> dict[int, list[SlotOutput]]:
    parallel = ParallelConfig()
    return answers(run_plans(rank_specs(path, parallel)[0], Mesh.single(), plans_for(parallel, num_decoded, samplings())))


def check_equal(path: Path, parallel: ParallelConfig, num_decoded: int, *, collectives: str = "pairwise") -> None:
    expected, plans = single(path, num_decoded), plans_for(parallel, num_decoded, samplings())
    by_rank = on_ranks(rank_specs(path, parallel), run_plans, plans, collectives=collectives)
    layout = ParallelLayout.of(parallel)
    reporting = [rank for rank, outputs in enumerate(by_rank) if answers(outputs)]
    assert reporting == [rank for rank in range(layout.world_size) if layout.is_reporting(rank)]
    got = answers(by_rank[reporting[0]])
    assert got.keys() == expected.keys() == set(range(len(LENGTHS)))
    for slot, tokens in expected.items():
        assert [t.token_ids for t in got[slot]] == [t.token_ids for t in tokens], f"prompt of {LENGTHS[slot]}"
        for mine, other in zip(got[slot], tokens, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert [p for _, p in mine.top[0]] == pytest.approx([p for _, p in other.top[0]], abs=1e-4)
    for outputs in by_rank:
        accounts = outputs[-1].accounts
        assert accounts is not None
        assert (accounts.blocks_live, accounts.slots_used, accounts.blocks_free) == (0, 0, 63)
        assert outputs[0].accounts is not None and outputs[0].accounts.slots_used == len(LENGTHS)
    held = [outputs[0].accounts.blocks_live for outputs in by_rank if outputs[0].accounts is not None]
    stages = layout.axis("pp").size
    assert sum(held) == stages * sum(-(-(n + num_decoded + 1) // BLOCK_SIZE) for n in LENGTHS)


@pytest.mark.parametrize(("pp", "cp"), [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_prefill_pool(tiny: MakeCheckpoint, pp: int, cp: int) -> None:
    stages = {1: (), 2: (1, 2), 3: ()}[pp]
    check_equal(tiny("2.0"), ParallelConfig(pp_size=pp, cp_size=cp, layers_per_stage=stages), 0)


@pytest.mark.parametrize("kvp", [2, 3, 4])
def test_decode_pool(tiny: MakeCheckpoint, kvp: int) -> None:
    check_equal(tiny("2.0"), ParallelConfig(kvp_size=kvp, attn_tp_size=kvp), NUM_DECODED)


@pytest.mark.parametrize("variant", ["lite-sparse", "lite", "chat"])
@pytest.mark.parametrize("parallel", [ParallelConfig(pp_size=2, cp_size=2), ParallelConfig(kvp_size=2, attn_tp_size=2)])
def test_variants(tiny: MakeCheckpoint, variant: str, parallel: ParallelConfig) -> None:
    check_equal(tiny(variant), parallel, 0 if parallel.pp_size > 1 else NUM_DECODED)


@pytest.mark.parametrize("parallel", [ParallelConfig(pp_size=2, cp_size=2), ParallelConfig(kvp_size=4, attn_tp_size=4)])
def test_by_the_backends_own_collectives(tiny: MakeCheckpoint, parallel: ParallelConfig) -> None:
    """All that a device's ranks exchange, on gloo."""
    check_equal(tiny("2.0"), parallel, 0 if parallel.pp_size > 1 else NUM_DECODED, collectives="native")


def check_alone(path: Path) -> None:
    """Every sequence alone, its prompt in one piece, says what it says in the batch and in chunks."""
    together = single(path, NUM_DECODED)
    runner = ModelRunner(rank_specs(path, ParallelConfig())[0], Mesh.single())
    pool = GroupPool(0, 1, 64)
    step = 0
    for slot, ids in enumerate(prompts()):
        alone = admit(pool, 0, ids, block_size=BLOCK_SIZE, room=NUM_DECODED + 1, sampling=samplings()[slot])
        whole = (Segment(slot=0, start=0, num_tokens=len(ids), is_last=True),)
        newest = (Segment(slot=0, start=-1, num_tokens=1, is_last=True),)
        outputs = [runner.execute(StepPlan(step_id=step + 1, phase="prefill", admit=(alone,), segments=whole))]
        for i in range(NUM_DECODED):
            outputs.append(runner.execute(StepPlan(step_id=step + 2 + i, phase="decode", segments=newest)))
        step += NUM_DECODED + 2
        runner.execute(StepPlan(step_id=step, phase="decode", retire=(0,)))
        got = answers(outputs)[0]
        assert [t.token_ids for t in got] == [t.token_ids for t in together[slot]], f"prompt of {len(ids)}"
        for mine, other in zip(got, together[slot], strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_company_and_chunks_do_not_matter(tiny: MakeCheckpoint) -> None:
    check_alone(tiny("2.0"))
