"""engine/graph.py with a compiler of a few lines: sizes, padding, what is cut off and counted, what graphs depend on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from longcat_pd.config.npu_checks import GRAPHS
from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine import graph
from longcat_pd.engine.compile_cache import CacheEntry
from longcat_pd.engine.decode_state import DecodeShape
from longcat_pd.engine.decode_step import Found
from longcat_pd.engine.graph import Compiler as Record
from longcat_pd.engine.graph import StepForms
from longcat_pd.engine.step_parts import GraphLimits, StepPart
from longcat_pd.parallel.traffic import AxisTraffic, Traffic
from longcat_pd.progress.steps import Tell, untold
from tests.compiled import with_engine
from tests.parity.gloo import rank_specs

SLOTS, WINDOW, VOCAB = 16, 4, 5
SHAPE = DecodeShape(
    num_slots=SLOTS, num_columns=4, block_size=8, num_drafts=3, ngram_order=0, hidden_size=2, vocab_size=VOCAB
)


class Step(nn.Module):
    """Says the numbers of its slots. ``bound``: those with a grammar; ``asking``: those with anything."""

    def __init__(
        self, has_split_head: bool = False, bound: frozenset[int] = frozenset(), asking: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self.has_split_head = has_split_head
        self.rounds = None
        self.num_candidates: list[int] = []
        grammars = SimpleNamespace(binds=lambda slots: not bound.isdisjoint(slots))
        self.state = SimpleNamespace(
            padding=SLOTS,
            padding_length=5,
            shape=SHAPE,
            num_tokens=torch.zeros(SLOTS + 1),
            recent=torch.zeros((SLOTS + 1, 4), dtype=torch.int64),
            sampling=SimpleNamespace(grammars=grammars),
            asks=lambda slots: not (bound | asking).isdisjoint(slots),
        )
        self.calls: list[tuple[list[int], tuple[int, ...]]] = []
        self.parts: list[str] = []
        self.traffic = Traffic()

    def forward(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int = 0) -> Found:
        self.parts.append("whole")
        return self._found(slots, lengths, num_candidates)

    def plain(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int = 0) -> Found:
        self.parts.append("plain")
        return self._found(slots, lengths, num_candidates)

    def line(self, slots: Tensor, lengths: tuple[int, ...]) -> Tensor:
        self.parts.append("line")
        return slots + 100

    def masks(self, slots: Tensor, line: Tensor, *, is_any_bound: bool) -> tuple[Tensor, Tensor]:
        self.parts.append("masks of the host" if is_any_bound else "no masks")
        if not isinstance(line, FakeTensor):
            assert torch.equal(line, slots + 100)
        return slots + 200, slots > 0

    def verify(
        self,
        slots: Tensor,
        line: Tensor,
        masks: tuple[Tensor, Tensor],
        *,
        lengths: tuple[int, ...],
        num_candidates: int = 0,
    ) -> Found:
        self.parts.append("verify")
        if not isinstance(line, FakeTensor):
            assert torch.equal(line, slots + 100) and torch.equal(masks[0], slots + 200)
        return self._found(slots, lengths, num_candidates)

    def _found(self, slots: Tensor, lengths: tuple[int, ...], num_candidates: int) -> Found:
        self.traffic.began("attn_tp", "all_reduce")
        self.traffic.sent("attn_tp", 1, len(slots))
        self.num_candidates.append(num_candidates)
        self.calls.append(([] if isinstance(slots, FakeTensor) else slots.tolist(), lengths))
        rows = slots.view(-1, 1)
        return rows.expand(-1, WINDOW), slots, rows.unsqueeze(2).expand(-1, WINDOW, VOCAB).float()


class Compiler:
    """Compiles nothing; sizes in ``stored`` come from the cache."""

    def __init__(self, *stored: int) -> None:
        self.stored = stored
        self.asked: list[tuple[int, CacheEntry]] = []

    def __call__(self, part: StepPart, num_seqs: int, entry: CacheEntry) -> tuple[Callable[..., tuple[Tensor, ...]], bool]:
        self.asked.append((num_seqs, entry))

        def form(*arguments: Tensor) -> tuple[Tensor, ...]:
            assert len(arguments[0]) == num_seqs, "a graph has one size"
            found: tuple[Tensor, ...] = part(*arguments)
            return found

        return form, num_seqs not in self.stored


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[StepForms, Step]]:
    def made(
        compiler: Compiler,
        *buckets: int,
        spec: RankSpec | None = None,
        step: Step | None = None,
        is_cut: bool = False,
        tell: Tell = untold,
        **facts: str,
    ) -> tuple[StepForms, Step]:
        module = ModuleType("fake_compiler")
        module.compiled = compiler  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_compiler", module)
        monkeypatch.setattr(graph, "COMPILERS", {"inductor": Record("fake_compiler", GraphLimits(is_cut=is_cut))})
        spec = spec or rank_specs(tmp_path, ParallelConfig())[0]
        mode = "inductor" if buckets else "eager"
        spec = with_engine(spec, exe_mode=mode, buckets=buckets, compile_cache=str(tmp_path))
        step = step or Step()
        forms = StepForms(step, spec, {"model": "m", "dtype": "float32", **facts}, step.traffic, tell=tell)  # type: ignore[arg-type]
        return forms, step

    return made


Make = Callable[..., tuple[StepForms, Step]]


def test_eager_mode_takes_every_batch_as_it_is(make: Make) -> None:
    compiler = Compiler()
    forms, step = make(compiler)
    drawn, counts, logits = forms.run([3, 1, 2], (9, 8, 7), num_seqs=3)
    assert step.calls == [([3, 1, 2], (9, 8, 7))]
    assert counts.tolist() == [3, 1, 2] and drawn.shape == (3, WINDOW) and logits.shape == (3, WINDOW, VOCAB)
    assert compiler.asked == [] and forms.num_compilations == 0


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (2, 4), (3, 4), (4, 4), (5, SLOTS), (SLOTS - 1, SLOTS), (SLOTS, SLOTS)]
)
def test_a_batch_is_padded_to_the_next_size_and_the_padding_cut_off(make: Make, count: int, size: int) -> None:
    forms, step = make(Compiler(), 1, 4, SLOTS)
    slots = list(range(count))[::-1]
    drawn, counts, logits = forms.run(slots, (9,) * count, num_seqs=count)
    ((asked, lengths),) = step.calls
    assert asked == slots + [SLOTS] * (size - count) and lengths == ()
    assert counts.tolist() == slots
    assert drawn.tolist() == [[slot] * WINDOW for slot in slots]
    assert logits[:, 0, 0].tolist() == [float(slot) for slot in slots]


def test_a_group_with_fewer_takes_part_in_the_size_of_the_fullest(make: Make) -> None:
    forms, step = make(Compiler(), 1, 4, SLOTS)
    drawn, counts, logits = forms.run([2], (9,), num_seqs=3)
    assert step.calls == [([2, *[SLOTS] * 3], ())] and counts.tolist() == [2]
    drawn, counts, logits = forms.run([], (), num_seqs=SLOTS - 1)
    assert step.calls[1:] == [([SLOTS] * SLOTS, ())]
    assert (len(drawn), len(counts), len(logits)) == (0, 0, 0)
    forms, step = make(Compiler())
    drawn, counts, logits = forms.run([2], (9,), num_seqs=3)
    assert step.calls == [([2, SLOTS, SLOTS], (9, 5, 5))] and counts.tolist() == [2] and len(drawn) == len(logits) == 1
    drawn, counts, logits = forms.run([], (), num_seqs=2)
    assert step.calls[1:] == [([SLOTS, SLOTS], (5, 5))]
    assert (len(drawn), len(counts), len(logits)) == (0, 0, 0)


def test_all_sizes_are_compiled_before_the_first_step_and_none_later(make: Make) -> None:
    compiler = Compiler()
    told: list[tuple[str, int, int, int]] = []
    forms, _ = make(compiler, SLOTS, 1, 4, tell=lambda *word: told.append((*word, len(compiler.asked))))
    assert [size for size, _ in compiler.asked] == [SLOTS, 4, 1] and forms.num_compilations == 3
    assert told == [("compile", done, 3, done) for done in range(4)]
    for count in (1, 7, 2, SLOTS, 3):
        forms.run(list(range(count)), (), num_seqs=count)
    assert len(compiler.asked) == 3 and forms.num_compilations == 3


def test_what_comes_from_the_cache_is_not_counted(make: Make) -> None:
    forms, _ = make(Compiler(1, SLOTS), 1, 4, SLOTS)
    assert forms.num_compilations == 1
    forms, _ = make(Compiler(1, 4, SLOTS), 1, 4, SLOTS)
    assert forms.num_compilations == 0


def entry(make: Make, spec: RankSpec, **facts: str) -> CacheEntry:
    compiler = Compiler()
    make(compiler, SLOTS, spec=spec, **facts)
    return compiler.asked[0][1]


def test_a_graph_depends_on_everything_that_shapes_it(make: Make, tmp_path: Path) -> None:
    """Configurations have places of their own; code and libraries make a graph in its place stale."""
    specs = rank_specs(tmp_path, ParallelConfig(kvp_size=2, attn_tp_size=2))
    one = entry(make, specs[0])
    assert one.facts["num_seqs"] == str(SLOTS) and "code" in one.facts and one.facts == entry(make, specs[0]).facts
    others = [
        entry(make, specs[1]),
        entry(make, rank_specs(tmp_path, ParallelConfig())[0]),
        entry(make, specs[0], model="n"),
        entry(make, specs[0], dtype="bfloat16"),
        entry(make, with_engine(specs[0], num_blocks=9)),
        entry(make, with_engine(specs[0], unfused=("norms",))),
    ]
    places = [one.path, *(other.path for other in others)]
    assert len({*places}) == len(places)
    for other in others:
        assert other.facts != one.facts


def test_sizes_have_places_of_their_own_and_new_code_has_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    make(compiler, 1, SLOTS)
    (_, large), (_, small) = compiler.asked
    assert small.path != large.path and small.facts != large.facts
    monkeypatch.setattr(graph, "code_digest", lambda: "new")
    make(compiler, SLOTS)
    assert compiler.asked[-1][1].path == large.path
    assert compiler.asked[-1][1].facts == {**large.facts, "code": "new"}


def test_the_shape_of_the_state_is_a_fact(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = rank_specs(tmp_path, ParallelConfig())[0]
    one = entry(make, spec)
    monkeypatch.setattr(sys.modules[__name__], "SHAPE", replace(SHAPE, num_drafts=2))
    assert entry(make, spec).path != one.path


def test_a_split_head_has_one_more_form_for_those_who_take_the_best(make: Make) -> None:
    compiler = Compiler()
    forms, step = make(compiler, 4, 16, step=Step(has_split_head=True))
    assert [(num_seqs, "best" in entry.name) for num_seqs, entry in compiler.asked] == [
        (16, False),
        (16, True),
        (4, False),
        (4, True),
    ]
    assert forms.num_compilations == 4 and len({entry.name for _, entry in compiler.asked}) == 4
    for wanted in (1, 0, 64):  # of more candidates than one a graph looks at all logits
        forms.run([2], (9,), num_seqs=1, num_candidates=wanted)
    assert step.num_candidates == [1, 0, 0]
    eager, step = make(Compiler(), step=Step(has_split_head=True))
    for wanted in (1, 0, 64):
        eager.run([2], (9,), num_seqs=1, num_candidates=wanted)
    assert step.num_candidates == [1, 0, 64]


def test_a_graph_that_cannot_call_the_host_is_cut_where_somebody_asks_for_something(make: Make) -> None:
    compiler = Compiler()
    step = Step(has_split_head=True, bound=frozenset({3, 5}), asking=frozenset({4}))
    forms, _ = make(compiler, 4, is_cut=True, step=step)
    assert [entry.facts["part"] for _, entry in compiler.asked] == ["plain", "best", "line", "verify"]
    assert forms.num_compilations == 4 and len({entry.path for _, entry in compiler.asked}) == 4
    for slots, parts in (
        ([2, 1], ["plain"]),
        ([2, 5], ["line", "masks of the host", "verify"]),
        ([2, 4], ["line", "no masks", "verify"]),
    ):
        step.parts.clear()
        drawn, counts, logits = forms.run(slots, (9, 9), num_seqs=1)
        assert step.parts == parts and counts.tolist() == slots and len(drawn) == len(logits) == 2
    step.parts.clear()
    forms.run([2], (9,), num_seqs=1, num_candidates=1)
    assert step.parts == ["plain"] and step.num_candidates == [0, 0, 0, 1]


def test_eager_mode_asks_nobody_for_those_who_ask_for_nothing(make: Make) -> None:
    forms, step = make(Compiler(), step=Step(bound=frozenset({3}), asking=frozenset({4})))
    for slots in ([1], [1, 3], [4]):
        forms.run(slots, (9,) * len(slots), num_seqs=1)
    assert step.parts == ["plain", "whole", "whole"]


def test_graphs_that_cannot_count_are_counted_like_the_step_itself(make: Make, tmp_path: Path) -> None:
    class Silent(Compiler):
        def __call__(self, part: StepPart, num_seqs: int, entry: CacheEntry) -> Any:
            return lambda slots: (slots, slots, slots), True

    spec = rank_specs(tmp_path, ParallelConfig(attn_tp_size=2))[0]
    forms, step = make(Silent(), 4, 8, is_cut=True, spec=spec)
    eager, other = make(Compiler(), spec=spec)
    for traffic in (step.traffic, other.traffic):
        traffic.axes["attn_tp"], traffic.sent_to[1] = AxisTraffic(), 0
    for slots in ([3], [1, 2, 3, 4, 5], [2]):
        for some in (forms, eager):
            some.run(slots, (9,) * len(slots), num_seqs=8 if len(slots) > 4 else 4)
    assert step.traffic == other.traffic and step.traffic.axes["attn_tp"].sent_bytes == 16
    assert not any(slots for slots, _ in step.calls), "nothing was computed"


def test_a_graph_that_can_call_the_host_is_whole(make: Make) -> None:
    compiler = Compiler()
    forms, step = make(compiler, 4, step=Step(bound=frozenset({1})))
    assert [entry.facts["part"] for _, entry in compiler.asked] == ["whole"]
    forms.run([1], (9,), num_seqs=1)
    assert step.parts == ["whole"]


def test_every_mode_of_a_device_has_a_compiler() -> None:
    assert {mode for modes in GRAPHS.values() for mode in modes} == graph.COMPILERS.keys()
