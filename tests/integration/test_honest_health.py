"""What the balancer's process tells of health, whatever its workers say or do not say; probes that come together.

Failures of kind 35. Workers are scripted; slow steps of real ones are in ``tests/fault/test_slow.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.balancer_rig import BODY, CHAT
from tests.integration.test_balancer_process import Site
from tests.integration.test_balancer_process import site as made_site

site = made_site
NOTICED_S = 8.0  # a poll each second, two of which have to be missed
AT_ONCE_S = 4.0  # a refusal; a second on a machine that does nothing else
PROBES = 20


def no_link(s: Site) -> None:
    s.p0._ready["peers"] = {"d0": "down"}


def silent_rank(s: Site) -> None:
    s.d0._ready |= {"ready": False, "reasons": [{"code": "rank_silent", "detail": "5.1 s", "rank": 0}]}


def compiling(s: Site) -> None:
    """Ranks say that they compile: the instance has only its own limit for that, and is ready."""
    s.d0._ready |= {"busy": True}


def starting(s: Site) -> None:
    for worker in (s.p0, s.d0):
        worker._ready |= {"ready": False, "reasons": [{"code": "starting", "detail": "weights", "rank": None}]}


async def ready_said(s: Site, codes: list[str]) -> dict[str, Any]:
    """The answer of /ready as soon as it has these reasons; /health is good and quick all the time."""
    until, times = time.monotonic() + NOTICED_S, []
    while True:
        began = time.monotonic()
        assert (await s.client.get("/health")).json() == {"status": "ok"}
        times.append(time.monotonic() - began)
        answer = await s.client.get("/ready")
        said = dict(answer.json())
        if [reason["code"] for reason in said["reasons"]] == codes:
            assert (answer.status_code, said["ready"]) == ((503, False) if codes else (200, True))
            assert min(times) < 0.1, "a machine may be busy, but not all the time"
            return said
        assert time.monotonic() < until, said
        await asyncio.sleep(0.05)


async def refused_at_once(s: Site) -> None:
    for is_streamed in (False, True):
        began = time.monotonic()
        answer = await s.client.post(CHAT, json={**BODY, "stream": is_streamed})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert time.monotonic() - began < AT_ONCE_S
    assert (await s.client.get("/health_generate")).status_code == 503
    account = (await s.client.get("/debug/accounting")).json()
    assert account["balancer"] == {"clients": 0, "legs": {"prefill": 0, "decode": 0}}


@pytest.mark.parametrize(
    ("change", "codes", "own"),
    [
        (no_link, ["no_linked_pair"], []),
        (silent_rank, ["no_decode"], ["rank_silent"]),
        (starting, ["starting", "no_prefill", "no_decode"], ["starting"]),
        (compiling, [], []),
    ],
)
async def test_what_instances_say(site: Site, change: Callable[[Site], None], codes: list[str], own: list[str]) -> None:
    before = [{**worker._ready} for worker in (site.p0, site.d0)]
    change(site)
    if change is compiling:
        until = time.monotonic() + NOTICED_S
        while not (said := (await site.client.get("/ready")).json())["busy"]:
            assert time.monotonic() < until, said
            await asyncio.sleep(0.05)
    said = await ready_said(site, codes)
    assert [reason["code"] for reason in said["instances"]["d0"]["reasons"]] == own
    assert said["busy"] == (change is compiling)
    if codes:
        await refused_at_once(site)
        assert (await site.client.get("/v1/models")).status_code == 200, "it was ready once"
    for worker, values in zip((site.p0, site.d0), before, strict=True):
        worker._ready = values
    await ready_said(site, [])
    assert (await site.client.post(CHAT, json=BODY)).status_code == 200


async def test_pools_that_are_down(site: Site) -> None:
    await site.d0.stop()
    await ready_said(site, ["no_decode"])
    await refused_at_once(site)
    await site.p0.stop()
    await ready_said(site, ["no_prefill", "no_decode"])
    await refused_at_once(site)
    await site.p0.start()
    await site.d0.start()
    await ready_said(site, [])
    assert (await site.client.post(CHAT, json=BODY)).status_code == 200


async def test_a_balancer_that_has_never_had_a_pair_is_starting(site: Site) -> None:
    site.balancer.process.kill()
    await site.balancer.end()
    starting(site)
    await site.balancer.start()
    until, answer = time.monotonic() + 40.0, None
    while answer is None:
        with contextlib.suppress(httpx.TransportError):
            answer = await site.client.get("/ready")
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert answer.status_code == 503
    models = await site.client.get("/v1/models")
    assert (models.status_code, models.json()["error"]["code"]) == (503, "starting")
    assert (await site.client.get("/health")).status_code == 200
    await refused_at_once(site)


async def test_probes_that_come_together(site: Site) -> None:
    """Idle they share one; under load traffic is the proof; and where a worker hangs they are not falsely good."""
    answers = await asyncio.gather(*(site.client.get("/health_generate") for _ in range(PROBES)))
    assert {(answer.status_code, answer.json()["by"]) for answer in answers} == {(200, "probe")}
    assert "longcat_pd_requests_total{" not in (await site.client.get("/metrics")).text
    asked = [site.client.post(CHAT, json=BODY) for _ in range(64)]
    probes = [site.client.get("/health_generate") for _ in range(PROBES)]
    found = await asyncio.gather(*asked, *probes)
    assert {answer.status_code for answer in found} == {200}
    await asyncio.sleep(5.2)  # so long traffic counts
    site.d0.act = "hang"
    waiting = [asyncio.ensure_future(site.client.get("/health_generate")) for _ in range(PROBES)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in waiting)
    await site.d0.stop()
    for answer in await asyncio.wait_for(asyncio.gather(*waiting), 5.0):
        assert answer.status_code == 503 and "d0" in answer.json()["error"]["message"]
    assert await site.idle() is False, "an instance that does not answer is not idle"
    await site.d0.start()
    site.d0.act = "good"
    await ready_said(site, [])
    assert await site.idle()
    assert (await site.client.get("/health_generate")).json()["by"] == "probe"
