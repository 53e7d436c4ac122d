import base64
import json
import struct

import pytest

from longcat_pd.errors import BadWorkerAnswer
from longcat_pd.load_balancer.events import MAX_EVENT_BYTES, Event, EventReader, Groups, Origin
from tests.balancer_rig import DONE, chunk, origin, said

STREAM = chunk("你好") + b": a comment\n\n" + b": another\n" + chunk("b") + chunk("", "stop") + DONE
EVENTS = [chunk("你好"), chunk("b"), chunk("", "stop"), DONE]


def error_body(code: str, message: str = "m") -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}}).encode()


def test_events_are_the_same_wherever_the_stream_is_cut_in_two() -> None:
    for cut in range(len(STREAM) + 1):
        reader = EventReader()
        events = reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:])
        assert [event.raw for event in events] == EVENTS, cut
        reader.end()


def test_events_are_the_same_byte_by_byte() -> None:
    reader = EventReader()
    events = [event for i in range(len(STREAM)) for event in reader.feed(STREAM[i : i + 1])]
    assert [event.raw for event in events] == EVENTS
    assert [event.finish for event in events] == [None, None, "stop", None]
    assert reader.is_over


def test_half_an_event_never_comes_out_and_the_end_is_then_an_error() -> None:
    for cut in range(len(STREAM)):
        reader = EventReader()
        complete = reader.feed(STREAM[:cut])
        assert all(event.raw in EVENTS for event in complete)
        with pytest.raises(BadWorkerAnswer):
            reader.end()


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {not json}\n\n",
        b"data: 7\n\n",
        b'data: {"neither": 1}\n\n',
        b"<html>502</html>\n\n",
        b"event: x\ndata: {}\n\n",
        b'data: {"error": "text"}\n\n',
        b'data: {"error": {"message": 1, "type": "t", "code": "c"}}\n\n',
    ],
)
def test_what_is_no_event_ends_the_good_ones_with_a_failure(bad: bytes) -> None:
    reader = EventReader()
    events = reader.feed(chunk("a") + bad + chunk("b"))
    assert [event.raw for event in events] == [chunk("a"), b""]
    failure = events[-1].failure
    assert failure is not None
    assert (failure.code, failure.status, failure.cause, failure.counts) == ("bad_worker_answer", 502, "self", True)
    assert reader.feed(chunk("c")) == []


def test_events_run_together_are_refused() -> None:
    reader = EventReader()
    events = reader.feed((chunk("a") + chunk("b")).replace(b"\n\n", b"\n") + b"\n")
    assert [event.failure.code for event in events if event.failure] == ["bad_worker_answer"]


def test_an_event_without_end_does_not_fill_the_memory() -> None:
    events = EventReader().feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))
    assert [event.failure.code for event in events if event.failure] == ["bad_worker_answer"]


def test_a_stream_of_nothing_but_its_end_is_no_answer() -> None:
    events = EventReader().feed(DONE)
    assert [event.failure.code for event in events if event.failure] == ["bad_worker_answer"]


@pytest.mark.parametrize(
    ("code", "status", "cause", "retryable", "counts"),
    [
        ("rank_lost", 500, "self", False, True),
        ("engine_fault", 500, "self", False, True),
        ("transfer_failed", 502, "self", True, True),
        ("overloaded", 503, "load", True, False),
        ("draining", 503, "load", True, False),
        ("worker_unavailable", 503, "self", True, True),
        ("deadline_exceeded", 504, "self", False, False),
        ("invented", 500, "self", False, True),
    ],
)
def test_an_error_in_a_stream_has_the_status_and_cause_of_its_code(
    code: str, status: int, cause: str, retryable: bool, counts: bool
) -> None:
    (event,) = EventReader().feed(b"data: " + error_body(code) + b"\n\n")
    assert event.failure is not None
    found = event.failure
    assert (found.status, found.cause, found.retryable, found.counts) == (status, cause, retryable, counts)
    assert found.body == error_body(code)


# ---------------------------------------------------------------------- what comments say

ORIGIN = Origin(seed=-5, created=1767225600, prompt_digest="0f" * 16)
TOLD = (
    b": keep-alive\n\n"
    + origin()
    + chunk("a")
    + b":\n: ids\n: idsAAAA\n"  # no ids, and no comment of ours
    + said(1, 2**31 - 1)
    + chunk("b")
    + said(3)
    + b"\n"
    + said(4)
    + chunk("", "stop")
    + DONE
)


def read(data: bytes, *, hears: bool = True) -> list[Event]:
    return EventReader(hears=hears).feed(data)


def test_comments_are_facts_of_the_event_behind_them_wherever_the_stream_is_cut() -> None:
    expected = [
        Event(chunk("a"), origin=ORIGIN),
        Event(chunk("b"), ids=(1, 2**31 - 1)),
        Event(b"", ids=(3,)),
        Event(chunk("", "stop"), finish="stop", ids=(4,)),
        Event(DONE, is_done=True),
    ]
    for cut in range(len(TOLD) + 1):
        reader = EventReader(hears=True)
        assert reader.feed(TOLD[:cut]) + reader.feed(TOLD[cut:]) == expected


def test_who_does_not_ask_for_ids_hears_none() -> None:
    events = read(TOLD + b": answer nonsense\n\n: ids nonsense\n\n", hears=False)
    assert [(event.raw, event.ids, event.origin) for event in events] == [
        (raw, None, None) for raw in (chunk("a"), chunk("b"), chunk("", "stop"), DONE)
    ]


def test_ids_are_little_endian_and_none_of_them_may_be_said() -> None:
    packed = base64.b64encode(struct.pack("<3i", 0, 1, 258)).decode()
    (first, second) = read(origin() + f": ids {packed}\n".encode() + chunk("a") + b": ids \n" + chunk("b"))
    assert (first.ids, second.ids) == ((0, 1, 258), ())


@pytest.mark.parametrize(
    "bad",
    [
        b": ids AAA\n",
        b": ids AAAA\n",
        b": ids AAAA-AA=\n",
        b": ids 1 AAAAAA==\n",
        said(5, -1),
        origin(),
        b": answer\n",
    ],
)
def test_malformed_comments_end_the_good_events_with_a_failure(bad: bytes) -> None:
    *good, last = read(origin() + said(1) + chunk("a") + bad + chunk("b"))
    assert [event.raw for event in good] == [chunk("a")]
    assert last.failure is not None and last.failure.code == "bad_worker_answer" and not last.failure.is_break
    (only,) = read(said(1) + chunk("a"))
    assert only.failure is not None and only.failure.code == "bad_worker_answer"


@pytest.mark.parametrize(
    ("code", "is_break", "is_death"),
    [
        ("rank_lost", True, True),
        ("engine_fault", True, True),
        ("transfer_failed", True, False),
        ("worker_unavailable", True, False),
        ("draining", True, False),
        ("overloaded", False, False),
        ("deadline_exceeded", False, False),
        ("invented", False, False),
        ("invalid_value", False, False),
    ],
)
def test_an_error_in_a_stream_may_be_mended_by_another_pair(code: str, is_break: bool, is_death: bool) -> None:
    (event,) = read(b"data: " + error_body(code) + b"\n\n")
    assert event.failure is not None
    assert (event.failure.is_break, event.failure.is_death) == (is_break, is_death)


def test_an_error_in_a_stream_has_the_headers_that_its_status_would_have() -> None:
    rows = {
        "rank_lost": {"x-should-retry": "true"},
        "engine_fault": {"x-should-retry": "false"},
        "draining": {"x-should-retry": "true", "Retry-After": "5"},
        "invented": {},
    }
    for code, headers in rows.items():
        (event,) = read(b"data: " + error_body(code) + b"\n\n")
        assert event.failure is not None and event.failure.headers == headers


# ---------------------------------------------------------------------- groups


def passed_on(groups: Groups, *data: bytes) -> list[bytes]:
    reader = EventReader(hears=True)
    return [b"".join(event.raw for event in groups.take(reader.feed(part))) for part in data]


def test_events_wait_for_their_ids_and_ids_alone_for_their_event() -> None:
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    parts = [origin() + a, said(1) + b, said(2) + b"\n", c, a, b, b": ids \n" + c]
    assert passed_on(Groups(), *parts) == [b"", a + b, b"", c, b"", b"", a + b + c]


def test_the_end_waits_for_its_last_event() -> None:
    a, end, usage = chunk("a"), chunk("", "stop"), b'data: {"choices":[]}\n\n'
    parts = [origin() + said(1) + a, a, said(2) + end, usage, said(3) + a, DONE]
    assert passed_on(Groups(), *parts) == [a, b"", b"", b"", b"", a + end + usage + a + DONE]


def test_nothing_waits_where_no_ids_are_to_come() -> None:
    a, end = chunk("a"), chunk("", "stop")
    assert passed_on(Groups(), a, end, DONE) == [a, end, DONE]


def test_of_a_whole_answer_ids_come_out_alone_and_the_answer_at_its_end() -> None:
    groups, reader = Groups(is_whole=True), EventReader(hears=True)
    taken = [
        groups.take(reader.feed(part))
        for part in (origin() + b"\n", said(1) + b"\n", said(2, 3) + b"\n", chunk("all", "stop"), said() + b"\n", DONE)
    ]
    assert [[event.ids for event in group] for group in taken[:5]] == [[], [None, (1,)], [(2, 3)], [], []]
    assert b"".join(event.raw for event in taken[5]) == chunk("all", "stop") + DONE


def test_what_waits_for_its_ids_does_not_fill_the_memory() -> None:
    groups, large = Groups(), Event(b"x" * (MAX_EVENT_BYTES // 4), origin=ORIGIN)
    for _ in range(4):
        assert groups.take([large]) == []
    with pytest.raises(BadWorkerAnswer):
        groups.take([large])
