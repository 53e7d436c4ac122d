"""One line and one outcome for each request, whatever its end."""

# ruff: noqa: E501 - tables

import asyncio
import io
import re
from contextlib import suppress

import pytest

from longcat_pd import log
from longcat_pd.engine.request import Event, Request, SamplingParams, TransferRef
from longcat_pd.errors import DeadlineExceeded, InvalidRequest, RankLost, TransferFailed, WorkerUnavailable
from longcat_pd.metrics import Metrics
from longcat_pd.server.journal import Journal
from longcat_pd.server.requests import Call

CALL = Call(request_id="r", deadline=9.0, transfer=TransferRef(id="t", peer="p0"), attempt=2)


class Rig:
    def __init__(self) -> None:
        self.time, self.lines = 100.0, io.StringIO()
        log.set_up(stream=self.lines)
        self.metrics = Metrics(role="prefill", instance="p0")
        self.journal = Journal(self.metrics.requests, lambda: self.time, pair_with=lambda peer: (peer, "d0"))

    def request(self, *events: Event) -> Request:
        request = Request(request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(), deadline=9.0)
        for place, event in enumerate(events):
            request.life.stamp(event, 100.0 + place)
        return request

    def run(self, error: BaseException | None, *events: Event) -> str:
        """The line of a request that goes through these events and ends so."""
        with suppress(BaseException), self.journal.request(CALL) as record:
            record.prompts.begin(0, self.request(*events))
            self.journal.leaving(record)
            self.time += 0.25
            record.finish = "length"
            if error is not None:
                raise error
        (line,) = self.lines.getvalue().splitlines()
        return line.partition(" ")[2]

    def counted(self, name: str) -> dict[str, float]:
        text = self.metrics.render().decode()
        pattern = rf'longcat_pd_{name}\{{.*(?:outcome|from)="(\w+)".*\}} (\S+)'
        return {label: float(value) for label, value in re.findall(pattern, text) if float(value)}


ON_P = (Event.ARRIVED, Event.OFFERED, Event.GRANTED, Event.PREFILL_STARTED, Event.PREFILL_ENDED, Event.COMMITTED)
ON_D = (Event.ARRIVED, Event.GRANTED, Event.COMMITTED, Event.FIRST_TOKEN)


@pytest.mark.parametrize(
    ("events", "hop"),
    [
        ((), "queued"),
        *zip((ON_P[:n] for n in range(1, 7)), ["queued", "offered", "offered", "prefilling", "transferring", "transferring"], strict=True),
        *zip((ON_D[:n] for n in range(1, 5)), ["queued", "transferring", "transferring", "decoding"], strict=True),
    ],
)  # fmt: skip
def test_who_leaves_is_told_with_the_hop_and_the_time_to_free(events, hop):
    rig = Rig()
    assert rig.run(asyncio.CancelledError(), *events) == (
        f"info request_cancelled transfer=t pair=p0,d0 attempt=2 by=client hop={hop} ms_to_free=250"
    )
    assert rig.counted("requests_total") == {"cancelled": 1} and rig.counted("cancels_total") == {"client": 1}


@pytest.mark.parametrize(
    ("error", "told", "cancels"),
    [
        (InvalidRequest("secret"), "warning request_failed {} status=400 code=invalid_value cause=client hop=queued reason=none ms=250", {}),
        (DeadlineExceeded("late"), "error request_failed {} status=504 code=deadline_exceeded cause=self hop=queued reason=late ms=250", {"deadline": 1}),
        (WorkerUnavailable("end", code="draining"), "warning request_failed {} status=503 code=draining cause=load hop=queued reason=end ms=250", {"drain": 1}),
        (TransferFailed("gone", peer_gone=True), "warning request_failed {} status=502 code=transfer_failed cause=peer hop=queued reason=gone ms=250", {"peer": 1}),
        (RankLost("rank 1"), 'error request_failed {} status=500 code=rank_lost cause=self hop=queued reason="rank 1" ms=250', {}),
    ],
)  # fmt: skip
def test_a_failure_is_told_once(error, told, cancels):
    rig = Rig()
    assert rig.run(error) == told.format("transfer=t pair=p0,d0 attempt=2")
    assert rig.counted("requests_total") == {error.code: 1} and rig.counted("cancels_total") == cancels


def test_a_good_end_is_told_with_its_times():
    rig = Rig()
    assert rig.run(None, *ON_P) == (
        "info request_finished transfer=t pair=p0,d0 attempt=2 prompt=3 cached=0 output=0 accepted=0 finish=length"
        " ttft_ms=none tpot_ms=none queue_ms=3000 prefill_ms=1000 transfer_ms=1000"
    )
    assert rig.counted("requests_total") == {"length": 1}
    text = rig.metrics.render().decode()
    for name, seconds in (("queue", 3.0), ("prefill", 1.0), ("transfer", 1.0), ("request", 0.25)):
        assert f'longcat_pd_{name}_seconds_sum{{instance="p0",role="prefill"}} {seconds}' in text


def test_a_defect_has_an_outcome_too():
    rig = Rig()
    with pytest.raises(ZeroDivisionError), rig.journal.request(CALL):
        raise ZeroDivisionError
    assert rig.counted("requests_total") == {"engine_fault": 1} and not rig.lines.getvalue()


def test_of_several_choices_the_furthest_tells_the_hop():
    rig = Rig()
    with suppress(asyncio.CancelledError), rig.journal.request(CALL) as record:
        for events in (ON_D[:1], ON_D, ON_D[:2]):
            record.prompts.begin(0, rig.request(*events))
        raise asyncio.CancelledError
    assert "hop=decoding ms_to_free=none" in rig.lines.getvalue()
