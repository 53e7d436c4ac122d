"""What of a sequence is not cache, behind a hand-over: n-gram history, sampler, penalties, grammar; ten tokens each.

Failures of kind 27. Two runners of one rank: the second gets the first one's cache and what a commit carries. They say what
one runner says that does both, whatever the length of the prompt, and how it was cut into chunks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest

from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.plan import Admit, Segment, SlotOutput, SlotSampling, StepPlan
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.wire import pack, unpack
from tests.drafts import scripted
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, rank_specs
from tests.parity.test_edits import FIELDS
from tests.parity.test_mtp import with_drafts
from tests.slots import GREEDY, admit
from tests.unit.test_runner import PUSH, FakeLanes

NUM_NEW, EOS = 10, 2
LENGTHS = (1, 2, 3, 4, 5, 6, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 3)
PLAIN = replace(GREEDY, num_logprobs=1)
RULES = {
    "greedy": PLAIN,
    "drawn": replace(PLAIN, temperature=0.9, top_p=0.95, seed=5),
    "all": replace(PLAIN, temperature=0.9, seed=6, **FIELDS["all"]),
    "bound": replace(PLAIN, **FIELDS["bound"]),
}
PATTERN = (0, 3, 1, 2, 0)  # how many drafts of each window stand


def prompt(length: int, eos_at: int | None) -> list[int]:
    draw = random.Random(length)
    ids = [draw.randrange(98, 1000) for _ in range(length)]
    if eos_at is not None:
        ids[eos_at] = EOS
    return ids


@dataclass
class Said:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, out: SlotOutput) -> None:
        self.ids += out.token_ids
        self.logprobs += out.logprobs


class Site:
    """Two ranks with weights and cache of their own, for one sequence after the other."""

    def __init__(self, path: Path) -> None:
        self.spec = rank_specs(path, ParallelConfig(), num_blocks=16)[0]
        self.loaded = [replace(load_rank_model(self.spec, Mesh.single()), has_draft=False) for _ in range(2)]

    def runner(self, place: int, num_drafts: int, truth: Sequence[int]) -> ModelRunner:
        """``truth``: what is said without drafts, by which they are made."""
        loaded, lanes = self.loaded[place], FakeLanes([])
        for entry in loaded.cache.spec.entries:
            loaded.cache.tensor(entry.name).zero_()
        spec = with_drafts(self.spec, num_drafts)
        if not num_drafts:
            return ModelRunner(spec, Mesh.single(), loaded=loaded, push=lanes, arrival=lanes)
        make = scripted([truth], PATTERN)
        return ModelRunner(spec, Mesh.single(), loaded=loaded, push=lanes, arrival=lanes, make_drafts=make)


def decoded(runner: ModelRunner, said: Said, *, step: int, num_drafts: int, there: Admit | None) -> Said:
    """Ten tokens in all; ``there``: admitted with the first window."""
    window = Segment(slot=0, start=-1, num_tokens=1 + num_drafts, is_last=True)
    while len(said.ids) < NUM_NEW:
        admits, there = (() if there is None else (there,)), None
        (out,) = runner.execute(StepPlan(step_id=step, phase="decode", admit=admits, segments=(window,))).slots
        said.add(out)
        step += 1
    return Said(said.ids[:NUM_NEW], said.logprobs[:NUM_NEW])


def say(
    site: Site, ids: list[int], rule: SlotSampling, *, handed_over: bool, num_drafts: int = 0, truth: Sequence[int] = (),
    forgotten: int | None = None,
) -> Said:  # fmt: skip
    """``forgotten``: the place of a prompt id that the second runner is told wrongly, as a control."""
    source = site.runner(0, num_drafts, truth)
    room = NUM_NEW + 5
    here = admit(
        GroupPool(0, 1, 16), 0, ids, block_size=BLOCK_SIZE, room=room, sampling=rule, push=PUSH if handed_over else None
    )
    said, step = Said(), 0
    for start in range(0, len(ids), BLOCK_SIZE):
        size = min(BLOCK_SIZE, len(ids) - start)
        chunk = Segment(slot=0, start=start, num_tokens=size, is_last=start + size == len(ids))
        step += 1
        plan = StepPlan(step_id=step, phase="prefill", admit=(here,) if not start else (), segments=(chunk,))
        for out in source.execute(plan).slots:
            said.add(out)
    if not handed_over:
        return decoded(source, said, step=step + 1, num_drafts=num_drafts, there=None)
    target = site.runner(1, num_drafts, truth)
    for entry in source.cache.spec.entries:
        target.cache.tensor(entry.name).copy_(source.cache.tensor(entry.name))
    known = [*unpack(here.token_ids), *said.ids]
    if forgotten is not None:
        known[forgotten] += 1
    there = replace(here, token_ids=pack(known), num_computed=len(ids), push=None, arrival="t")
    return decoded(target, said, step=1, num_drafts=num_drafts, there=there)


def same(found: Said, expected: Said) -> None:
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("variant", ["2.0+predictable", pytest.param("lite", marks=pytest.mark.slow)])
def test_ten_tokens_behind_a_hand_over_are_those_of_one_engine(tiny: MakeCheckpoint, variant: str) -> None:
    site = Site(tiny(variant, with_tokenizer=True))
    for length, (name, rule) in product(LENGTHS, RULES.items()):
        if name in ("drawn", "bound") and length not in (3, BLOCK_SIZE + 1):
            continue
        ids = prompt(length, None)
        expected = say(site, ids, rule, handed_over=False)
        same(say(site, ids, rule, handed_over=True), expected)
        same(say(site, ids, rule, handed_over=True, num_drafts=3, truth=[*ids, *expected.ids]), expected)


def test_an_end_inside_a_prompt_is_handed_over_too(tiny: MakeCheckpoint) -> None:
    """N-grams do not look back beyond it."""
    site = Site(tiny("2.0+predictable", with_tokenizer=True))
    for length, behind in product((3, BLOCK_SIZE + 1), (1, 2, 3)):
        ids = prompt(length, length - behind)
        expected = say(site, ids, PLAIN, handed_over=False)
        same(say(site, ids, PLAIN, handed_over=True), expected)


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_an_id_that_was_lost_on_the_way_is_seen(tiny: MakeCheckpoint, name: str) -> None:
    """Else nothing above would prove anything: the last ids are what the next n-grams look back to."""
    site, ids = Site(tiny("2.0+predictable", with_tokenizer=True)), prompt(LENGTHS[-1], None)
    expected = say(site, ids, RULES[name], handed_over=False)
    for place in (len(ids) - 1, len(ids) - 2):
        found = say(site, ids, RULES[name], handed_over=True, forgotten=place)
        assert found.ids != expected.ids or found.logprobs != pytest.approx(expected.logprobs, abs=1e-5), place
