"""How far a start is: what ranks tell, what comes together of it, and what somebody sees of it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from longcat_pd.cluster.ready import start_of
from longcat_pd.models.random_weights import fill_random
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.models.weights import load_weights, write_checkpoint
from longcat_pd.progress.bars import Bars, size
from longcat_pd.progress.steps import Paced, Part, Stage, Step, heard, stages
from tests.terminal import Terminal, screen_of, terminal
from tests.unit.test_weights import CONFIG, EXPERT, FIELDS, HEAD, NORM, Receiver, contents

Told = list[tuple[Step, int, int]]


class Noting:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: Told = []

    def __call__(self, step: Step, done: int, total: int) -> None:
        self.told.append((step, done, total))


@dataclass
class Clock:
    time: float = 0.0

    def now(self) -> float:
        return self.time


def stage(step: Step, done: int, total: int, *, seconds: float = 1.0, has_ended: bool = False) -> Stage:
    return Stage(step=step, done=done, total=total, seconds=seconds, has_ended=has_ended)


# ------------------------------------------------------------------ who tells


def test_the_bytes_of_a_checkpoint_are_told_as_they_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents().items(), FIELDS, max_shard_bytes=20_000)
    noting = Noting()
    receiver = Receiver().want(NORM).want(HEAD, (slice(16, 32),)).want(EXPERT, (slice(None), slice(8, 24)))
    num_bytes = load_weights(receiver.specs, tmp_path / "c", config=CONFIG, tell=noting)
    assert noting.told[0] == ("weights", 0, num_bytes) and noting.told[-1] == ("weights", num_bytes, num_bytes)
    assert len(noting.told) == 4 and sorted(noting.told) == noting.told


def test_random_weights_are_told_too() -> None:
    noting = Noting()
    wanted = [WeightSpec("model.norm.weight", (40,), lambda _: None, (slice(10, 30),))]
    wanted += [WeightSpec("a.down_proj.weight", (6, 8), lambda _: None, (slice(0, 6, 2), slice(4, None)))]
    assert fill_random(wanted, noting) == 4 * (20 + 12)
    assert noting.told == [("weights", 0, 128), ("weights", 80, 128), ("weights", 128, 128)]
    assert wanted[1].num_wanted == torch.zeros(6, 8)[wanted[1].region].numel()


def test_what_goes_on_is_told_now_and_then_and_every_end_is() -> None:
    noting, clock = Noting(), Clock()
    paced = Paced(noting, clock.now)
    for done in range(1001):
        clock.time = done / 1000
        paced("weights", done, 1000)
    assert noting.told[0] == ("weights", 0, 1000) and noting.told[-1] == ("weights", 1000, 1000)
    assert 5 <= len(noting.told) <= 7
    paced("compile", 0, 2)
    paced("compile", 1, 2)
    paced("compile", 2, 2)
    assert noting.told[-2:] == [("compile", 0, 2), ("compile", 2, 2)]


# ------------------------------------------------------------------ what comes together


def parts(*words: tuple[Step, int, int, float]) -> dict[Step, Part]:
    known: dict[Step, Part] = {}
    for step, done, total, now in words:
        known = heard(known, step, done=done, total=total, now=now)
    return known


def test_a_step_has_ended_when_all_ranks_have_ended_it() -> None:
    first = parts(("weights", 0, 100, 1.0), ("weights", 100, 100, 3.0))
    assert stages([first.values(), ()], 9.0) == (stage("weights", 100, 200, seconds=8.0),), "the other's is an estimate"
    second = parts(("weights", 0, 300, 2.0), ("weights", 150, 300, 4.0))
    assert stages([first.values(), second.values()], 9.0) == (stage("weights", 250, 400, seconds=8.0),)
    second = heard(second, "weights", done=300, total=300, now=6.0)
    second = heard(second, "compile", done=0, total=3, now=6.5)
    assert stages([first.values(), second.values()], 9.0) == (
        stage("weights", 400, 400, seconds=5.0, has_ended=True),
        stage("compile", 0, 6, seconds=2.5),
    )
    assert stages([], 0.0) == stages([(), ()], 0.0) == ()


def test_a_stage_travels_as_json_and_nothing_else_does() -> None:
    told = stage("weights", 5, 10, seconds=1.5, has_ended=True)
    answer = {"start": [told.as_json(), {**told.as_json(), "step": "lunch"}, {**told.as_json(), "done": "5"}, 7, {}]}
    assert start_of(answer) == (told,)
    assert start_of(None) == start_of({}) == ()


# ------------------------------------------------------------------ what is seen


def test_where_there_is_no_terminal_a_step_is_two_lines() -> None:
    out = io.StringIO()
    with Bars(out) as bars:
        for done in range(0, 60, 10):
            bars.show("p0", [stage("processes", 4, 4, has_ended=True), stage("weights", done, 50)])
        bars.say(lambda: out.write("between\n") and None)
        bars.show("d0", [stage("compile", 0, 2)])
        bars.show("p0", [stage("weights", 3_500_000_000, 3_500_000_000, seconds=12.34, has_ended=True)])
        bars.show("p0", [stage("weights", 3_500_000_000, 3_500_000_000, seconds=12.34, has_ended=True)])
    assert out.getvalue().splitlines() == [
        "p0 processes: begins",
        "p0 processes: 4 processes in 1.0 s",
        "p0 weights: begins",
        "between",
        "d0 compile: begins",
        "p0 weights: 3.5 GB in 12.3 s",
    ]


@pytest.fixture
def seen() -> Iterator[Terminal]:
    """Of 60 columns and 4 rows."""
    with terminal(60, 4) as made:
        yield made


def test_in_a_terminal_one_line_moves_for_each_instance_and_none_stays_behind(seen: Terminal) -> None:
    stream = seen.stream
    clock = Clock()
    with Bars(stream, now=clock.now) as bars:
        bars.show("p0", [stage("weights", 0, 4000)])
        for done in range(0, 4000, 50):  # in four seconds
            clock.time = done / 1000
            bars.show("p0", [stage("weights", done, 4000, seconds=clock.time)])
        first = seen.seen()
        bars.show("d0", [stage("compile", 1, 4)])
        clock.time += 1.0
        bars.show("d0", [stage("compile", 1, 4)])
        bars.say(lambda: stream.write("started\n") and None)
        bars.show("p0", [stage("weights", 4000, 4000, seconds=4.0, has_ended=True)])
        moving = first + seen.seen()
    whole = moving + seen.seen()
    assert 12 <= first.count("p0 weights: [") <= 22, "five times a second at most"
    assert screen_of(first)[-2].startswith("p0 weights: [###################.]  9")
    assert screen_of(moving) == ["started", "p0 weights: 4.0 kB in 4.0 s", "", *screen_of(moving)[3:4], ""]
    assert screen_of(moving)[3].startswith("d0 compile: [#####...............]  25%  1 of 4 graphs")
    assert screen_of(whole) == ["started", "p0 weights: 4.0 kB in 4.0 s", ""]
    assert all(len(line) < 60 for line in screen_of(moving))


def test_a_line_of_somebody_else_stays(seen: Terminal) -> None:
    """As one that a rank process writes to its log, which is the same terminal."""
    stream = seen.stream
    clock = Clock()
    written = [
        f"2026-01-01T00:00:0{number}.000Z info step_compiled num_seqs={number} seconds=1 source=x" for number in range(3)
    ] + ["Killed"]
    with Bars(stream, now=clock.now) as bars:
        for number, line in enumerate(written):
            clock.time += 1.0
            bars.show("ranks", [stage("compile", number, 4, seconds=clock.time)])
            os.write(stream.fileno(), f"{line}\n".encode())
        clock.time += 1.0
        bars.show("ranks", [stage("compile", 4, 4, seconds=clock.time, has_ended=True)])
    assert seen.screen() == [*written, "ranks compile: 4 graphs in 5.0 s", ""]


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    clock = Clock()
    with Bars(Gone(), now=clock.now) as bars:
        for done in range(3):
            clock.time += 1.0
            bars.show("p0", [stage("weights", done, 4, seconds=clock.time)])


def test_a_terminal_that_is_too_small_is_not_filled(seen: Terminal) -> None:
    stream = seen.stream
    clock = Clock()
    with Bars(stream, now=clock.now) as bars:
        for number in range(5):
            clock.time += 1.0
            bars.show(f"instance-with-a-long-name-{number}", [stage("warm-up", 1, 4, seconds=1000.0)])
        shown = seen.screen()
    assert len(shown) == 4 and all(len(line) == 59 for line in shown[1:3])


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000_000_000, "2.5 TB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert size(count) == text
