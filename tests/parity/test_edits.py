"""Bias, penalties, min_tokens, min_p and grammars in the engine, against a loop that knows all ids and goes one by one.

Every field alone and all together, greedy and drawn; drafts by every pattern, of the checkpoint, and none; ranks that share
a cache and a head; a compiled graph. All of them say the same.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine import graph
from longcat_pd.engine.plan import SlotSampling
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.engine.speculative import MakeDrafts, ModelDrafts
from longcat_pd.engine.step_parts import GraphLimits
from longcat_pd.kernels.reference.sampling import keyed_uniform
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.server.text import TokenBytes
from longcat_pd.tiny.tokenizer import SPECIAL_TOKENS
from tests import plain_parts
from tests.compiled import Crowd, Life, Said, Work, compiled, compiler_warns, with_engine
from tests.drafts import scripted
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.parity.single import SingleProcess
from tests.slots import GREEDY

NUM_NEW, VARIANT, EOS = 18, "2.0+predictable", 2
ENDS = tuple(range(32, 500))
NARROW = tuple((token, 6.0) for token in range(100, 106))  # who says little else repeats itself
GRAMMAR = "start: /([a-e]{2,5}[0-9])*/"
BOUND_TO = re.compile(rb"([a-e]{2,5}[0-9])*")
BEGINNING_OF = re.compile(rb"([a-e]{2,5}[0-9])*[a-e]{0,5}")
FIELDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": tuple((token, 4.0 - token % 9) for token in range(40, 1000, 5))},
    "narrow": {"logit_bias": NARROW},
    "frequency": {"frequency_penalty": 0.8, "logit_bias": NARROW},
    "presence": {"presence_penalty": 1.5, "logit_bias": NARROW},
    "repetition": {"repetition_penalty": 1.5, "logit_bias": NARROW},
    "favoured": {"frequency_penalty": -0.3, "presence_penalty": -1.5, "repetition_penalty": 0.9, "logit_bias": NARROW},
    "early": {"min_tokens": 7, "ends": ENDS, "logit_bias": NARROW},
    "min_p": {"min_p": 0.3, "temperature": 1.0},
    "all": {
        "logit_bias": (*NARROW, (123, -100.0), (500, 1.5)),
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.4,
        "min_tokens": 5,
        "ends": ENDS,
        "min_p": 0.05,
    },
    "grammar": {"grammar": GRAMMAR},
    "bound": {
        "grammar": GRAMMAR,
        "logit_bias": ((EOS, 30.0), *((token, 3.0) for token in range(90, 1000, 7))),
        "repetition_penalty": 2.0,
        "presence_penalty": 0.3,
        "min_tokens": 9,
        "ends": (EOS,),
    },
}
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
SHOWN = {
    "bias": ("logit_bias",),
    **{name.removesuffix("_penalty"): (name,) for name in PENALTIES},
    "early": ("min_tokens",),
    "min_p": ("min_p",),
    "all": ("logit_bias", "min_tokens"),
    "grammar": ("grammar",),
    "bound": ("grammar", "min_tokens"),
}


def rules() -> list[tuple[str, SlotSampling]]:
    """Each of the fields greedy and drawn, beside rows that ask for nothing."""
    found = []
    for seed, (name, fields) in enumerate({"nothing": {}, **FIELDS}.items()):
        for temperature in (0.0, 0.9):
            rule = replace(GREEDY, temperature=temperature, seed=seed, top_p=0.98, num_logprobs=0)
            found.append((name, replace(rule, **fields)))
    return found


def work() -> list[Work]:
    """One prompt of each length for greedy and drawn; ids that will be favoured are among them."""
    draw, found = random.Random(8), []
    for number, (_, rule) in enumerate(rules()):
        some = [draw.randrange(98, 104) if n % 2 else draw.randrange(32, 1000) for n in range(1 + number)]
        found.append(Work(some, rule, NUM_NEW))
    return found


# -- the loop


def may_come(answer: list[int], path: Path) -> set[int]:
    """What the grammar allows next. Nothing of it is forced, so it cannot depend on how text is cut into tokens."""
    if EOS in answer:
        return {EOS}
    said = b"".join(texts(path)[token] for token in answer)
    found = {token for token, text in texts(path).items() if text and BEGINNING_OF.fullmatch(said + text)}
    return found | {EOS} if BOUND_TO.fullmatch(said) else found


@functools.cache
def texts(path: Path) -> dict[int, bytes]:
    """Of the tokens that are text."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    table = TokenBytes(tokenizer)
    return {token: table[token] for token in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())}


def chosen(logits: Sequence[float], prompt: list[int], answer: list[int], rule: SlotSampling, *, path: Path) -> int:
    """The next token, from the logits and all ids before it."""
    bias, counts = dict(rule.logit_bias), Counter(answer)
    allowed = may_come(answer, path) if rule.grammar else set(range(len(logits)))
    if len(answer) < rule.min_tokens:
        allowed = allowed.difference(rule.ends) or allowed
    values = []
    for token, logit in enumerate(logits):
        x = logit + bias.get(token, 0.0)
        if token in counts or token in prompt:
            x = x / rule.repetition_penalty if x > 0 else x * rule.repetition_penalty
        x -= rule.frequency_penalty * counts[token] + rule.presence_penalty * (token in counts)
        values.append(float(np.float32(x)) if token in allowed else -math.inf)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if rule.temperature == 0.0:
        return order[0]
    weights = {i: math.exp((values[i] - values[order[0]]) / rule.temperature) for i in order}
    total, before, kept = sum(weights.values()), 0.0, []
    for i in order:
        if before / total < rule.top_p and weights[i] >= rule.min_p:
            kept.append(i)
        before += weights[i]
    key = (torch.tensor([part]) for part in (rule.seed, rule.choice, len(prompt) + len(answer)))
    goal, reached = float(keyed_uniform(*key)) * sum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        reached += weights[i]
        if reached > goal:
            return i
    raise AssertionError("a number below 1 falls on some id")


@functools.cache
def truth(path: Path) -> list[list[int]]:
    """What each of ``work`` says."""
    single = SingleProcess(path)
    return [looped(single, one.prompt, one.sampling, path) for one in work()]


def looped(single: SingleProcess, prompt: list[int], rule: SlotSampling, path: Path) -> list[int]:
    """What one sequence says."""
    state, answer = single.admit(prompt, room=NUM_NEW), list[int]()
    rows = single.step((state, len(prompt)))[0]
    for _ in range(NUM_NEW):
        answer.append(chosen(rows[-1].tolist(), prompt, answer, rule, path=path))
        state.append(answer[-1])
        rows = single.step((state, 1))[0]
    return answer


# -- the engine


def spec_of(path: Path, num_drafts: int, parallel: ParallelConfig, rank: int = 0) -> RankSpec:
    spec = rank_specs(path, parallel, num_blocks=300, num_drafts=num_drafts)[rank]
    return with_engine(spec, max_num_seqs=len(work()), max_model_len=128)


def said_by(spec: RankSpec, mesh: Mesh, crowd: Crowd | None = None, make_drafts: MakeDrafts = ModelDrafts) -> list[Said]:
    drafts, parallel = spec.instance.engine.num_draft_tokens, spec.instance.parallel
    has_draft = make_drafts is ModelDrafts
    loaded = None if has_draft else replace(load_rank_model(with_engine(spec, num_draft_tokens=0), mesh), has_draft=False)
    runner = ModelRunner(spec, mesh, loaded=loaded, make_drafts=make_drafts)
    ranks = ParallelLayout.of(parallel).cache_shard(0).num_ranks
    life = Life(runner, num_drafts=drafts, num_ranks=ranks, block_size=BLOCK_SIZE)
    found = life.answers(work(), crowd or Crowd(at_once=len(work()), joining=len(work())))
    runner.close()
    return found


def said_on_rank(spec: RankSpec, mesh: Mesh, crowd: Crowd) -> list[list[int]]:
    return [one.ids for one in said_by(spec, mesh, crowd)]


def check(found: Sequence[Said], path: Path) -> None:
    for (name, rule), one, ids in zip(rules(), found, truth(path), strict=True):
        assert one.ids == ids, (name, rule.temperature)


def test_the_loop_is_changed_by_every_field(tiny: MakeCheckpoint) -> None:
    """Else nothing below would prove anything."""
    single, path = SingleProcess(tiny(VARIANT, with_tokenizer=True), num_blocks=1000), tiny(VARIANT, with_tokenizer=True)
    missed = []
    for (name, rule), one, ids in zip(rules(), work(), truth(path), strict=True):
        if name == "early":
            assert not set(ids[:7]) & set(ENDS) and set(ids) & set(ENDS)
        for field in SHOWN.get(name, ()):
            without = replace(rule, **{field: getattr(GREEDY, field)})
            is_moot = field == "min_p" and rule.temperature == 0.0
            if (looped(single, one.prompt, without, path) == ids) != is_moot:
                missed.append((name, field, rule.temperature))
    assert not missed


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_an_engine_says_what_the_loop_says(tiny: MakeCheckpoint, num_drafts: int) -> None:
    spec = spec_of(tiny(VARIANT, with_tokenizer=True), num_drafts, ParallelConfig())
    found = said_by(spec, Mesh.single())
    check(found, tiny(VARIANT, with_tokenizer=True))
    if num_drafts == 3:
        assert {run for one in found for run in one.runs} == {1, 2, 3, 4}


def test_company_and_former_tenants_do_not_matter(tiny: MakeCheckpoint) -> None:
    check(
        said_by(
            spec_of(tiny(VARIANT, with_tokenizer=True), 3, ParallelConfig()), Mesh.single(), Crowd(at_once=3, joining=2)
        ),
        tiny(VARIANT, with_tokenizer=True),
    )


@pytest.mark.parametrize("pattern", [(0,), (1,), (2,), (3,), (0, 3, 1, 2), (3, 0, 2, 2, 1)])
def test_rejected_drafts_leave_no_trace(tiny: MakeCheckpoint, pattern: tuple[int, ...]) -> None:
    path = tiny(VARIANT, with_tokenizer=True)
    whole = [one.prompt + ids for one, ids in zip(work(), truth(path), strict=True)]
    found = said_by(spec_of(path, 3, ParallelConfig()), Mesh.single(), make_drafts=scripted(whole, pattern))
    check(found, path)
    for one in found:
        assert one.runs[:-1] == [1 + pattern[i % len(pattern)] for i in range(len(one.runs) - 1)]


def test_logprobs_are_those_of_the_models_own_logits(tiny: MakeCheckpoint) -> None:
    path = tiny(VARIANT, with_tokenizer=True)
    single, found = SingleProcess(path), said_by(spec_of(path, 3, ParallelConfig()), Mesh.single())
    for one, said in zip(work(), found, strict=True):
        ids = one.prompt + said.ids
        rows = single.step((single.admit(ids), len(ids)))[0].log_softmax(-1)
        wanted = [float(rows[len(one.prompt) - 1 + place, token]) for place, token in enumerate(said.ids)]
        assert said.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("sizes", "num_drafts"),
    [
        ({"kvp_size": 2, "attn_tp_size": 2, "lmhead_tp_size": 2, "embed_tp_size": 2}, 3),
        ({"attn_tp_size": 2, "lmhead_tp_size": 2}, 0),
    ],
)
def test_two_ranks_say_what_the_loop_says(tiny: MakeCheckpoint, sizes: dict[str, int], num_drafts: int) -> None:
    """Once with rows that ask for nothing else gone before the others, so that candidates are looked at in between."""
    path, parallel = tiny(VARIANT, with_tokenizer=True), ParallelConfig(**sizes)
    specs = [spec_of(path, num_drafts, parallel, rank) for rank in range(2)]
    port = specs[0].rendezvous_port
    found = on_ranks([replace(spec, rendezvous_port=port) for spec in specs], said_on_rank, Crowd(at_once=4, joining=2))
    assert found[0] == truth(path)


@pytest.mark.parametrize(
    ("num_drafts", "limits", "parts"),
    [
        (0, GraphLimits(is_cut=True), {"plain", "line", "verify"}),
        (3, GraphLimits(is_cut=True), {"plain", "line", "verify"}),
        (0, GraphLimits(is_cut=True, writes_once=True), {"plain", "line", "verify"}),
        (3, GraphLimits(is_cut=True, writes_once=True), {"draft_0", "draft_1", "draft_2", "check", "verify"}),
    ],
)
def test_a_step_that_is_cut_says_what_the_loop_says(
    tiny: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
    limits: GraphLimits,
    parts: set[str],
) -> None:
    """Where no graph can call the host: in one where nobody of a batch asks for anything, else in two with the masks of
    those who are bound between them. And every draft by itself, where a graph can write to a cache only once."""
    monkeypatch.setattr(graph, "COMPILERS", {"inductor": graph.Compiler("tests.plain_parts", limits)})
    plain_parts.RUN.clear()
    path = tiny(VARIANT, with_tokenizer=True)
    spec = compiled(spec_of(path, num_drafts, ParallelConfig()), tmp_path)
    check(said_by(spec, Mesh.single(), Crowd(at_once=4, joining=2)), path)
    ran = Counter(plain_parts.RUN)
    assert {*ran} == parts and ran["line"] in (0, ran["verify"])
    assert ran["draft_0"] == ran["draft_2"] == (ran["check"] + ran["verify"] if "check" in parts else 0)


@pytest.mark.slow
@compiler_warns
def test_a_compiled_graph_says_what_the_loop_says(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    spec = compiled(spec_of(tiny(VARIANT, with_tokenizer=True), 3, ParallelConfig()), tmp_path)
    check(said_by(spec, Mesh.single()), tiny(VARIANT, with_tokenizer=True))
