"""A balancer that cannot open another connection: it says so of itself, and thinks no worse of the instances."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from typing import Any, NoReturn

import httpx
import pytest

from longcat_pd import log
from longcat_pd.clock import BREAKER_FAILURES
from longcat_pd.load_balancer.transport import WorkerTransport
from tests.balancer_rig import BODY, LegCall, Reply, Rig, never, role_of

LOCAL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class Calls:
    """Workers that are called through real sockets, of which none can be had."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport = WorkerTransport(1.0)
        self._number = number
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", self._refuse)

    async def __call__(self, call: LegCall | None = None) -> Reply:
        await self.transport.handle_async_request(
            httpx.Request("POST", "http://127.0.0.1:1/", extensions={"timeout": {"connect": 1.0}})
        )
        raise AssertionError

    async def _refuse(self, *_: Any) -> NoReturn:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("worker", ["p0", "d0"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", LOCAL, ids=errno.errorcode.get)
async def test_clients_are_told_of_load_and_instances_stay(
    number: int, is_stream: bool, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    rig = await Rig.make("p0 d0 d1")
    calls = Calls(number, monkeypatch)
    rig.script(d0=never, d1=never)
    rig.script(**{name: calls for name in rig.means.pool.instances if role_of(name) == role_of(worker)})
    for _ in range(2 * BREAKER_FAILURES + 2):
        answer = await rig.post({**BODY, "stream": is_stream}).end()
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
        assert answer.headers["x-should-retry"] == "true" and os.strerror(number) not in answer.error["message"]
    assert len(rig.cluster.of("p0")) == 2 * BREAKER_FAILURES + 2, "there was another attempt"
    assert all(instance.is_ready and not instance.breaker.is_open for instance in rig.means.pool.instances.values())
    lines = [line for line in out.getvalue().splitlines() if "connection_not_made" in line]
    assert f'reason="{os.strerror(number)}" count=1' in lines[0] and len(lines) == 4
    assert rig.is_idle()


async def test_an_instance_that_was_not_asked_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"] = Calls(errno.EMFILE, monkeypatch)
    for _ in range(4):
        await rig.poll()
    assert rig.means.pool.instances["d0"].is_ready


async def test_what_the_other_side_refuses_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await Rig.make()
    rig.script(d0=Calls(errno.ECONNREFUSED, monkeypatch))
    answer = await rig.post().end()
    assert (answer.status, answer.error["code"]) == (503, "worker_unavailable")
    assert not rig.means.pool.instances["d0"].is_ready
