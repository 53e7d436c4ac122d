"""What the plan says of links against what ranks really send in a step, by axis and kind of collective, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, ParallelConfig, RankSpec
from longcat_pd.engine.plan import Segment, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.quantize import quantize
from longcat_pd.sizing.exchanges import Chunk, Exchange, RowCount, StepExchanges
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.slots import GREEDY, admit

Bytes = dict[tuple[str, str], int]
LONG = 64  # tokens, above index_topk of the tiny checkpoints


class Kinds:
    """Bytes by axis and kind, noted where ranks note their traffic."""

    def __init__(self, mesh: Mesh) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self._kind: dict[str, str] = {}
        self._began, self._sent = mesh.traffic.began, mesh.traffic.sent
        mesh.traffic.began, mesh.traffic.sent = self._note_kind, self._note_bytes  # type: ignore[method-assign]

    def take(self) -> Bytes:
        found, self.found = dict(self.found), Counter()
        return {key: count for key, count in found.items() if count}

    def _note_kind(self, axis: str, kind: str) -> None:
        self._kind[axis] = kind
        self._began(axis, kind)

    def _note_bytes(self, axis: str, to: int, num_bytes: int) -> None:
        self.found[axis, self._kind.get(axis, "send")] += num_bytes
        self._sent(axis, to, num_bytes)


def predicted(exchanges: tuple[Exchange, ...], spec: InstanceSpec, *, is_native: bool, has_next: bool = True) -> Bytes:
    layout = ParallelLayout.of(spec.parallel)
    found: Counter[tuple[str, str]] = Counter()
    for item in exchanges:
        size = layout.axis(item.axis).size
        others = int(has_next) if item.kind == "send" else size - 1
        found[item.axis, item.kind] += others * item.bytes_each(size, is_native=is_native)
    return {key: count for key, count in found.items() if count}


def resolved(spec: InstanceSpec, model: ModelConfig) -> InstanceSpec:
    parallel = spec.parallel
    return replace(
        spec,
        parallel=replace(
            parallel,
            layers_per_stage=tuple(
                model.num_layers // parallel.pp_size + (stage < model.num_layers % parallel.pp_size)
                for stage in range(parallel.pp_size)
            ),
            ngram_embed_tp_size=parallel.ngram_embed_tp_size or parallel.embed_tp_size,
        ),
    )


# -- decode


def decoded(spec: RankSpec, mesh: Mesh, length: int, num_logprobs: int | None) -> tuple[Bytes, Bytes]:
    """Of a step of prompts, and of a decode step with two sequences in each group."""
    kinds, parallel, engine = Kinds(mesh), spec.instance.parallel, spec.instance.engine
    runner = ModelRunner(spec, mesh)
    each = engine.max_num_seqs // parallel.dp_size
    pools = [GroupPool(group, parallel.kvp_size, engine.num_blocks) for group in range(parallel.dp_size)]
    slots = [group * each + place for group in range(parallel.dp_size) for place in range(2)]
    sampling = replace(GREEDY, num_logprobs=num_logprobs)
    admits = tuple(
        admit(pools[slot // each], slot, list(range(5, 5 + length)), block_size=BLOCK_SIZE, room=12, sampling=sampling)
        for slot in slots
    )
    prompts = tuple(Segment(slot=slot, start=0, num_tokens=length, is_last=True) for slot in slots)
    window = 1 + engine.num_draft_tokens
    windows = tuple(Segment(slot=slot, start=-1, num_tokens=window, is_last=True) for slot in slots)
    kinds.take()
    runner.execute(StepPlan(step_id=1, phase="prefill", admit=admits, segments=prompts))
    first = kinds.take()
    runner.execute(StepPlan(step_id=2, phase="decode", segments=windows))
    return first, kinds.take()


LAYOUTS: dict[str, dict[str, Any]] = {
    "groups": {
        "dp_size": 2,
        "kvp_size": 2,
        "attn_tp_size": 2,
        "dense_tp_size": 2,
        "ep_size": 4,
        "embed_tp_size": 2,
        "lmhead_tp_size": 4,
        "ngram_embed_tp_size": 4,
    },
    "one group": {"kvp_size": 3, "attn_tp_size": 3, "moe_tp_size": 1, "ngram_embed_tp_size": 3},
    "lite": {"dp_size": 2, "attn_tp_size": 2, "moe_tp_size": 4, "dense_tp_size": 4, "lmhead_tp_size": 2},
}


@pytest.mark.parametrize(
    ("variant", "layout", "num_drafts", "length", "num_logprobs"),
    [
        pytest.param("2.0", "groups", 0, LONG, None, marks=pytest.mark.slow),
        ("2.0", "groups", 3, LONG, 0),
        ("2.0", "one group", 2, 9, None),
        pytest.param("chat", "lite", 0, 11, None, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step(
    tiny: MakeCheckpoint, variant: str, layout: str, num_drafts: int, length: int, num_logprobs: int | None
) -> None:
    path = tiny(variant)
    check_decode(path, ParallelConfig(**LAYOUTS[layout]), num_drafts, length, num_logprobs)


def check_decode(
    path: Path, parallel: ParallelConfig, num_drafts: int, length: int, num_logprobs: int | None, kind: str = "pairwise"
) -> None:
    model = ModelConfig.load(path)
    specs = rank_specs(path, parallel, num_drafts=num_drafts)
    spec, is_native = resolved(specs[0].instance, model), kind == "native"
    counted = on_ranks(specs, decoded, length, num_logprobs, collectives=kind)
    candidates = int(num_logprobs is None and parallel.lmhead_tp_size > 1)
    made = StepExchanges(spec, model)
    step = made.decode(2, context=length + 1, num_candidates=candidates)
    assert [found for _, found in counted] == [predicted(step, spec, is_native=is_native)] * parallel.world_size
    rows = 2 * length
    share = -(-rows // parallel.attn_tp_size)
    is_split = parallel.dp_size > 1 and parallel.attn_tp_size > 1
    chunk = Chunk(rows=RowCount(rows, share, is_split), outputs=2, context=length)
    prompt = made.prefill(0, chunk, num_candidates=candidates)
    assert [found for found, _ in counted] == [predicted(prompt, spec, is_native=is_native)] * parallel.world_size


@pytest.mark.slow
def test_collectives_of_the_backend_are_counted_by_their_definition(tiny: MakeCheckpoint) -> None:
    check_decode(tiny("2.0"), ParallelConfig(**LAYOUTS["groups"]), 1, LONG, None, "native")


def test_int8_gathers_inputs_and_adds_up_in_fp64(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    quantize(tiny("2.0"), tmp_path / "int8")
    check_decode(tmp_path / "int8", ParallelConfig(**LAYOUTS["groups"]), 1, LONG, None)


@pytest.mark.parametrize("dispatch", ["all_to_all", pytest.param("two_level", marks=pytest.mark.slow)])
def test_what_experts_decide_is_marked_and_all_else_is_exact(tiny: MakeCheckpoint, dispatch: Any) -> None:
    path, length = tiny("chat"), 9
    nodes = 2 if dispatch == "two_level" else 1
    parallel = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, ep_size=4, moe_dispatch=dispatch, node_size=nodes)
    specs = rank_specs(path, parallel)
    spec = resolved(specs[0].instance, ModelConfig.load(path))
    step = StepExchanges(spec, ModelConfig.load(path)).decode(2, context=length + 1, num_candidates=0)
    assert {item.kind for item in step if item.is_estimate} == {"all_to_all_rows"}
    expected = predicted(tuple(item for item in step if not item.is_estimate), spec, is_native=False)
    for _, found in on_ranks(specs, decoded, length, None):
        assert {key: count for key, count in found.items() if key[1] != "all_to_all_rows"} == expected


# -- prompts


def prompted(spec: RankSpec, mesh: Mesh, ends: list[int]) -> list[Bytes]:
    """Of the chunks of one prompt, which end there."""
    kinds, parallel, engine = Kinds(mesh), spec.instance.parallel, spec.instance.engine
    runner = ModelRunner(spec, mesh)
    pool = GroupPool(0, parallel.cp_size, engine.num_blocks)
    admission = admit(pool, 0, list(range(5, 5 + ends[-1])), block_size=BLOCK_SIZE, room=1)
    kinds.take()
    found = []
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        segment = Segment(slot=0, start=start, num_tokens=end - start, is_last=end == ends[-1])
        admits = () if number else (admission,)
        runner.execute(StepPlan(step_id=number + 1, phase="prefill", admit=admits, segments=(segment,)))
        found.append(kinds.take())
    runner.close()
    return found


@pytest.mark.parametrize(("variant", "num_drafts"), [("2.0", 2), pytest.param("lite", 0, marks=pytest.mark.slow)])
def test_chunks_of_a_prompt(tiny: MakeCheckpoint, variant: str, num_drafts: int) -> None:
    parallel = ParallelConfig(
        pp_size=2, cp_size=2, ep_size=2, embed_tp_size=2, lmhead_tp_size=2, dense_tp_size=2, ngram_embed_tp_size=2
    )
    path = tiny(variant)
    specs = rank_specs(path, parallel, num_drafts=num_drafts)
    model = ModelConfig.load(path)
    spec = resolved(specs[0].instance, model)
    made, ends = StepExchanges(spec, model), [LONG // 2, LONG]
    counted = on_ranks(specs, prompted, ends)
    for number, end in enumerate(ends):
        rows = RowCount(LONG // 4, LONG // 4)
        chunk = Chunk(rows=rows, outputs=int(end == LONG), context=end, gathered=end // 2)
        expected = [
            predicted(made.prefill(stage, chunk), spec, is_native=False, has_next=stage == 0) for stage in (0, 0, 1, 1)
        ]
        assert [found[number] for found in counted] == expected
