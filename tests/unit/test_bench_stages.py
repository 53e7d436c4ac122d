"""The path of a decode step: what is compared with what, and what happens when a stage says something else."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from longcat_pd.bench import stages
from longcat_pd.bench.driven import Driven
from longcat_pd.bench.report import BEGIN_STAGES, END
from longcat_pd.bench.servers import BenchFailed
from longcat_pd.bench.stages import STAGES, Load, Stage, replay, scaling_rows, stage_table

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
LOAD = Load(rounds=2, length=5, num_tokens=3)


class Scripted:
    """Engines whose steps take as long as they are told to, and whose texts are their prompts, or nearly."""

    def __init__(self, *step_ms: float, wrong_at: int = -1) -> None:
        self.step_s: defaultdict[int, list[float]] = defaultdict(list)
        self.asked: list[Sequence[Sequence[int]]] = []
        self._step_ms = step_ms
        self._wrong_at = wrong_at

    async def answers(self, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> list[tuple[int, ...]]:
        took = self._step_ms[len(self.asked)]
        self.asked.append(prompts)
        self.step_s[len(prompts)] += [1.0, took / 1000, 0.0]
        self.step_s[1].append(7.0)  # one sequence alone, while others were still in line
        texts = [tuple(ids[:num_tokens]) for ids in prompts]
        return [*texts[:-1], (0,)] if len(self.asked) - 1 == self._wrong_at else texts


def scripted(**engines: Scripted) -> dict[str, Driven]:
    return cast(dict[str, Driven], engines)


def test_stages_take_turns_with_the_same_prompts_and_the_first_round_warms_up() -> None:
    one, two = Scripted(90, 10, 20), Scripted(80, 5, 6)
    times = asyncio.run(replay(scripted(one=one, two=two), LOAD))
    assert times == {"one": [0.010, 0.020], "two": [0.005, 0.006]}
    assert one.asked == two.asked
    assert [[len(ids) for ids in prompts] for prompts in one.asked] == [[5, 5]] * 3
    assert len({str(prompts) for prompts in one.asked}) == 3


@pytest.mark.parametrize("round_number", [0, 2])
def test_a_stage_with_other_tokens_ends_the_bench(round_number: int) -> None:
    engines = scripted(one=Scripted(9, 9, 9), two=Scripted(9, 9, 9, wrong_at=round_number))
    with pytest.raises(BenchFailed, match="two: other tokens than the first stage"):
        asyncio.run(replay(engines, LOAD))


def test_other_tokens_are_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def measured(*_: object, **__: object) -> str:
        raise BenchFailed("compiled step: other tokens")

    monkeypatch.setattr(stages, "make_checkpoint", lambda folder, *_, **__: folder)
    monkeypatch.setattr(stages, "_measured", measured)
    assert stages.main([]) == 1
    assert "compiled step: other tokens" in capsys.readouterr().err


def test_factors_are_against_the_stage_before_and_the_first_one() -> None:
    path = [Stage(name=name, settings=(), published_ms=ms) for name, ms in (("a", 100.0), ("b", 50.0), ("c", 5.0))]
    table = stage_table(path, {"a": [0.010, 0.030], "b": [0.005, 0.015], "c": [0.001, 0.003]})
    assert table.splitlines()[2:] == [
        "| 1. a | 20.00 | 1.00 | 1.00 | 100 | 1.00 | 1.00 |",
        "| 2. b | 10.00 | 2.00 | 2.00 | 50 | 2.00 | 2.00 |",
        "| 3. c | 2.00 | 5.00 | 10.00 | 5 | 10.00 | 20.00 |",
    ]


def test_batches_are_compared_with_the_smallest() -> None:
    rows = list(scaling_rows("x", {2: [100.0, 110.0], 4: [190.0, 209.0], 8: [300.0, 330.0]}))
    assert [(row.ours, row.other, row.ratio) for row in rows] == [
        ("200", "batch 2 105", pytest.approx(1.9)),
        ("315", "batch 2 105", pytest.approx(3.0)),
    ]


def test_every_stage_has_fewer_twins_than_the_one_before_or_another_execution() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES) == 7
    twins = [len(stage.unfused) for stage in STAGES]
    assert twins == sorted(twins, reverse=True)
    assert (twins[0], twins[-1]) == (4, 0)
    assert [stage.is_compiled for stage in STAGES] == [False] * 5 + [True] * 2
    published = [stage.published_ms for stage in STAGES]
    assert published == sorted(published, reverse=True)


def test_our_page_has_a_place_for_the_stages() -> None:
    text = PAGE.read_text()
    assert text.index(BEGIN_STAGES) < text.index(END, text.index(BEGIN_STAGES))
