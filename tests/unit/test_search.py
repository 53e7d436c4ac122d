"""Layouts that are found, against a twin that tries everything, and against all ranks' memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import complete, load
from longcat_pd.config.schema import ClusterConfig, ParallelConfig, PoolConfig
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.candidates import Asked, candidates, completed
from longcat_pd.sizing.cards import CARDS
from longcat_pd.sizing.memory import GIB, instance_memory, stage_memory
from longcat_pd.sizing.rates import rates_of
from longcat_pd.sizing.roofline import decode_step
from longcat_pd.sizing.search import Question, Search, Target, largest, spec_of, splits
from longcat_pd.tiny.configs import make_config

CLUSTERS = Path(__file__).parents[2] / "deploy" / "config" / "cluster"
ASKED = Asked(context=8192, sequences=8)
LARGE_FIELDS = ["hidden_size=1536", "num_attention_heads=16", "ffn_hidden_size=4096", "n_routed_experts=24"]


@pytest.fixture
def base(tmp_path: Path) -> ClusterConfig:
    """Four cards a node, one node a pool, and a model whose best layout is not plain to see."""
    fields = [*LARGE_FIELDS, "expert_ffn_hidden_size=512", "kv_lora_rank=512", "qk_rope_head_dim=64", "index_head_dim=64"]
    config = make_config("2.0", fields, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = "{max_model_len: 8192, max_num_seqs: 8, num_blocks: 1000}"
    text = f"""
model: {{path: {tmp_path}}}
cluster_key_file: /etc/longcat_pd/cluster.key
device: npu
devices_per_node: 4
prefill: {{parallel: {{pp_size: 1, cp_size: 4}}, engine: {engine}, instances: [{{name: p, http_port: 30000, nodes: [a]}}]}}
decode:
  parallel: {{dp_size: 4}}
  engine: {engine}
  instances: [{{name: d, http_port: 31000, nodes: [b]}}]
"""
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load(path)


def search(base: ClusterConfig, *, target: Target = "decode-ms", usable: int = 64 * GIB) -> Search:
    question = Question(target=target, asked=ASKED, answer=1024, usable_bytes=usable, host_bytes=1 << 60)
    rates = rates_of(CARDS["A2"], cards_per_node=base.devices_per_node)
    return Search(base, ModelConfig.load(base.model.path), rates=rates, question=question)


def every_decode_pool(base: ClusterConfig) -> Iterator[PoolConfig]:
    """Whatever passes the rules of a whole cluster, all sizes tried."""
    assert base.decode is not None
    sizes = (1, 2, 4)
    for dp, kvp, dense, ep in product(sizes, repeat=4):
        for dispatch in ("gather", "all_to_all") if ep > 1 else ("gather",):
            parallel = ParallelConfig(
                dp_size=dp,
                kvp_size=kvp,
                attn_tp_size=kvp,
                dense_tp_size=dense,
                ep_size=ep,
                ngram_embed_tp_size=4,
                moe_dispatch=dispatch,
                layers_per_stage=(3,),
            )
            pool = completed("decode", parallel, base, asked=ASKED)
            try:
                complete(replace(base, decode=pool), Findings())
            except ConfigError:
                continue
            yield pool


@pytest.mark.parametrize("is_short", [False, True], ids=["all fit", "the fastest does not fit"])
def test_the_best_is_what_trying_everything_finds(base: ClusterConfig, is_short: bool) -> None:
    model, rates = ModelConfig.load(base.model.path), rates_of(CARDS["A2"], cards_per_node=4)
    tried = []
    for pool in every_decode_pool(base):
        spec = spec_of(base, "decode", pool)
        need = max(rank.total_bytes for rank in instance_memory(spec, model, num_lanes=4))
        step = decode_step(spec, model, rates=rates, sequences=ASKED.sequences, context=ASKED.context)
        tried.append((step.seconds, need, pool))
    assert len(tried) > 20
    fastest = min(tried, key=lambda item: item[0])
    usable = fastest[1] - 1 if is_short else max(need for _, need, _ in tried)
    best = min((item for item in tried if item[1] <= usable), key=lambda item: item[0])
    found = search(base, usable=usable).answers("decode", 4, lanes=4)
    assert found[0].estimate.seconds == pytest.approx(best[0])
    assert found[0].pool.parallel == best[2].parallel
    assert (best[2] != fastest[2]) == is_short
    assert [answer.score for answer in found] == sorted(answer.score for answer in found)
    assert len({answer.tiling for answer in found}) == len(found)


def test_the_same_question_has_the_same_answer(base: ClusterConfig) -> None:
    twice = [search(base, target="tokens-per-s").answers("prefill", 4, lanes=4) for _ in range(2)]
    assert twice[0] == twice[1]
    assert {answer.tiling[:2] for answer in twice[0]} == {(1, 4), (2, 2)}  # three layers do not make four stages


def test_nothing_fits_in_no_memory(base: ClusterConfig) -> None:
    assert search(base, usable=1 << 20).answers("decode", 4, lanes=4) == ()


def test_the_longest_context_is_the_last_that_fits(base: ClusterConfig) -> None:
    assert base.decode is not None
    long = replace(base.decode.engine, max_model_len=1 << 20)
    looked = search(replace(base, decode=replace(base.decode, engine=long)), target="context", usable=4 * GIB)
    answer = looked.answers("decode", 4, lanes=4)[0]
    model = ModelConfig.load(base.model.path)
    needs = []
    for context in (answer.context, answer.context + 1024):
        pool = completed("decode", answer.pool.parallel, base, asked=replace(ASKED, context=context))
        ranks = instance_memory(spec_of(base, "decode", pool), model, num_lanes=4)
        needs.append(max(rank.total_bytes for rank in ranks))
    assert needs[0] <= 4 * GIB < needs[1]


@pytest.mark.parametrize("name", ["longcat2-a2-192", "lite-sparse-a2-twin"])
def test_no_rank_needs_more_than_the_first_of_its_stage(name: str) -> None:
    base = load(CLUSTERS / f"{name}.yaml")
    model = ModelConfig.load(base.model.path)
    assert base.prefill is not None
    spec = spec_of(base, "prefill", base.prefill)
    first, every = stage_memory(spec, model), instance_memory(spec, model)
    for stage, memory in enumerate(first):
        ranks = every[stage * spec.parallel.stage_size : (stage + 1) * spec.parallel.stage_size]
        assert memory == ranks[0]
        assert memory.total_bytes == max(rank.total_bytes for rank in ranks)


def test_the_published_grids_are_among_the_best_for_192_cards() -> None:
    base = load(CLUSTERS / "longcat2-a2-192.yaml")
    question = Question(
        target="tokens-per-s",
        asked=Asked(context=66560, sequences=64),
        answer=1024,
        usable_bytes=60 * GIB,
        host_bytes=1024 * GIB,
    )
    rates = rates_of(CARDS["A2"], cards_per_node=16)
    looked = Search(base, ModelConfig.load(base.model.path), rates=rates, question=question)
    prefills, decodes = looked.answers("prefill", 64, lanes=128), looked.answers("decode", 128, lanes=64)
    assert (8, 8) in [answer.tiling[:2] for answer in prefills[:2]]
    assert (16, 8) in [answer.tiling[2:] for answer in decodes[:3]]
    own = looked.own("prefill")
    assert looked.fits(own)  # 252 GiB of its tables are on the host
    small = Search(base, ModelConfig.load(base.model.path), rates=rates, question=replace(question, host_bytes=200 * GIB))
    assert not small.fits(own)


def test_a_pool_is_judged_beside_the_other_as_it_is() -> None:
    """What the section of NPU says of the decode pool's way to experts is no finding against prefill pools."""
    base = load(CLUSTERS / "longcat2-a3-192.yaml")
    model = ModelConfig.load(base.model.path)
    found = list(candidates("prefill", base, cards=64, asked=ASKED, model=model))
    assert base.prefill is not None
    assert base.prefill.parallel in [pool.parallel for pool in found]


def test_splits_are_whole_nodes_and_few() -> None:
    assert list(splits(64, 16)) == [(16, 48), (32, 32), (48, 16)]
    assert list(splits(8, 8)) == [(4, 4)]
    many = list(splits(16 * 100, 16))
    assert len(many) <= 12
    assert all(first % 16 == 0 and first + second == 1600 for first, second in many)


@pytest.mark.parametrize("limit", [0, 1023, 1024, 5000, 1 << 19, 1 << 30])
def test_the_largest_that_holds(limit: int) -> None:
    assert largest(lambda number: number <= limit, start=8192, most=1 << 24) == min(limit, 1 << 24) // 1024 * 1024
