"""exe_mode inductor against eager: the same ids and accepted runs, log-probs within rounding; cold and from the cache.

One graph is compiled in the default suite, the one that covers most: sparse attention, n-grams, three drafts of which most
are right, rows of padding, sequences that come and go, greedy and drawn. The other variants are slow.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine import inductor
from longcat_pd.engine.plan import Segment, StepPlan
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.engine.speculative import MakeDrafts, ModelDrafts
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.quantize import quantize
from tests.compiled import Crowd, Life, Said, Work, compiled, compiler_warns, with_engine
from tests.drafts import scripted
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.slots import GREEDY, admit

pytestmark = compiler_warns

TOPK, SLOTS, NUM_BLOCKS = 48, 8, 160
LENGTHS = (1, 2, 3, 7, 8, 9, TOPK - 6, TOPK - 3, TOPK - 1, TOPK, TOPK + 1, 75)
CROWD = Crowd(at_once=SLOTS - 2, joining=3)  # two rows of padding at least
FULL = Crowd(at_once=SLOTS, joining=SLOTS)
LIMIT = 2e-5  # of log-probs in fp32: a graph adds in another order


def work() -> list[Work]:
    """Half greedy, half drawn; every second of the drawn ones with filters; some draw from other logits."""
    draw, found = random.Random(5), []
    for n, length in enumerate(LENGTHS):
        prompt = [draw.randrange(32, 1000) for _ in range(length)]
        rule = replace(GREEDY, temperature=0.8 * (n % 2), top_p=0.9, top_k=20 * (n % 4 == 1), seed=n, num_logprobs=1)
        if n % 5 == 3:
            rule = replace(
                rule, presence_penalty=1.0, repetition_penalty=1.5, logit_bias=((70, 5.0), (71, 5.0)), min_p=0.01
            )
            rule = replace(rule, frequency_penalty=0.3, min_tokens=4, ends=tuple(range(500)))
        found.append(Work(prompt, rule, num_new=9 + n % 4))
    return found


def spec_of(path: Path, num_drafts: int, parallel: ParallelConfig | None = None, rank: int = 0) -> RankSpec:
    spec = rank_specs(path, parallel or ParallelConfig(), num_blocks=NUM_BLOCKS, num_drafts=num_drafts)[rank]
    return with_engine(spec, max_num_seqs=SLOTS, max_model_len=128)


def life_of(runner: ModelRunner, spec: RankSpec, crowd: Crowd) -> list[Said]:
    drafts, ranks = spec.instance.engine.num_draft_tokens, spec.instance.parallel.kvp_size
    return Life(runner, num_drafts=drafts, num_ranks=ranks, block_size=BLOCK_SIZE).answers(work(), crowd)


def said_by(spec: RankSpec, crowd: Crowd, make_drafts: MakeDrafts = ModelDrafts) -> tuple[list[Said], ModelRunner]:
    runner = ModelRunner(spec, Mesh.single(), make_drafts=make_drafts)
    return life_of(runner, spec, crowd), runner


def num_compilations(runner: ModelRunner) -> int:
    assert runner._decoder is not None
    return runner._decoder.forms.num_compilations


def difference(found: list[Said], expected: list[Said]) -> float:
    """The largest of the log-probs; everything else is equal."""
    for length, one, other in zip(LENGTHS, found, expected, strict=True):
        assert (one.ids, one.runs) == (other.ids, other.runs), f"prompt of {length}"
    pairs = [zip(one.logprobs, other.logprobs, strict=True) for one, other in zip(found, expected, strict=True)]
    return max(abs(a - b) for pair in pairs for a, b in pair)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


# -- the one of the default suite


@dataclass(frozen=True)
class Cold:
    """A runner that compiled its step, and what was said by it and by eager ones."""

    spec: RankSpec
    folder: Path
    eager: list[Said]
    found: list[Said]
    runner: ModelRunner


@pytest.fixture(scope="module")
def cold(tiny: MakeCheckpoint, cache: Path) -> Iterator[Cold]:
    spec = spec_of(tiny("2.0+predictable"), 3)
    eager, _ = said_by(spec, CROWD)
    runner = ModelRunner(compiled(spec, cache), Mesh.single())
    assert num_compilations(runner) == 1
    before = files_of(cache)
    found = life_of(runner, spec, CROWD)
    assert num_compilations(runner) == 1 and files_of(cache) == before, "something was compiled while serving"
    yield Cold(spec, cache, eager, found, runner)


def test_a_graph_says_what_eager_mode_says(cold: Cold) -> None:
    assert difference(cold.found, cold.eager) < LIMIT
    runs = [run for said in cold.found for run in said.runs]
    assert {*runs} == {1, 2, 3, 4}


def test_a_graph_from_the_cache_is_the_same_and_compiles_nothing(cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_compile", None)
    before = files_of(cold.folder)
    spec = compiled(cold.spec, cold.folder)
    found, runner = said_by(spec, CROWD)
    assert num_compilations(runner) == 0 and files_of(cold.folder) == before
    assert found == cold.found, "to the bit"
    full, _ = said_by(spec, FULL)  # other company, no padding
    assert difference(full, cold.eager) < LIMIT


def test_padding_leaves_nothing_behind(cold: Cold) -> None:
    """A step of two: of all state and cache, what is theirs changes, the row of padding, and block 0."""
    spec = compiled(cold.spec, cold.folder)
    runner = ModelRunner(spec, Mesh.single())
    assert runner._decoder is not None
    state, pool = runner._decoder._state, GroupPool(0, 1, NUM_BLOCKS)
    some = work()[6:]
    admits = tuple(
        admit(pool, slot, one.prompt, block_size=BLOCK_SIZE, room=20, sampling=one.sampling)
        for slot, one in enumerate(some)
    )
    whole = tuple(Segment(slot=s, start=0, num_tokens=len(one.prompt), is_last=True) for s, one in enumerate(some))
    runner.execute(StepPlan(step_id=1, phase="prefill", admit=admits, segments=whole))
    windows = tuple(Segment(slot=s, start=-1, num_tokens=4, is_last=True) for s in (4, 1))
    theirs = {block for slot in (4, 1) for block in runner._slots[slot].blocks.tolist()}
    others = [block for block in range(1, NUM_BLOCKS) if block not in theirs]
    rows = [slot for slot in range(SLOTS) if slot not in (4, 1)]
    cached = {entry.name: runner.cache.tensor(entry.name) for entry in runner.cache.spec.entries}
    for step in (2, 3, 4):
        state_before = {name: buffer[rows].clone() for name, buffer in state.named_buffers() if len(buffer) == SLOTS + 1}
        cache_before = {name: tensor.clone() for name, tensor in cached.items()}
        runner.execute(StepPlan(step_id=step, phase="decode", segments=windows))
        for name, before in state_before.items():
            assert torch.equal(dict(state.named_buffers())[name][rows], before), name
        for name, tensor in cached.items():
            assert torch.equal(tensor[others], cache_before[name][others]), name
            assert not torch.equal(tensor[sorted(theirs)], cache_before[name][sorted(theirs)]), name
    assert len(state_before) == 20 and int(state.num_tokens[state.padding]) == 2
    assert not state.sampling.counts[state.padding].any()


def test_what_stands_in_the_row_of_padding_does_not_matter(cold: Cold) -> None:
    spec = compiled(cold.spec, cold.folder)
    runner = ModelRunner(spec, Mesh.single())
    assert runner._decoder is not None
    state = runner._decoder._state
    row = state.padding
    state.recent[row], state.num_tokens[row], state.num_final[row] = 999, 60, 4
    state.final[row], state.sampling.temperature[row], state.sampling.seed[row] = 1e3, 2.0, -7
    state.sampling.frequency[row], state.sampling.bias[row], state.sampling.early_until[row] = 1.0, 3.0, 1000
    for name in [entry.name for entry in runner.cache.spec.entries]:
        runner.cache.tensor(name)[0] = 1e3
    assert life_of(runner, spec, CROWD) == cold.found


# -- the other variants


SMALL = [  # what else there is in a step: no draft layer, fewer drafts, no indexer, no n-grams
    ("2.0", 0),
    ("2.0", 1),
    ("2.0", 2),
    ("lite", 0),
    ("chat+predictable", 3),
    ("lite-sparse+predictable", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "num_drafts"), SMALL)
def test_other_variants(tiny: MakeCheckpoint, cache: Path, variant: str, num_drafts: int) -> None:
    spec = spec_of(tiny(variant), num_drafts)
    eager, _ = said_by(spec, CROWD)
    found, runner = said_by(compiled(spec, cache), CROWD)
    assert difference(found, eager) < LIMIT
    assert num_compilations(runner) == 1


@pytest.mark.slow
def test_int8(tiny: MakeCheckpoint, cache: Path, tmp_path: Path) -> None:
    """What is quantised behind a sum of other bits moves by a whole step: so there are no other bits."""
    quantize(tiny("2.0+predictable"), tmp_path / "int8")
    spec = spec_of(tmp_path / "int8", 3)
    eager, _ = said_by(spec, CROWD)
    found, _ = said_by(compiled(spec, cache), CROWD)
    assert difference(found, eager) < LIMIT


def error_of(found: list[Said], exact: list[Said]) -> float:
    """The mean of the log-probs' differences, as far as texts are the same."""
    errors = []
    for one, other in zip(found, exact, strict=True):
        for mine, theirs, a, b in zip(one.ids, other.ids, one.logprobs, other.logprobs, strict=True):
            if mine != theirs:
                break
            errors.append(abs(a - b))
    assert len(errors) > sum(len(said.ids) for said in exact) / 2
    return statistics.mean(errors)


@pytest.mark.slow
def test_bfloat16(tiny: MakeCheckpoint, cache: Path) -> None:
    """A graph rounds to bfloat16 at other places than eager mode, so texts may part; it is as near to the same weights in
    fp32 as eager mode is."""
    exact = spec_of(tiny("2.0+predictable", dtype="bfloat16"), 3)
    spec = replace(exact, instance=replace(exact.instance, model=replace(exact.instance.model, dtype="bfloat16")))
    wanted, _ = said_by(exact, CROWD)
    eager, _ = said_by(spec, CROWD)
    found, _ = said_by(compiled(spec, cache), CROWD)
    of_graph, of_eager = error_of(found, wanted), error_of(eager, wanted)
    print(f"mean error of log-probs: {of_graph:.4f}, eager {of_eager:.4f}")
    assert 0 < of_graph < 1.5 * of_eager


def life_on_rank(spec: RankSpec, mesh: Mesh) -> tuple[list[Said], int]:
    runner = ModelRunner(spec, mesh)
    said = life_of(runner, spec, CROWD)
    runner.close()
    return said, num_compilations(runner)


@pytest.mark.slow
def test_ranks_of_a_group(tiny: MakeCheckpoint, cache: Path) -> None:
    """Each rank has a graph of its own, with the collectives inside; all draft and accept alike."""
    path, parallel = tiny("2.0+predictable"), ParallelConfig(kvp_size=2, attn_tp_size=2)
    alone, _ = said_by(spec_of(path, 3), CROWD)
    specs = rank_specs(path, parallel, num_blocks=NUM_BLOCKS, num_drafts=3, timeout_s=600.0)
    specs = [with_engine(spec, max_num_seqs=SLOTS, max_model_len=128) for spec in specs]
    (eager, _), _ = on_ranks(specs, life_on_rank)
    for expected_compilations in (1, 0):
        (found, first), (_, second) = on_ranks([compiled(spec, cache) for spec in specs], life_on_rank)
        assert difference(found, eager) < LIMIT
        assert difference(found, alone) < 1e-4
        assert (first, second) == (expected_compilations, expected_compilations)


PATTERNS = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (3, 3, 3, 3, 3), (0, 3, 1, 2, 3), (3, 0, 2, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["2.0", "lite"])
def test_every_pattern_of_acceptance(tiny: MakeCheckpoint, cache: Path, variant: str) -> None:
    """One graph for all patterns: they are in a buffer of the source of drafts."""
    some, crowd = work()[-SLOTS:], Crowd(at_once=SLOTS, joining=SLOTS)
    plain = spec_of(tiny(variant), 0)

    def answers(runner: ModelRunner, num_drafts: int) -> list[Said]:
        return Life(runner, num_drafts=num_drafts, num_ranks=1, block_size=BLOCK_SIZE).answers(some, crowd)

    truth = answers(ModelRunner(plain, Mesh.single()), 0)
    whole = [one.prompt + said.ids for one, said in zip(some, truth, strict=True)]
    spec = compiled(spec_of(tiny(variant), 3), cache)
    compilations = []
    for pattern in PATTERNS:
        loaded = load_rank_model(compiled(plain, cache), Mesh.single())  # without the layer, of which "lite" has none
        runner = ModelRunner(spec, Mesh.single(), loaded=loaded, make_drafts=scripted(whole, pattern))
        found = answers(runner, 3)
        compilations.append(num_compilations(runner))
        for said, expected in zip(found, truth, strict=True):
            assert said.ids == expected.ids
            assert said.logprobs == pytest.approx(expected.logprobs, abs=LIMIT)
            assert said.runs[:-1] == [1 + pattern[i % len(pattern)] for i in range(len(said.runs) - 1)]
    assert compilations == [1, 0, 0, 0, 0, 0]
