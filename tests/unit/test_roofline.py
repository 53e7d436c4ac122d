"""Times that follow from counts: by pencil where one number decides, and in which direction they go."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, NpuConfig, ParallelConfig, TransferConfig
from longcat_pd.sizing.cards import CARDS
from longcat_pd.sizing.exchanges import Exchange
from longcat_pd.sizing.pieces import Layer, Piece
from longcat_pd.sizing.pricing import Clock, Estimate, Spent
from longcat_pd.sizing.rates import Attained, Rates, rates_of
from longcat_pd.sizing.roofline import Chunk, chunks_of, decode_step, longest_way, prefill
from longcat_pd.sizing.work import Work
from tests.releases import FULL_2_0

IGNORED = ["lm_head", "re:.*self_attn", "re:.*router", "re:.*oe_embed", "re:.*eh_proj"]
LARGE = ModelConfig.from_dict(FULL_2_0 | {"quantization_config": int8_section(IGNORED)})
FLOATS = ModelConfig.from_dict(FULL_2_0)
RATES = rates_of(CARDS["A2"], cards_per_node=16)
EVEN = Attained(
    matmul=1, hbm=1, link=1, fp32=1, collective_s=2, between_s=5, graph_operator_s=7, graph_step_s=0, eager_operator_s=11
)
ONES = Rates(
    bf16_flops=1, int8_ops=1, hbm_bytes=1, inside_bytes=1, between_bytes=0.5, host_bytes=1, cards_per_node=4, attained=EVEN
)


def spec(role: str, *, npu: NpuConfig | None = None, layers: tuple[int, ...] = (38,), **fields: Any) -> InstanceSpec:
    sizes = {name: fields.pop(name) for name in list(fields) if name in ParallelConfig.__dataclass_fields__}
    return InstanceSpec(
        name="x",
        role=role,  # type: ignore[arg-type]
        host="",
        http_port=1,
        device="npu",
        model=ModelSection(path="/x", dtype="bfloat16"),
        parallel=ParallelConfig(layers_per_stage=layers, pp_size=len(layers), **sizes),
        engine=EngineConfig(num_blocks=1000, max_model_len=1_000_000, **fields),
        transfer=TransferConfig(),
        npu=npu or NpuConfig(),
    )


def decode(*, dp: int = 16, kvp: int = 8, **fields: Any) -> InstanceSpec:
    parts: dict[str, Any] = {
        "dense_tp_size": kvp,
        "ep_size": dp * kvp,
        "lmhead_tp_size": min(16, dp * kvp),
        "ngram_embed_tp_size": dp * kvp,
    }
    usual: dict[str, Any] = {"num_draft_tokens": 3, "exe_mode": "ge_graph", "buckets": (4,), "max_num_seqs": 4 * dp}
    return spec("decode", dp_size=dp, kvp_size=kvp, attn_tp_size=kvp, **(parts | usual | fields))


def prompts(*, cp: int = 8, layers: tuple[int, ...] = (4, 5, 5, 5, 5, 5, 5, 4), **fields: Any) -> InstanceSpec:
    parts: dict[str, Any] = {"ep_size": cp, "lmhead_tp_size": cp, "ngram_embed_tp_size": cp, "num_draft_tokens": 3}
    return spec("prefill", layers=layers, cp_size=cp, **(parts | fields))


def busy(estimate: Estimate) -> float:
    return sum(part.compute_s + part.memory_s for part in estimate.parts)


def test_a_part_takes_the_longer_of_compute_and_memory() -> None:
    clock = Clock(decode(), rates=ONES, is_compiled=True)
    slow = clock.price(Piece("x", Work(bf16_flops=30, int8_ops=10, hbm_bytes=39, operators=2)))
    assert (slow.compute_s, slow.memory_s, slow.launch_s, slow.device_s) == (40, 0, 14, 54)
    read = clock.price(Piece("x", Work(bf16_flops=30, int8_ops=10, hbm_bytes=41)))
    assert (read.compute_s, read.memory_s, read.device_s) == (0, 41, 41)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (4, 2 + 3 * 10),  # all on one node
        (8, 5 + max(3 * 10, 4 * 10 / 0.5)),  # four others are on another node, at half the rate
    ],
)
def test_an_exchange_takes_the_slower_of_both_kinds_of_links(size: int, seconds: float) -> None:
    clock = Clock(spec("decode", dp_size=8, ep_size=size), rates=ONES, is_compiled=True)
    item = Exchange(part="experts", axis="ep", kind="all_gather", elements=5, width=2)
    assert clock.exchange_s(item) == seconds


def test_eager_steps_wait_for_their_launches() -> None:
    clock = Clock(decode(), rates=ONES, is_compiled=False)
    one = clock.price(Piece("x", Work(bf16_flops=15, operators=2)))
    step = clock.whole([(Estimate(parts=(one,)), 3)], [])
    assert (step.waits_s, step.seconds) == (3 * 22 - 3 * 15, 66)
    long = clock.price(Piece("x", Work(bf16_flops=90, operators=2)))
    assert clock.whole([(Estimate(parts=(long,)), 3)], []).seconds == 270


def test_experts_beside_the_rest_take_nothing_but_what_they_share() -> None:
    """Half the cores on either side: products take twice as long; bytes of memory come one after the other."""
    npu = NpuConfig(is_moe_overlapped=True)
    clock = Clock(decode(npu=npu), rates=ONES, is_compiled=True)
    layer = Layer(
        first=(Piece("attention", Work(bf16_flops=10)),),
        dense=(Piece("dense", Work(bf16_flops=20)),),
        experts=(Piece("experts", Work(hbm_bytes=30)),),
    )
    links = {"experts": Spent(part="experts", link_s=5)}
    assert clock.layer(layer, links).seconds == 10 + max(2 * 20, 30 + 5)
    read = layer._replace(dense=(Piece("dense", Work(hbm_bytes=20)),))
    assert clock.layer(read, {}).seconds == 10 + 20 + 30
    alone = Clock(decode(), rates=ONES, is_compiled=True)
    assert alone.layer(layer, links).seconds == 10 + 20 + 35


def test_the_longest_way_is_what_a_pipeline_takes() -> None:
    """Against a clock that moves every chunk as soon as it can."""
    seconds, sends = [[3.0, 1.0, 4.0], [1.0, 5.0, 9.0], [2.0, 6.0, 5.0]], [0.5, 0.25, 2.0]
    way = longest_way(seconds, sends)

    @cache
    def end(chunk: int, stage: int) -> float:
        before = end(chunk - 1, stage) if chunk else 0.0
        came = end(chunk, stage - 1) + sends[chunk] if stage else 0.0
        return max(before, came) + seconds[chunk][stage]

    took = sum(seconds[chunk][stage] for chunk, stage in way)
    took += sum(sends[chunk] for (chunk, _), (before, _) in zip(way[1:], way, strict=False) if chunk == before)
    assert took == pytest.approx(end(2, 2))
    assert (way[0], way[-1]) == ((0, 0), (2, 2))


def test_prompts_in_chunks() -> None:
    assert list(chunks_of(1, 10, size=4)) == [Chunk(1, 0, 4), Chunk(1, 4, 4), Chunk(1, 8, 2)]
    assert list(chunks_of(5, 3, size=7)) == [Chunk(2, 0, 3), Chunk(2, 0, 3), Chunk(1, 0, 3)]


def test_what_bounds_a_step_adds_up_to_it() -> None:
    step = decode_step(decode(npu=NpuConfig(is_moe_overlapped=True)), LARGE, rates=RATES, sequences=64, context=100_000)
    assert sum(seconds for _, seconds in step.causes) == pytest.approx(step.seconds)
    prompt = prefill(prompts(), LARGE, rates=RATES, prompts=1, length=100_000)
    assert sum(seconds for _, seconds in prompt.estimate.causes) == pytest.approx(prompt.estimate.seconds)
    assert prompt.busiest_s < prompt.estimate.seconds


def test_more_cards_never_compute_longer() -> None:
    steps = [
        busy(decode_step(decode(dp=2, kvp=kvp), LARGE, rates=RATES, sequences=64, context=500_000))
        for kvp in (1, 2, 4, 8, 16)
    ]
    assert steps == sorted(steps, reverse=True)
    ways = [busy(prefill(prompts(cp=cp), LARGE, rates=RATES, prompts=1, length=65536).estimate) for cp in (1, 2, 4, 8, 16)]
    assert ways == sorted(ways, reverse=True)
    assert ways[0] > 8 * ways[-1]


def test_a_longer_context_is_never_cheaper() -> None:
    for sequences in (1, 64):
        found = [
            decode_step(decode(), LARGE, rates=RATES, sequences=sequences, context=context).seconds
            for context in (100, 2048, 4096, 50_000, 1_000_000)
        ]
        assert found == sorted(found)
    lengths = (100, 2000, 16384, 16385, 70_000, 140_000)
    ways = [prefill(prompts(), LARGE, rates=RATES, prompts=1, length=length) for length in lengths]
    seconds = [way.estimate.seconds for way in ways]
    assert seconds == sorted(seconds)
    assert [way.busiest_s for way in ways] == sorted(way.busiest_s for way in ways)


def test_more_sequences_are_never_cheaper_and_never_dearer_than_steps_of_their_own() -> None:
    free = decode(buckets=(1, 2, 3, 4))
    found = [decode_step(free, LARGE, rates=RATES, sequences=count, context=8192).seconds for count in (1, 16, 17, 32, 64)]
    assert found == sorted(found)
    assert found[-1] < 4 * found[1]
    fixed = decode_step(decode(), LARGE, rates=RATES, sequences=1, context=8192).seconds
    assert found[0] < fixed  # padding is computed


def test_int8_and_drafts_show() -> None:
    floats, ints = (decode_step(decode(), model, rates=RATES, sequences=64, context=8192) for model in (FLOATS, LARGE))
    read = [next(part.memory_s for part in step.parts if part.part == "dense") for step in (floats, ints)]
    assert read[1] == pytest.approx(read[0] / 2, rel=0.1)  # but for rows
    plain = decode_step(decode(num_draft_tokens=0), LARGE, rates=RATES, sequences=64, context=8192)
    assert "drafts" in {part.part for part in ints.parts} - {part.part for part in plain.parts}
    assert plain.seconds < ints.seconds < 4 * plain.seconds


def test_a_pipeline_that_is_never_empty_takes_what_its_busiest_stage_does() -> None:
    once, often = (prefill(prompts(), LARGE, rates=RATES, prompts=count, length=20_000) for count in (1, 40))
    assert often.busiest_s == pytest.approx(40 * once.busiest_s)
    assert often.estimate.seconds == pytest.approx(often.busiest_s + once.estimate.seconds - once.busiest_s, rel=0.05)


def test_links_between_nodes_count_where_a_group_leaves_its_node() -> None:
    near, far = (replace(RATES, cards_per_node=cards, between_bytes=RATES.inside_bytes / 10) for cards in (16, 4))
    steps = [decode_step(decode(), LARGE, rates=rates, sequences=64, context=8192) for rates in (near, far)]
    links = [next(part.link_s for part in step.parts if part.part == "attention") for step in steps]
    assert links[1] > 3 * links[0]


def test_a_few_looks_at_many_chunks_come_close() -> None:
    every, few = (
        prefill(prompts(), LARGE, rates=RATES, prompts=1, length=1_000_000, most_looks=looks) for looks in (1000, 16)
    )
    assert few.busiest_s == pytest.approx(every.busiest_s, rel=0.02)
    assert every.estimate.seconds <= few.estimate.seconds < 1.4 * every.estimate.seconds  # a run fills the pipeline late
