"""An overload, and after: quick refusals, nothing lost, and soon the pace of before. Measured at length by `make bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd.bench.recovery import Course, overloaded
from tests.parity.conftest import MakeCheckpoint
from tests.processes import running
from tests.topology import cluster_file

COURSE = Course(clients=4, warm_up_s=2.0, before_s=6.0, overload_s=8.0, after_s=10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"load_balancer_settings": {"max_inflight": 8}}, 429),
        ({"prefill_engine": {"max_queued_requests": 4}, "decode_engine": {"max_queued_requests": 4}}, 503),
    ],
)
async def test_the_pace_of_before_is_back(
    tiny: MakeCheckpoint, tmp_path: Path, settings: dict[str, dict[str, int]], status: int
) -> None:
    few = {"max_num_seqs": 4}
    sections = {name: {**few, **settings.get(name, {})} for name in ("prefill_engine", "decode_engine")}
    async with running(cluster_file(tmp_path, tiny("2.0", with_tokenizer=True), **{**settings, **sections})) as (
        _,
        topology,
    ):
        outcome = await overloaded(topology.url, COURSE)
    print(outcome)
    assert {*outcome.refused} == {status} and outcome.refused[status] > COURSE.clients * COURSE.times
    assert outcome.refusal_p99_s < 1.0
    assert outcome.during > 0.2 * outcome.before, "refusing costs less than serving"
    assert max(outcome.seconds_after[4:]) >= 0.9 * outcome.before, outcome
