import json

import pytest

from longcat_pd.errors import BadWorkerAnswer
from longcat_pd.load_balancer.events import MAX_EVENT_BYTES, EventReader
from longcat_pd.load_balancer.replies import check_answer, check_prefilled, error_reply
from longcat_pd.load_balancer.workers import Reply
from tests.balancer_rig import DONE, WHOLE_BYTES, chunk

STREAM = chunk("你好") + b": a comment\n\n" + b": another\n" + chunk("b") + chunk("", "stop") + DONE
EVENTS = [chunk("你好"), chunk("b"), chunk("", "stop"), DONE]


def error_body(code: str, message: str = "m") -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}}).encode()


def json_reply(status: int, body: bytes, **headers: str) -> Reply:
    given = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return Reply(status=status, headers=given, body=body)


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


def test_an_error_answer_is_kept_as_it_is_and_its_header_names_the_cause() -> None:
    body = error_body("transfer_failed", "zu spät")
    failure = error_reply(json_reply(502, body, x_longcat_cause="peer", retry_after="3", x_should_retry="true"))
    assert (failure.status, failure.body, failure.cause) == (502, body, "peer")
    assert (failure.retryable, failure.counts) == (True, False)
    assert failure.headers == {"retry-after": "3", "x-should-retry": "true"}


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (400, "invalid_value", "client"),
        (503, "overloaded", "load"),
        (500, "rank_lost", "self"),
        (504, "deadline_exceeded", "self"),
    ],
)
def test_without_the_header_the_code_and_the_status_tell_the_cause(status: int, code: str, cause: str) -> None:
    assert error_reply(json_reply(status, error_body(code))).cause == cause


@pytest.mark.parametrize(
    "reply",
    [
        json_reply(500, b"<html>oops</html>"),
        json_reply(500, b'{"error": {"mess'),
        json_reply(500, b'{"detail": "x"}'),
        json_reply(500, b""),
        json_reply(204, b""),
        json_reply(302, error_body("engine_fault")),
        json_reply(401, error_body("invalid_api_key")),
        json_reply(404, error_body("unknown_route")),
    ],
)
def test_what_is_no_error_of_a_worker_becomes_one_of_ours(reply: Reply) -> None:
    failure = error_reply(reply)
    assert (failure.code, failure.status, failure.cause, failure.retryable) == ("bad_worker_answer", 502, "self", False)
    assert failure.error is not None


@pytest.mark.parametrize("body", [b"", b"<html/>", b"[]", WHOLE_BYTES[:-4], b'{"object": "x"}', b"[" * 100_000])
def test_a_whole_answer_must_be_one(body: bytes) -> None:
    with pytest.raises(BadWorkerAnswer):
        check_answer(json_reply(200, body))
    with pytest.raises(BadWorkerAnswer):
        check_prefilled(json_reply(200, body))
    with pytest.raises(BadWorkerAnswer):
        check_answer(Reply(status=200, headers={"content-type": "text/html"}, body=WHOLE_BYTES))
