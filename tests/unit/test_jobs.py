"""Records between the verbs and their agents, and how an agent waits for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from longcat_pd.cluster import jobs
from longcat_pd.cluster.jobs import Event, Found, Gone, Job, LineBuffer, Order, Orders, Stopped, as_line
from longcat_pd.config.checks import PortUse
from longcat_pd.config.services import Service
from longcat_pd.wire import MalformedRecord, from_json

JOB = Job(
    config="/c.yaml",
    text='{"model": {}}',
    folder="/run",
    logs="/logs",
    url="http://h:1",
    nodes=("10.0.0.1",),
    services=(
        Service(
            name="d0", kind="driver", node="10.0.0.1", arguments=("-m", "x"), url="http://h:2", key="k", env={"A": "b"}
        ),
    ),
    ports=(PortUse("10.0.0.1", 31000, "d0 HTTP", "decode.instances[0].http_port", "10.0.0.1"),),
    setup_files=("/set_env.sh",),
    drain_s=3.5,
)


@pytest.fixture
def pipe() -> Iterator[tuple[Orders, int]]:
    read, write = os.pipe()
    yield Orders(read), write
    os.close(read)
    with contextlib.suppress(OSError):
        os.close(write)


def test_records_survive_the_way(pipe: tuple[Orders, int]) -> None:
    orders, write = pipe
    order = Order(verb="end", group="driver", within_s=2.5)
    os.write(write, as_line(JOB) + as_line(order))
    assert orders.job() == JOB
    assert orders.next(5.0) == order
    event = Event(found=Found(is_recorded=True, alive=("d0 (pid 3)",), findings=("行\n",)))
    line = as_line(event)
    assert line.count(b"\n") == 1
    assert from_json(Event, line) == event
    stopped = Event(stopped=Stopped(num_killed=2, late=("p0",), findings=()))
    assert from_json(Event, as_line(stopped)) == stopped


def test_signs_of_life_are_no_orders_and_waiting_ends(pipe: tuple[Orders, int]) -> None:
    orders, write = pipe
    os.write(write, as_line(Order(verb="still")))
    assert orders.next(0.05) is None
    os.write(write, as_line(Order(verb="still")) + as_line(Order(verb="go"))[:5])
    assert orders.next(0.05) is None, "half an order is none"
    os.write(write, as_line(Order(verb="go"))[5:])
    assert orders.next(5.0) == Order(verb="go")


def test_a_closed_stream_is_the_end_after_what_was_said(pipe: tuple[Orders, int]) -> None:
    orders, write = pipe
    os.write(write, as_line(Order(verb="keep")))
    os.close(write)
    assert orders.next(5.0) == Order(verb="keep")
    with pytest.raises(Gone):
        orders.next(5.0)


def test_silence_is_the_end_too(pipe: tuple[Orders, int], monkeypatch: pytest.MonkeyPatch) -> None:
    orders, _ = pipe
    monkeypatch.setattr(jobs, "SILENCE_S", 0.1)
    with pytest.raises(Gone):
        orders.next(60.0)


def test_what_is_no_record_is_said(pipe: tuple[Orders, int]) -> None:
    orders, write = pipe
    os.write(write, b'{"folder": 3}\n{"verb": "explode"}\n')
    with pytest.raises(MalformedRecord):
        orders.job()
    with pytest.raises(MalformedRecord):
        orders.next(5.0)


def test_lines_come_whole() -> None:
    lines = LineBuffer()
    lines.add(b"a\nb")
    assert (lines.take(), lines.take()) == (b"a\n", b"")
    lines.add(b"c\n")
    assert lines.take() == b"bc\n"
