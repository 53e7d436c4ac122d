"""Streams whose client stops reading: they end with their time and with the process, and hold nothing behind that."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.errors import WorkerUnavailable
from longcat_pd.metrics import Metrics
from longcat_pd.server import sse
from longcat_pd.server.gate import Gate
from tests.manual_clock import settle
from tests.unit.fake_service import FakeService, make_app, plays, write_folder

FIRST, MIDDLE, LAST = 1, 3, 17  # of the messages of an answer: its head, and the end of its body
BODY = {"prompt": [5, 6], "max_tokens": 20, "stream": True, "ignore_eos": True}


class Unread:
    """A client that takes all messages before one of them, and that and what follows when it reads again."""

    def __init__(self, folder: str, stops_at: int, *, limit_s: float, **front: Any) -> None:
        self.gate, self.metrics = Gate(4), Metrics(role="standalone", instance="s0")
        self.service = FakeService(folder, plays([300 + place for place in range(20)]))
        self.messages: list[Any] = []
        self.has_stopped, self.reads = asyncio.Event(), asyncio.Event()
        self._stops_at = stops_at
        self._body = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
        app = make_app(self.service, gate=self.gate, metrics=self.metrics, **front)
        path = "/v1/completions"
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"x-request-timeout", str(limit_s).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task: asyncio.Task[Any] = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def events(self) -> list[bytes]:
        return b"".join(message.get("body", b"") for message in self.messages).split(b"\n\n")[:-1]

    def outcomes(self) -> list[str]:
        lines = self.metrics.render().decode().splitlines()
        return [line for line in lines if line.startswith("longcat_pd_requests_total") and line.endswith(" 1.0")]

    async def _receive(self) -> Any:
        if self._body:
            return self._body.pop()
        return await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if len(self.messages) + 1 >= self._stops_at:
            self.has_stopped.set()
            await self.reads.wait()
        self.messages.append(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("comments_s", [0, 60], ids=["silent", "with comments"])
@pytest.mark.parametrize("stops_at", [FIRST, MIDDLE, LAST])
async def test_its_time_ends_it(folder: str, stops_at: int, comments_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FAREWELL_S", 0.2)
    client = Unread(folder, stops_at, limit_s=1.5, keepalive_comment_s=comments_s)
    await asyncio.wait_for(client.has_stopped.wait(), 60.0)
    done, _ = await asyncio.wait({client.task}, timeout=60.0)
    assert done and client.task.exception() is None
    assert (client.gate.num_open, client.service.num_running, len(client.messages)) == (0, 0, stops_at - 1)
    if stops_at < LAST and not comments_s:  # else the answer was complete
        assert client.outcomes() and "deadline_exceeded" in client.outcomes()[0]


async def test_so_does_the_end_of_the_process(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FAREWELL_S", 0.2)
    client = Unread(folder, MIDDLE, limit_s=60.0)
    await asyncio.wait_for(client.has_stopped.wait(), 60.0)
    await asyncio.sleep(0.3)
    assert client.gate.num_open == 1 and not client.task.done()
    client.gate.cut(WorkerUnavailable("ends", code="draining"))
    await asyncio.wait_for(client.gate.empty(), 60.0)
    assert client.service.num_running == 0 and "draining" in client.outcomes()[0]
    await asyncio.wait_for(client.task, 60.0)


async def test_who_reads_again_in_time_is_told_the_error_and_nothing_else(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FAREWELL_S", 30.0)
    client = Unread(folder, MIDDLE, limit_s=1.5)
    await asyncio.wait_for(client.has_stopped.wait(), 60.0)
    await asyncio.sleep(2.0)
    await settle()  # the end of its time was heard before, however late both were
    client.reads.set()
    await asyncio.wait_for(client.task, 20.0)
    *_, last = client.events
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
    assert len(client.events) == 3 and client.messages[-1]["more_body"] is False and client.gate.num_open == 0


async def test_who_reads_slowly_loses_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FAREWELL_S", 0.05)
    client = Unread(folder, MIDDLE, limit_s=60.0)
    await asyncio.wait_for(client.has_stopped.wait(), 60.0)
    await asyncio.sleep(0.4)
    client.reads.set()
    await asyncio.wait_for(client.task, 60.0)
    assert client.events[-1] == b"data: [DONE]" and len(client.messages) == LAST
