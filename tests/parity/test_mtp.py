"""The draft layer against the oracle, and decoding with drafts against decoding without: the same ids and log-probs.

Ranks execute plans as a scheduler makes them: prompts in chunks, then windows for all that decode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine.decode_state import DecodeShape, DecodeState
from longcat_pd.engine.plan import Admit, Segment, SlotOutput, SlotSampling, StepPlan
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.engine.speculative import ModelDrafts, Seen
from longcat_pd.errors import ConfigError
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.models.batch import Rows
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.wire import pack
from tests.drafts import Listener, listening, scripted
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.parity.oracle import Oracle, read_checkpoint, some_tokens
from tests.parity.single import SingleProcess
from tests.slots import GREEDY, admit
from tests.unit.test_runner import PUSH, FakeLanes

TOPK, CHUNK, NUM_NEW = 48, 32, 14
DRAFTED = ("2.0", "lite-sparse", "chat")  # the variants with a draft layer
LENGTHS = (1, 2, 3, 7, 8, 9, TOPK - 3, TOPK - 1, TOPK, TOPK + 1, 75)


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    ids = [[draw.randrange(32, 1000) for _ in range(n)] for n in LENGTHS]
    ids[5][4] = ids[-1][40] = 2
    return ids


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # tokens of each window

    def add(self, slot: SlotOutput) -> None:
        self.ids += slot.token_ids
        self.logprobs += slot.logprobs


def samplings() -> list[SlotSampling]:
    """Half of the sequences greedy, half drawn."""
    return [replace(GREEDY, temperature=0.7 * (s % 2), top_p=0.95, seed=s, num_logprobs=1) for s in range(len(LENGTHS))]


def generate(
    runner: ModelRunner,
    num_drafts: int,
    parallel: ParallelConfig,
    num_new: int = NUM_NEW,
) -> list[Answer]:
    """All prompts; windows until everybody has ``num_new`` tokens, of which the answers keep no more."""
    pool = GroupPool(0, ParallelLayout.of(parallel).cache_shard(0).num_ranks, 128)
    room = num_new + num_drafts + 1
    answers = [Answer() for _ in LENGTHS]
    admits = tuple(
        admit(pool, slot, ids, block_size=BLOCK_SIZE, room=room, sampling=samplings()[slot])
        for slot, ids in enumerate(prompts())
    )
    step = 1
    runner.execute(StepPlan(step_id=step, phase="prefill", admit=admits))
    for start in range(0, max(LENGTHS), CHUNK):
        segments = tuple(
            Segment(slot=slot, start=start, num_tokens=min(CHUNK, n - start), is_last=start + CHUNK >= n)
            for slot, n in enumerate(LENGTHS)
            if start < n
        )
        step += 1
        for out in runner.execute(StepPlan(step_id=step, phase="prefill", segments=segments)).slots:
            answers[out.slot].add(out)
    lengths = [1] * len(answers)  # by what is true on all ranks, also those that report nothing
    while live := [slot for slot, length in enumerate(lengths) if length < num_new]:
        step += 1
        windows = tuple(Segment(slot=s, start=-1, num_tokens=1 + num_drafts, is_last=True) for s in live)
        before = {s: runner._slots[s].num_tokens for s in live}
        for out in runner.execute(StepPlan(step_id=step, phase="decode", segments=windows)).slots:
            answers[out.slot].add(out)
            answers[out.slot].runs.append(len(out.token_ids))
        for s in live:
            lengths[s] += runner._slots[s].num_tokens - before[s]
    for answer in answers:
        del answer.ids[num_new:], answer.logprobs[num_new:]
    return answers


def answers_of_rank(spec: RankSpec, mesh: Mesh, num_drafts: int, parallel: ParallelConfig) -> list[Answer]:
    runner = ModelRunner(spec, mesh)
    answers = generate(runner, num_drafts, parallel)
    runner.close()
    return answers


def alone(path: Path, num_drafts: int) -> list[Answer]:
    parallel = ParallelConfig()
    spec = rank_specs(path, parallel, num_blocks=128, num_drafts=num_drafts)[0]
    return answers_of_rank(spec, Mesh.single(), num_drafts, parallel)


def assert_same(found: Sequence[Answer], expected: Sequence[Answer], limit: float) -> None:
    for length, one, other in zip(LENGTHS, found, expected, strict=True):
        assert one.ids == other.ids, f"prompt of {length}"
        assert one.logprobs == pytest.approx(other.logprobs, abs=limit)


# -- the draft layer


class Recorder:
    """Notes the logits that drafts are chosen from."""

    def __init__(self, single: SingleProcess) -> None:
        self.rows: list[torch.Tensor] = []
        self._logits = single.model.logits

    def __call__(self, final: torch.Tensor, rows: Rows) -> torch.Tensor:
        logits = self._logits(final, rows)
        self.rows.append(logits)
        return logits.argmax(-1)


@pytest.mark.parametrize("variant", DRAFTED)
@pytest.mark.parametrize("length", [1, 2, 20, TOPK - 1, TOPK, 70])
def test_drafts_follow_the_formulas(
    tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, variant: str, length: int
) -> None:
    """The prompt's rows in chunks, then a round behind it; lengths around where a selection begins."""
    tokens = some_tokens(length + 1, seed=length)
    single = SingleProcess(tiny(variant), num_drafts=3)
    state = single.admit(tokens[:-1], room=5)
    for start in range(0, length, 16):
        single.step((state, min(16, length - start)))
    recorder = Recorder(single)
    monkeypatch.setattr(single.model, "best", recorder)
    slots = DecodeState(
        DecodeShape(num_slots=1, num_columns=20, block_size=8, num_drafts=3, ngram_order=5, hidden_size=96, vocab_size=1),
        Mesh.single().cache_shard,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        state.append(tokens[-1])
        slots.seat(0, state, single.final[-1:])
        newest = torch.tensor([length])
        seen = Seen(torch.tensor([0]), newest, slots.recent[:1], (length + 4,))
        drafts = ModelDrafts(single.model, slots)(seen)
    expected = Oracle(*read_checkpoint(tiny(variant))).draft_logits(tokens, 3)
    assert (torch.cat(recorder.rows) - expected).abs().max() < 1e-4
    assert drafts[0].tolist() == expected.argmax(-1).tolist()


# -- decoding with drafts


@pytest.mark.parametrize("variant", [*DRAFTED, "2.0+predictable", "chat+predictable"])
def test_drafts_do_not_show(tiny: MakeCheckpoint, variant: str) -> None:
    expected = alone(tiny(variant), 0)
    for num_drafts in (1, 2, 3, 5):
        assert_same(alone(tiny(variant), num_drafts), expected, 1e-6)


def test_predictable_drafts_are_mostly_right(tiny: MakeCheckpoint) -> None:
    runs = [run for answer in alone(tiny("2.0+predictable"), 3) for run in answer.runs]
    assert 2.2 < sum(runs) / len(runs) < 3.9
    assert set(runs) == {1, 2, 3, 4}


@pytest.mark.parametrize("kvp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_draft_and_accept_like_one(tiny: MakeCheckpoint, kvp: int) -> None:
    path, parallel = tiny("2.0+predictable"), ParallelConfig(kvp_size=kvp, attn_tp_size=kvp)
    expected = alone(path, 3)
    specs = rank_specs(path, parallel, num_blocks=128, num_drafts=3)
    found = on_ranks(specs, answers_of_rank, 3, parallel)[0]
    assert_same(found, expected, 1e-4)
    assert [answer.runs for answer in found] == [answer.runs for answer in expected]


# -- scripted drafts


def with_drafts(spec: RankSpec, num_drafts: int) -> RankSpec:
    engine = replace(spec.instance.engine, num_draft_tokens=num_drafts)
    return replace(spec, instance=replace(spec.instance, engine=engine))


def whole(truth: Sequence[Answer]) -> list[list[int]]:
    return [prompt + answer.ids for prompt, answer in zip(prompts(), truth, strict=True)]


@pytest.mark.parametrize("variant", ["2.0", "lite"])
@pytest.mark.parametrize("pattern", [(0,), (1,), (2,), (3,), (0, 3, 1, 2), (3, 0, 2, 2, 1)])
def test_every_pattern_of_acceptance(tiny: MakeCheckpoint, variant: str, pattern: tuple[int, ...]) -> None:
    """Rejected drafts leave nothing behind: neither in the cache nor in the n-gram windows."""
    parallel = ParallelConfig()
    truth = alone(tiny(variant), 0)
    spec = rank_specs(tiny(variant), parallel, num_blocks=128, num_drafts=3)[0]
    loaded = replace(load_rank_model(with_drafts(spec, 0), Mesh.single()), has_draft=False)
    runner = ModelRunner(spec, Mesh.single(), loaded=loaded, make_drafts=scripted(whole(truth), pattern))
    found = generate(runner, 3, parallel)
    assert_same(found, truth, 1e-6)
    for answer in found:
        assert answer.runs[:-1] == [1 + pattern[i % len(pattern)] for i in range(len(answer.runs) - 1)]


def test_drafts_follow_the_formulas_after_every_run(tiny: MakeCheckpoint) -> None:
    """What the layer has cached for drafts is replaced by what is certain, across the length where selection begins."""
    slot, path, parallel = LENGTHS.index(TOPK - 3), tiny("2.0"), ParallelConfig()
    truth, oracle, heard = alone(path, 0), Oracle(*read_checkpoint(path)), list[Listener]()
    make = listening(ModelDrafts, heard, scripted(whole(truth), (3, 1, 0, 2)))
    runner = ModelRunner(rank_specs(path, parallel, num_blocks=128, num_drafts=3)[0], Mesh.single(), make_drafts=make)
    generate(runner, 3, parallel)
    rounds = [(known, drafts) for place, known, drafts in heard[0].heard if place == slot]
    assert [known - (TOPK - 3) for known, _ in rounds] == [1, 5, 7, 8, 11]
    for known, drafts in rounds:
        assert drafts == oracle.draft_logits(whole(truth)[slot][:known], 3).argmax(-1).tolist(), known


# -- the hand-over of what drafts start from


def windows_of(runner: ModelRunner, heard: Listener, begin: int, there: Admit | None) -> tuple[list[list[int]], list[int]]:
    """The drafts of ten steps of slot 0, and how many tokens each brought; then the slot is free."""
    runs = []
    for step in range(10):
        admits = (there,) if there is not None and step == 0 else ()
        windows = (Segment(slot=0, start=-1, num_tokens=4, is_last=True),)
        plan = StepPlan(step_id=begin + step, phase="decode", admit=admits, segments=windows)
        runs.append(len(runner.execute(plan).slots[0].token_ids))
    runner.execute(StepPlan(step_id=begin + 10, phase="decode", retire=(0,)))
    return [drafts for _, _, drafts in heard.heard], runs


def drafts_of(path: Path, ids: list[int], *, withheld: str | None, is_alone: bool) -> tuple[list[list[int]], list[int]]:
    """Behind the prompt ``ids``: on the engine that computed it, or on another that got its cache and its draft state.

    ``withheld``: what does not travel, state or cache, as a control.
    """
    spec = rank_specs(path, ParallelConfig(), num_blocks=128, num_drafts=3)[0]
    heard = list[Listener]()
    make = listening(ModelDrafts, heard)
    source = ModelRunner(spec, Mesh.single(), push=FakeLanes([]), make_drafts=make)
    push = None if is_alone else PUSH
    here = admit(GroupPool(0, 1, 128), 0, ids, block_size=BLOCK_SIZE, room=50, push=push)
    whole = (Segment(slot=0, start=0, num_tokens=len(ids), is_last=True),)
    (first,) = source.execute(StepPlan(step_id=1, phase="prefill", admit=(here,), segments=whole)).slots
    if is_alone:
        return windows_of(source, heard[0], 2, None)
    target = ModelRunner(spec, Mesh.single(), arrival=FakeLanes([]), make_drafts=make)
    state = first.draft_state
    assert state is not None
    if withheld == "state":
        state = replace(state, hidden=bytes(len(state.hidden)))
    for entry in source.cache.spec.entries:
        is_lost = withheld == "cache" and entry.layer == 3
        target.cache.tensor(entry.name).copy_(source.cache.tensor(entry.name) * (not is_lost))
    known = pack([*ids, *first.token_ids])
    there = replace(here, token_ids=known, num_computed=len(ids), push=None, arrival="t", draft_state=state)
    return windows_of(target, heard[1], 1, there)


@pytest.mark.parametrize("variant", ["2.0", "2.0+predictable", "chat"])
def test_drafts_behind_a_hand_over_are_those_of_one_engine(tiny: MakeCheckpoint, variant: str) -> None:
    for ids in (prompts()[2], prompts()[-1]):
        expected = drafts_of(tiny(variant), ids, withheld=None, is_alone=True)
        assert drafts_of(tiny(variant), ids, withheld=None, is_alone=False) == expected
        if variant == "2.0":
            for withheld in ("state", "cache"):
                drafts, _ = drafts_of(tiny(variant), ids, withheld=withheld, is_alone=False)
                assert drafts[0] != expected[0][0], withheld


def test_a_checkpoint_without_the_draft_layer_is_refused(tiny: MakeCheckpoint) -> None:
    spec = rank_specs(tiny("lite"), ParallelConfig(), num_drafts=1)[0]
    with pytest.raises(ConfigError, match=r"missing: model\.mtp\.layers\.0\.eh_proj\.weight"):
        ModelRunner(spec, Mesh.single())
