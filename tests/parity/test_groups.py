"""Groups of ranks with sequences of their own, in lockstep: the tokens of a single process, whatever the others have to do.

Every rank is given the same plans. What a group computes must not depend on the other, and the steps of all groups must be
calls in one order with equal shares of rows: modules that are split over several groups rely on nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine.plan import Segment, SlotSampling, StepOutput, StepPlan
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from tests.compiled import with_engine
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs, run_plans
from tests.parity.test_ranks import answers
from tests.slots import admit

CHUNK = 32
NUM_BLOCKS = 128
SLOTS = 8  # of a group, where there are two
LENGTHS = (1, 8, 120, 31, 5, 49, 9, 33)  # index_topk is 48
STEPS = (6, 1, 3, 5, 2, 4, 6, 3)  # that a sequence decodes
# by sequence: its group. One idle, one full; the other way round; both; one with a single short one
PLACES = ("00000000", "11111111", "01101001", "00100000")


def prompts() -> list[list[int]]:
    return [[3 + (37 * i * i + 11 * i + length) % 1000 for i in range(length)] for length in LENGTHS]


def sampling(number: int) -> SlotSampling:
    """Half of them greedy; half of them, and not those that go on longest, draw from other logits than the model's."""
    rule = SlotSampling(temperature=0.8 * (number % 2), top_p=0.95, top_k=40, seed=number, choice=0, num_logprobs=2)
    if number not in (1, 2, 4, 7):
        return rule
    edits = replace(rule, presence_penalty=1.0, frequency_penalty=0.5, logit_bias=((70 + number, 3.0),), min_p=0.01)
    return replace(edits, repetition_penalty=1.5, min_tokens=4, ends=tuple(range(100)))


def slots_of(places: str) -> list[int]:
    return [SLOTS * int(group) + places[:number].count(group) for number, group in enumerate(places)]


def round_of(places: str, num_shards: int, num_drafts: int, *, has_logprobs: bool = True) -> list[StepPlan]:
    """All prompts in chunks, by turns; decoding until each has had its steps; then all retire. Steps count from 1."""
    pools = [GroupPool(group, num_shards, NUM_BLOCKS) for group in range(2)]
    slots, room = slots_of(places), 1 + max(STEPS) * (1 + num_drafts) + num_drafts
    rules = [replace(sampling(n), num_logprobs=2 if has_logprobs else None) for n in range(len(LENGTHS))]
    admits = tuple(
        admit(pools[int(places[n])], slots[n], ids, block_size=BLOCK_SIZE, room=room, sampling=rules[n])
        for n, ids in enumerate(prompts())
    )
    steps: list[dict[str, Any]] = [{"phase": "prefill", "admit": admits}]
    for start in range(0, max(LENGTHS), CHUNK):
        segments = [
            Segment(slot=slots[n], start=start, num_tokens=min(CHUNK, length - start), is_last=start + CHUNK >= length)
            for n, length in enumerate(LENGTHS)
            if start < length
        ]
        steps += [{"phase": "prefill", "segments": tuple(segments[i : i + 2])} for i in range(0, len(segments), 2)]
    for step in range(max(STEPS)):
        going = [slots[n] for n, count in enumerate(STEPS) if step < count]
        windows = tuple(Segment(slot=slot, start=-1, num_tokens=1 + num_drafts, is_last=True) for slot in going)
        steps.append({"phase": "decode", "segments": windows})
    steps.append({"phase": "decode", "retire": tuple(slots)})
    return [StepPlan(step_id=1 + i, **fields) for i, fields in enumerate(steps)]


@functools.cache
def single(path: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each sequence in one process without drafts; as many as drafts can bring at most."""
    spec = rank_specs(path, ParallelConfig(), num_blocks=NUM_BLOCKS)[0]
    slots = range(len(LENGTHS))
    plans = [plan for plan in round_of("00000000", 1, 3) if plan.phase == "prefill"]
    windows = tuple(Segment(slot=slot, start=-1, num_tokens=1, is_last=True) for slot in slots)
    plans += [StepPlan(step_id=len(plans) + 1 + i, phase="decode", segments=windows) for i in range(4 * max(STEPS))]
    found = answers(run_plans(spec, Mesh.single(), plans))
    return [([t for o in found[s] for t in o.token_ids], [p for o in found[s] for p in o.logprobs]) for s in slots]


def traced(spec: RankSpec, mesh: Mesh, plans: Sequence[StepPlan]) -> tuple[list[StepOutput], list[tuple[object, ...]]]:
    """A rank's answers, and the calls of its model with what every rank hands in."""
    loaded, calls = load_rank_model(spec, mesh), list[tuple[object, ...]]()

    def note(name: str, *shares: int) -> None:
        calls.append((name, *shares))

    model = loaded.model
    assert model.head is not None
    model.stack.register_forward_pre_hook(lambda _, given: note("stack", given[1].rows.share, given[1].outputs.share))
    model.head.register_forward_pre_hook(lambda _, given: note("head"))
    if model.draft is not None:
        model.draft.register_forward_pre_hook(lambda _, given: note("draft", given[1].rows.share))
    runner = ModelRunner(spec, mesh, loaded=loaded)
    outputs = [runner.execute(plan) for plan in plans]
    runner.close()
    return outputs, calls


def check(path: Path, parallel: ParallelConfig, num_drafts: int = 0, *, has_logprobs: bool = True, **engine: Any) -> None:
    """Without log-probs a split head need not bring all logits together: every row takes the best id, or one of 40."""
    layout, expected = ParallelLayout.of(parallel), single(path)
    num_shards = layout.cache_shard(0).num_ranks
    rounds = [round_of(places, num_shards, num_drafts, has_logprobs=has_logprobs) for places in PLACES]
    plans = [replace(plan, step_id=1 + number) for number, plan in enumerate(plan for plans in rounds for plan in plans)]
    specs = rank_specs(path, parallel, num_blocks=NUM_BLOCKS, num_drafts=num_drafts)
    by_rank = on_ranks([with_engine(spec, **engine) for spec in specs], traced, plans)
    assert all(calls == by_rank[0][1] for _, calls in by_rank), "groups do not step alike"
    check_collectives([found for found, _ in by_rank], layout)
    ranks_each = parallel.world_size // 2
    first = 0
    for places, steps in zip(PLACES, rounds, strict=True):
        outputs = [found[first : first + len(steps)] for found, _ in by_rank]
        first += len(steps)
        reports = [answers(found) for found in outputs]
        assert all(not report for rank, report in enumerate(reports) if rank % ranks_each)
        for number, slot in enumerate(slots_of(places)):
            report = reports[ranks_each * int(places[number])][slot]
            tokens, logprobs = expected[number]
            got = [token for output in report for token in output.token_ids]
            assert len(got) >= 1 + STEPS[number] and got == tokens[: len(got)], f"{places}: prompt of {LENGTHS[number]}"
            told = [p for o in report for p in o.logprobs]
            assert told == (pytest.approx(logprobs[: len(got)], abs=1e-4) if has_logprobs else [])
        for rank, found in enumerate(outputs):
            begun, ended = found[0].accounts, found[-1].accounts
            assert begun is not None and begun.slots_used == places.count(str(rank // ranks_each))
            assert begun.slots_total == SLOTS and bool(begun.blocks_live) == bool(begun.slots_used)
            assert ended is not None and (ended.blocks_live, ended.slots_used) == (0, 0)


def check_collectives(by_rank: Sequence[Sequence[StepOutput]], layout: ParallelLayout) -> None:
    """After every plan all ranks have entered the same collectives in the same order, whatever their groups had to do.

    Only inside a group a long context may want one more (its ranks bring their candidates together).
    """
    for outputs in zip(*by_rank, strict=True):
        entered = [{one.axis: one for one in output.accounts.collectives} for output in outputs if output.accounts]
        assert len(entered) == layout.world_size
        for axis in {name for found in entered for name in found}:
            groups = layout.groups("kvp") if axis == "kvp" else [tuple(range(layout.world_size))]
            for ranks in groups:
                assert len({entered[rank].get(axis) for rank in ranks}) == 1, (axis, outputs[0].step_id)


LAYOUTS = {
    "dp2": ParallelConfig(dp_size=2),
    "dp2-kvp2": ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2),
    "dp2-whole2": ParallelConfig(dp_size=2, attn_tp_size=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_groups_say_what_one_process_says(tiny: MakeCheckpoint, layout: str, num_drafts: int) -> None:
    check(tiny("2.0+predictable"), LAYOUTS[layout], num_drafts)


@pytest.mark.slow
def test_a_compiled_step_has_padding_for_the_emptier_group(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    compiled = {"exe_mode": "inductor", "buckets": (SLOTS,), "compile_cache": str(tmp_path), "max_num_seqs": 2 * SLOTS}
    check(tiny("2.0+predictable"), LAYOUTS["dp2"], 3, **compiled)


@pytest.mark.parametrize("variant", ["lite", "chat"])
def test_of_other_releases_too(tiny: MakeCheckpoint, variant: str) -> None:
    check(tiny(variant), LAYOUTS["dp2-whole2"])


def test_every_rank_of_a_group_may_hold_the_whole_cache(tiny: MakeCheckpoint) -> None:
    path, parallel = tiny("2.0+predictable"), ParallelConfig(attn_tp_size=2)
    plans = round_of("00000000", 1, 0)
    by_rank = on_ranks(rank_specs(path, parallel, num_blocks=NUM_BLOCKS), run_plans, plans)
    assert not answers(by_rank[1])
    for number, report in answers(by_rank[0]).items():
        got = [token for output in report for token in output.token_ids]
        assert got == single(path)[number][0][: 1 + STEPS[number]]
    held = [outputs[0].accounts for outputs in by_rank]
    assert held[0] is not None and held[1] is not None and held[0].blocks_live == held[1].blocks_live > 0
