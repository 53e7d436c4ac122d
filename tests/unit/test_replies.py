import json

import pytest

from longcat_pd.errors import BadWorkerAnswer
from longcat_pd.load_balancer.replies import check_answer, check_prefilled, error_reply
from longcat_pd.load_balancer.workers import Reply
from tests.balancer_rig import WHOLE_BYTES


def error_body(code: str, message: str = "m") -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}}).encode()


def json_reply(status: int, body: bytes, **headers: str) -> Reply:
    given = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return Reply(status=status, headers=given, body=body)


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
