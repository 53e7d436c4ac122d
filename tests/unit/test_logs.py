"""``run_pd.sh logs``: which lines are told, and in which order."""

# ruff: noqa: E501 - tables

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longcat_pd.cluster import agent_logs, logs
from longcat_pd.cluster.jobs import Event, Gone, Job, LogLine, LogPart, LogQuery
from longcat_pd.cluster.log_order import HOLD_S, Held, Past
from longcat_pd.cluster.processes import Process
from longcat_pd.cluster.record import RunFolder, State
from longcat_pd.cluster.telling import EXIT_NOT_RUNNING
from longcat_pd.config.services import Service
from longcat_pd.errors import ConfigError
from longcat_pd.log import as_written

SERVICES = ("p0", "balancer", "d0")
P0 = """before any time
2026-11-30T10:00:00.000Z info starting role=prefill
p0: one rank on cpu
2026-11-30T10:00:01.000Z info request_finished output=1 request=r1
2026-11-30T10:00:03.000Z error engine_fault reason="said request=r2 once" request=r3
Traceback (most recent call last):
  boom
2026-11-30T10:00:04.000Z warning transfer_aborted transfer=t request=r1
2026-11-30T10:00:05.000Z info weights_loaded bytes=7
Traceback (most recent call last):
  of a process that died
2026-11-30T10:00:06.000Z debug rank_memory rank=0
half a li"""
BALANCER = """2026-11-30T10:00:00.500Z info starting role=load_balancer
2026-11-30T10:00:02.000Z warning retry request=r1
2026-11-30T10:00:02.000Z info request_finished request=r1
2026-11-30T10:00:03.500Z info request_finished request=r1.2
"""


class Rig:
    """An agent that answers from two logs of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("p0", P0)
        self.write("balancer", BALANCER)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.log").write_text(text)

    def says(self, *looks: Callable[[], object], **query: Any) -> list[LogPart]:
        """What the agent says. ``looks``: what is done before each look that it takes later."""
        waiting, found = list(looks), list[LogPart]()

        class FakeOrders:
            def next(self, timeout_s: float) -> None:
                if not waiting:
                    raise Gone
                waiting.pop(0)()

        def say(event: Event) -> None:
            assert event.part is not None
            found.append(event.part)

        job = Job(
            config="", text="", folder=str(self.folder / "run"), logs=str(self.folder), url="", nodes=(), ports=(),
            services=tuple(Service(name=name, kind="driver", node="", arguments=(), url="", key="") for name in SERVICES),
            query=LogQuery(is_followed=bool(looks), **query),
        )  # fmt: skip
        agent_logs.logs(job, FakeOrders(), say)
        return found

    def texts(self, **query: Any) -> list[str]:
        return [line.text for part in self.says(**query) for line in part.lines]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_all_logs_of_a_machine_are_one_in_the_order_of_time(rig):
    first, *parts, last = rig.says()
    assert (first.lines, first.num_logs, first.is_live, last.is_live) == ((), 2, False, True)
    told = [
        (line.service, line.text[11:19] if line.text[:4] == "2026" else line.text) for part in parts for line in part.lines
    ]
    assert told == [
        ("p0", "before any time"),
        ("p0", "10:00:00"),
        ("p0", "p0: one rank on cpu"),
        ("balancer", "10:00:00"),
        ("p0", "10:00:01"),
        ("balancer", "10:00:02"),
        ("balancer", "10:00:02"),
        ("p0", "10:00:03"),
        ("p0", "Traceback (most recent call last):"),
        ("p0", "  boom"),
        ("balancer", "10:00:03"),
        ("p0", "10:00:04"),
        ("p0", "10:00:05"),
        ("p0", "Traceback (most recent call last):"),
        ("p0", "  of a process that died"),
        ("p0", "10:00:06"),
    ], "and a line that is not whole yet is not told"


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"lines": 1}, ["rank_memory", "request_finished r1.2"]),
        ({"lines": 0}, []),
        ({"request": "r1"}, ["request_finished r1", "retry r1", "request_finished r1", "transfer_aborted r1"]),
        ({"request": "r1", "lines": 1}, ["request_finished r1", "transfer_aborted r1"]),
        ({"request": "r3"}, ["engine_fault r3", "Traceback", "boom"]),
        ({"request": "r"}, []),
        ({"request": ".1"}, []),
        ({"level": "warning"}, ["retry r1", "engine_fault r3", "Traceback", "boom", "transfer_aborted r1", "Traceback", "of"]),
        ({"level": "error", "since": "2026-11-30T10:00:04.000Z"}, ["Traceback", "of"]),
        ({"since": "2026-11-30T10:00:05.000Z"}, ["weights_loaded", "Traceback", "of", "rank_memory"]),
        ({"since": "2026-11-30T10:00:04.000Z", "request": "r1"}, ["transfer_aborted r1"]),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_told_and_nothing_else(rig, query, told):
    def short(text: str) -> str:
        words = text.split()
        request = [word.removeprefix("request=") for word in words if word.startswith("request=r")]
        return " ".join([words[2], *request[-1:]]) if text.startswith("2026") else words[0]

    assert sorted(map(short, rig.texts(**query))) == sorted(told)


def test_what_is_added_is_told_once_also_by_a_log_that_comes_later_or_begins_anew(rig):
    log = rig.folder / "p0.log"

    def line(second: int) -> str:
        return f"2026-11-30T10:00:{second}.000Z info x"

    def begin_anew() -> None:
        with log.open("a") as file:
            file.write(f"{line(19)}\n")
        log.replace(f"{log}.1")
        rig.write("p0", f"{line(20)}\n")

    parts = rig.says(
        lambda: log.write_text(P0 + "ne\n"),  # of the same file, which is longer now
        lambda: None,
        lambda: rig.write("d0", f"{line(10)}\n"),
        begin_anew,
    )
    live = [[line.text for line in part.lines] for part in parts if part.is_live and part.lines]
    assert live == [["half a line"], [line(10)], [line(19), line(20)]]
    assert parts[-1].num_logs == 3


def test_another_fact_whose_name_ends_alike_is_not_the_request(rig):
    rig.write("p0", "2026-11-30T10:00:00.000Z info x old_request=r9\n2026-11-30T10:00:01.000Z info y request=r9\n")
    assert [text[25:31] for text in rig.texts(request="r9")] == ["info y"]


def test_a_log_that_was_cut_short_in_place_is_read_from_its_start(rig):
    """As by a rotation that copies and empties the file."""
    log = rig.folder / "p0.log"
    parts = rig.says(lambda: log.write_text("2026-11-30T10:00:30.000Z info new\n"))
    assert [line.text[-3:] for part in parts if part.is_live for line in part.lines] == ["new"]


def test_a_time_that_goes_back_within_a_log_does_not_part_what_it_says(rig):
    rig.write("p0", "".join(f"2026-11-30T10:00:{second:02}.000Z info x\n" for second in (5, 1, 6)))
    rig.write("balancer", "2026-11-30T10:00:03.000Z info y\n")
    assert [text[17:19] for text in rig.texts()] == ["03", "05", "01", "06"]
    times = [line.at for part in rig.says() for line in part.lines]
    assert times == sorted(times), "so that nobody who sorts by them puts it elsewhere"


def test_logs_of_what_was_started_are_where_it_writes_and_not_where_the_file_says_now(rig):
    (rig.folder / "elsewhere.log").write_text("2026-11-30T10:00:00.000Z info here\n")
    process = Process(name="p0", pid=1, started=0, life="", log=str(rig.folder / "elsewhere.log"), ready_url="")
    state = State(config="", url="", drain_s=0.0, ports=(), processes=(process,))
    (rig.folder / "run").mkdir()
    RunFolder(rig.folder / "run").write(state)
    assert [text[-4:] for text in rig.texts()] == ["here"]


def test_parts_are_small(rig, monkeypatch):
    monkeypatch.setattr(agent_logs, "PART_BYTES", 100)
    assert len(rig.says()) > 5
    assert len(rig.texts()) == 16


def test_how_long_ago_counts_by_the_clock_of_the_machine(rig):
    now = datetime.now(timezone.utc)
    rig.write("p0", "".join(f"{as_written(now - timedelta(seconds=s))} info x s={s}\n" for s in (90, 30)))
    rig.write("balancer", "")
    assert [text[-4:] for text in rig.texts(ago_s=60.0)] == ["s=30"]


# ---------------------------------------------------------------------- order


def line(at: float, service: str = "p0") -> LogLine:
    return LogLine(service=service, at=f"{at:04.1f}", text="")


def shown(lines) -> list[float]:
    return [float(line.at) for line in lines]


def test_the_past_of_several_machines_is_merged_as_far_as_it_is_known():
    past = Past(["a", "b", "c"])
    past.add("a", [line(1), line(4)])
    past.add("b", [line(2)])
    assert past.ready() == []
    past.close("c")
    assert shown(past.ready()) == [1, 2] and past.waits_for == ["a", "b"]
    past.add("b", [line(3), line(9)])
    assert shown(past.ready()) == [3, 4]
    past.close("a")
    past.add("b", [line(10)])
    assert shown(past.ready()) == [9, 10]
    past.close("b")
    assert past.ready() == [] and not past.waits_for


def test_what_comes_is_held_for_what_is_older_and_comes_later():
    held = Held()
    held.add([line(5)], now=100.0)
    held.add([line(4), line(7)], now=101.0)
    assert held.due == 100.0 + HOLD_S and held.ready(held.due - 0.1) == []
    assert shown(held.ready(held.due)) == [4, 5]
    assert shown(held.ready(101.0 + HOLD_S)) == [7] and held.due == float("inf")
    held.add([line(1, "p0"), line(1, "d0"), line(1, "d1")], now=200.0)
    assert [line.service for line in held.ready(300.0)] == ["p0", "d0", "d1"], "lines of one time keep their order"


# ---------------------------------------------------------------------- all machines


class FakeSession:
    refusal = None

    def __init__(self, name: str, *parts: LogPart, problem: str | None = None) -> None:
        self.machine = SimpleNamespace(name=name)
        self.parts = parts
        self.problem = problem


class FakeSessions:
    """Agents that have said all this, one after another, and have ended then unless ``is_silent``."""

    def __init__(self, *sessions: FakeSession, is_silent: bool = False) -> None:
        self.all = self.open = list(sessions)
        self._news = [(session, Event(part=part)) for session in sessions for part in session.parts]
        self._news += [] if is_silent else [(session, None) for session in sessions]
        self._is_silent = is_silent

    def news(self, deadline: float) -> Iterator[tuple[FakeSession, Event | None]]:
        assert self._news or self._is_silent, "all have ended: nobody is waited for"
        while self._news:
            yield self._news.pop(0)
        self.open = []


def part(*times: float, ahead_s: float = 0.0, is_live: bool = False) -> LogPart:
    lines = tuple(line(at) for at in times)
    return LogPart(lines=lines, clock_s=time.time() + ahead_s, num_logs=1, is_live=is_live)


CLUSTER = SimpleNamespace(config=SimpleNamespace(hosts=SimpleNamespace(connect_timeout_s=0.0)))


def test_clocks_that_are_apart_are_told_of_beside_the_log(capsys):
    for ahead_s, said in (
        (0.5, ""),
        (-40.0, "note: the clock of a is 40.0 s ahead of that of b; lines stand in the order"),
    ):
        sessions = FakeSessions(
            FakeSession("a", part(2, is_live=True)), FakeSession("b", part(1, ahead_s=ahead_s, is_live=True))
        )
        logs._Teller(sessions, CLUSTER).tell_past()
        found = capsys.readouterr()
        assert found.err.startswith(said) and bool(found.err) == bool(said)
        assert found.out == "p0           | \n" * 2
    logs._Teller(FakeSessions(FakeSession("a", problem="gone")), CLUSTER).tell_past()
    assert capsys.readouterr().err == "", "nobody has said what time it is"


def test_a_machine_that_does_not_answer_holds_nobody_up(capsys, monkeypatch):
    monkeypatch.setattr(logs, "ANSWER_S", 0.05)
    sessions = FakeSessions(FakeSession("a", part(1), part(is_live=True)), FakeSession("b", part()), is_silent=True)
    teller = logs._Teller(sessions, CLUSTER)
    teller.tell_past()
    assert capsys.readouterr().out.count("\n") == 1
    assert [(machine.name, problem) for machine, problem in teller.problems()] == [("b", "no answer within 0.05 s")]


def test_a_machine_whose_agent_is_gone_is_named_and_what_it_had_said_is_told(capsys):
    gone = FakeSession("b", part(1, 4), problem="the connection is lost")
    sessions = FakeSessions(gone, FakeSession("a", part(2), part(3, is_live=True)))
    teller = logs._Teller(sessions, CLUSTER)
    teller.tell_past()
    assert capsys.readouterr().out.count("\n") == 4
    assert [(machine.name, problem) for machine, problem in teller.problems()] == [("b", "the connection is lost")]
    gone.refusal = "another version"
    assert [problem for _, problem in teller.problems()] == ["another version"]


def test_what_comes_is_told_while_it_comes_and_to_the_end(capsys, monkeypatch):
    sessions = FakeSessions(FakeSession("a", part(is_live=True)))
    teller = logs._Teller(sessions, CLUSTER)
    teller.tell_past()
    (a,) = sessions.all
    seen, rounds = [], [[part(5, 4, is_live=True)], [], [part(9, 7, is_live=True)]]

    def news(deadline: float) -> Iterator[tuple[FakeSession, Event | None]]:
        seen.append(capsys.readouterr().out)
        yield from ((a, Event(part=told)) for told in rounds.pop(0))
        now[0] += 1.0
        sessions.open = [a] if rounds else []

    now = [100.0]
    monkeypatch.setattr(sessions, "news", news)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(logs, "_say_all", lambda lines: print(*shown(lines), end=" "))
    sessions.open = [a]
    teller.tell_what_comes()
    assert [text.split() for text in seen] == [[], [], ["4.0", "5.0"]], "each is held for 1.5 s, not for longer"
    assert capsys.readouterr().out.split() == ["7.0", "9.0"], "what is held when all have ended"


# ---------------------------------------------------------------------- command line


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    logs.arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ((), LogQuery(lines=20)),
        (("--follow", "--level", "error"), LogQuery(lines=20, level="error", is_followed=True)),
        (("--since", "90s"), LogQuery(ago_s=90.0)),
        (("--since", "1.5h", "--lines", "3"), LogQuery(lines=3, ago_s=5400.0)),
        (("--since", "2026-01-31T10:00"), LogQuery(since="2026-01-31T10:00:00.000Z")),
        (("--since", "2026-01-31T10:00:00+08:00"), LogQuery(since="2026-01-31T02:00:00.000Z")),
        (("--since", "2026-01-31T10:00:00Z"), LogQuery(since="2026-01-31T10:00:00.000Z")),
        (("--request", "r"), LogQuery(request="r")),
    ],
)  # fmt: skip
def test_what_an_operator_asks_for(arguments, query):
    assert logs._query(options(*arguments)) == query


def test_a_time_with_the_zone_that_logs_have_is_read_by_every_python(monkeypatch):
    class AsOfPython310(datetime):
        @classmethod
        def fromisoformat(cls, text: str) -> datetime:
            if text.endswith(("Z", "z")):
                raise ValueError(f"Invalid isoformat string: {text!r}")
            return datetime.fromisoformat(text)

    monkeypatch.setattr(logs, "datetime", AsOfPython310)
    assert logs._query(options("--since", "2026-01-31T10:00:00Z")).since == "2026-01-31T10:00:00.000Z"
    assert logs._query(options("--since", "2026-01-31T10:00:00.500Z")).since == "2026-01-31T10:00:00.500Z"


@pytest.mark.parametrize("ago", ["9000000d", "9" * 400 + "s"])
def test_since_ever_is_all_there_is(rig, ago):
    ago_s = logs._query(options("--since", ago)).ago_s
    assert rig.texts(ago_s=ago_s) == rig.texts(since="2000-01-01T00:00:00.000Z") != []


def test_a_node_that_is_none_of_the_cluster_is_refused_and_no_logs_are_no_success(monkeypatch, capsys):
    machine = SimpleNamespace(name="n1", nodes=("n1", "n2"))
    cluster = SimpleNamespace(
        name="c",
        machines=[machine],
        config=CLUSTER.config,
        agent=lambda verb: [],
        job=lambda *_: SimpleNamespace(logs="/l"),
    )
    silent = FakeSessions(FakeSession("n1", dataclasses.replace(part(is_live=True), num_logs=0)))
    monkeypatch.setattr(logs, "running_cluster_of", lambda _: cluster)
    monkeypatch.setattr(logs, "Sessions", lambda _: contextlib.nullcontext(silent))
    with pytest.raises(ConfigError, match="--node n3: not a machine of c; known: n1, n2"):
        logs.main(options("--node", "n3"))
    assert logs.main(options("--node", "n2")) == EXIT_NOT_RUNNING
    assert capsys.readouterr().out == "c has no logs in /l\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("--since", "yesterday"), ("--since", "5"), ("--since", "9999-12-31T23:59:59-14:00"), ("--lines", "-1")],
)
def test_what_cannot_be_meant_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} {value}: "):
        logs._query(options(f"{name}={value}"))
