"""What the bench makes of the answers to an overload, and that no answer at all is an end too."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from longcat_pd.bench import recovery
from longcat_pd.bench.recovery import Course, Crowd, Outcome, rows_of
from longcat_pd.bench.servers import BenchFailed


async def test_an_answer_is_read_to_its_end_and_none_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "ANSWERED_S", 0.05)
    crowd, reader = Crowd("http://nobody", Course()), asyncio.StreamReader()
    reader.feed_data(b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\n{  }HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert [await crowd._answer(reader), await crowd._answer(reader)] == [503, 200]
    reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{")
    with pytest.raises(BenchFailed, match="no answer after"):
        await crowd._answer(reader)


def test_the_first_five_seconds_are_to_recover_in() -> None:
    outcome = Outcome(
        before=100.0,
        during=60.0,
        seconds_after=(10.0, 20.0, 30.0, 40.0, 50.0, 90.0, 96.0, 93.0),
        offered=900.0,
        refused=Counter({503: 7, 429: 2}),
        refusal_p99_s=0.25,
    )
    pace, refusals = rows_of(outcome, "workers")
    assert (pace.ours, pace.other, pace.ratio, pace.goal) == ("93.0", "before them 100.0", pytest.approx(0.93), "≥ 0.9")
    assert (refusals.ours, refusals.goal) == ("250 ms", "< 1 s")
    assert "2 with 429, 7 with 503; 9 times as many asked" in refusals.what
    assert refusals.other.endswith("in the first second after it 10% of before")


def test_answers_that_are_neither_good_nor_refusals_fail() -> None:
    answers = [recovery.Answered(at=float(i), seconds=0.1, status=status) for i, status in enumerate((200, 429, 503, 502))]
    with pytest.raises(BenchFailed, match="502: 1"):
        recovery._check(answers)
    recovery._check(answers[:3])
