"""The balancer's process over real sockets, before workers that are a few lines of HTTP server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.tiny.configs import make_config
from tests.balancer_rig import BODY, CHAT, DONE, WHOLE_BYTES, chunk
from tests.ports import free_base

STREAMED = {**BODY, "stream": True}
CLOSED_S = 5.0  # stated: one second, on a machine that does nothing else
NOTICED_S = 8.0  # stated: two


class Worker:
    """One instance: says ready, and answers legs as ``act`` says: good, hang, cut (after one event), slow, long."""

    def __init__(self, name: str, role: str, port: int, *, peers: list[str], digest: str) -> None:
        self.name, self.role, self.port = name, role, port
        self.act = "good"
        self.has_leg = asyncio.Event()
        self.may_end = asyncio.Event()  # what a slow one waits for before its last event
        self._writers: set[asyncio.StreamWriter] = set()
        self.closed_at: float | None = None  # when the balancer ended a leg that hung
        self._ready = {
            "ready": True,
            "busy": False,
            "role": role,
            "instance": name,
            "incarnation": "1",
            "config_digest": digest,
            "ranks": {"total": 1, "ok": 1},
            "peers": dict.fromkeys(peers, "up"),
            "reasons": [],
        }
        self._server: asyncio.Server

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (header := await reader.readline()) != b"\r\n":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = await reader.readexactly(length)
                if path == "/ready":
                    _send(writer, json.dumps(self._ready).encode())
                elif path == "/debug/accounting":
                    _send(writer, json.dumps({"idle": True, "outstanding": 0}).encode())
                else:
                    self.has_leg.set()
                    await self._leg(reader, writer, is_stream=json.loads(body).get("stream") is True)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _leg(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_stream: bool) -> None:
        if self.act == "hang":
            await reader.read()
            self.closed_at = time.monotonic()
        elif self.role == "prefill":
            _send(writer, b'{"object":"prefill","transfer_id":"x","prompt_tokens":3,"timings_ms":{}}')
        elif not is_stream:
            _send(writer, WHOLE_BYTES)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            pieces = {
                "good": [chunk("a"), chunk("", "stop") + DONE],
                "cut": [chunk("a"), chunk("b")[:9]],
                "slow": [chunk("a"), chunk("b"), DONE],
                "long": [chunk("a")] + [chunk("b")] * 200 + [DONE],
            }[self.act]
            for piece in pieces:
                if self.act == "slow" and piece is DONE:
                    await self.may_end.wait()
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
                if self.act == "long":
                    await asyncio.sleep(0.1)
            if self.act == "cut":
                writer.transport.abort()
            else:
                writer.write(b"0\r\n\r\n")


def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


class Balancer:
    """The process."""

    def __init__(self, config: Path, port: int) -> None:
        self.config, self.url = config, f"http://127.0.0.1:{port}"
        self.process: asyncio.subprocess.Process
        self.port = port

    async def start(self, *settings: str) -> None:
        command = [sys.executable, "-m", "longcat_pd.load_balancer", "--config", str(self.config)]
        command += [part for item in settings for part in ("--set", item)]
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)

    async def ready(self) -> float:
        began = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() - began < 60:
                try:
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return time.monotonic() - began
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
        raise AssertionError("not ready")

    async def end(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        text = await asyncio.wait_for(self.process.stderr.read(), 60)
        return await self.process.wait(), text.decode()


async def reading(balancer: Balancer) -> float:
    """Seconds until a process like the balancer's has read its code, and ends."""
    began = time.monotonic()
    refused = Balancer(balancer.config, balancer.port)
    await refused.start("load_balancer.retry=x")
    await refused.end()
    return time.monotonic() - began


class Site:
    def __init__(self, balancer: Balancer, p0: Worker, d0: Worker, client: httpx.AsyncClient) -> None:
        self.balancer, self.p0, self.d0, self.client = balancer, p0, d0, client

    async def idle(self) -> bool:
        account = (await self.client.get("/debug/accounting")).json()
        return bool(account["idle"]) and account["outstanding"] == 0


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(make_config("2.0", [], dtype="float32")))
    first = free_base(30)
    ports = [first, first + 10, first + 20]  # an instance has more than one
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{path: {model}}}\n"
        f"load_balancer: {{host: 127.0.0.1, port: {ports[0]}}}\n"
        f"prefill: {{engine: {{block_size: 16}}, instances: [{{name: p0, http_port: {ports[1]}}}]}}\n"
        f"decode: {{engine: {{block_size: 16}}, instances: [{{name: d0, http_port: {ports[2]}}}]}}\n"
    )
    cluster = load(config)
    p0 = Worker("p0", "prefill", ports[1], peers=["d0"], digest=digest(cluster, "p0"))
    d0 = Worker("d0", "decode", ports[2], peers=["p0"], digest=digest(cluster, "d0"))
    await p0.start()
    await d0.start()
    balancer = Balancer(config, ports[0])
    await balancer.start()
    await balancer.ready()
    async with httpx.AsyncClient(base_url=balancer.url, timeout=20, trust_env=False) as client:
        yield Site(balancer, p0, d0, client)
    if balancer.process.returncode is None:
        balancer.process.kill()
        await balancer.end()
    await p0.stop()
    await d0.stop()


async def both_closed(site: Site) -> None:
    """The balancer ends both of the legs that hang."""
    began = time.monotonic()
    while site.p0.closed_at is None or site.d0.closed_at is None:
        assert time.monotonic() - began < CLOSED_S
        await asyncio.sleep(0.01)


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def digest(cluster: ClusterConfig, name: str) -> str:
    return instance_spec(cluster, name).config_digest


async def test_answers_streams_memory_and_an_ordered_end(site: Site) -> None:
    assert (await site.client.post(CHAT, json=BODY)).content == WHOLE_BYTES
    answer = await site.client.post(CHAT, json=STREAMED)
    assert answer.content == chunk("a") + chunk("", "stop") + DONE
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    answers = await asyncio.gather(*(site.client.post(CHAT, json=STREAMED) for _ in range(64)))
    assert {a.content for a in answers} == {answer.content}
    assert (await site.client.get("/health_generate")).json()["by"] == "traffic"
    assert resident_kib(site.balancer.process.pid) < 100 * 1024
    assert await site.idle()
    site.balancer.process.terminate()
    code, text = await site.balancer.end()
    assert code == 0
    assert "drain_finished" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_a_client_that_leaves_is_noticed_and_both_legs_end(site: Site, body: Any) -> None:
    site.p0.act = site.d0.act = "hang"
    asking = asyncio.ensure_future(site.client.post(CHAT, json=body))
    for worker in (site.p0, site.d0):
        await asyncio.wait_for(worker.has_leg.wait(), 20)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await both_closed(site)
    assert await site.idle()


async def test_a_client_that_leaves_in_the_middle_of_a_stream(site: Site) -> None:
    site.d0.act = "long"
    async with site.client.stream("POST", CHAT, json=STREAMED) as response:
        async for _ in response.aiter_raw():
            break
    began = time.monotonic()
    while not await site.idle():
        assert time.monotonic() - began < CLOSED_S, "the stream would have taken twenty seconds more"
        await asyncio.sleep(0.02)


async def test_a_stream_that_breaks_ends_properly(site: Site) -> None:
    site.d0.act = "cut"
    answer = await site.client.post(CHAT, json=STREAMED)
    assert answer.status_code == 200
    good, error, rest = answer.text.split("\n\n")
    assert (good.encode() + b"\n\n", rest) == (chunk("a"), "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_unavailable"


async def test_a_killed_balancer_cancels_its_legs_and_a_new_one_serves_within_three_seconds(site: Site) -> None:
    site.p0.act = site.d0.act = "hang"
    asking = asyncio.ensure_future(site.client.post(CHAT, json=BODY))
    await asyncio.wait_for(site.d0.has_leg.wait(), 20)
    site.balancer.process.kill()
    await site.balancer.end()
    with pytest.raises(httpx.TransportError):
        await asking
    await both_closed(site)
    site.p0.act = site.d0.act = "good"
    reading_s = await reading(
        site.balancer
    )  # of an interpreter and its modules, which a busy machine does not give at once
    await site.balancer.start()
    ready_s = await site.balancer.ready()
    print(f"ready after {ready_s:.1f} s, of which {reading_s:.1f} s to read its code")
    assert ready_s < 3 + 2 * reading_s
    assert (await site.client.post(CHAT, json=BODY)).status_code == 200


async def test_draining_finishes_what_runs_and_refuses_what_comes(site: Site) -> None:
    site.d0.act = "slow"
    running = asyncio.ensure_future(site.client.post(CHAT, json=STREAMED))
    await asyncio.wait_for(site.d0.has_leg.wait(), 20)
    site.balancer.process.send_signal(signal.SIGTERM)
    await draining(site)
    late = await site.client.post(CHAT, json=BODY)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
    assert (await site.client.get("/health")).status_code == 200
    site.d0.may_end.set()
    assert (await running).content.endswith(DONE)
    assert (await site.balancer.end())[0] == 0


async def draining(site: Site) -> None:
    """The signal has come: of two that nobody has seen yet, one is seen."""
    began = time.monotonic()
    while (await site.client.get("/ready")).status_code == 200:
        assert time.monotonic() - began < CLOSED_S
        await asyncio.sleep(0.01)


async def test_a_second_signal_cuts_what_runs(site: Site) -> None:
    site.d0.act = "long"
    async with site.client.stream("POST", CHAT, json=STREAMED) as response:
        pieces = response.aiter_text()
        told = [await anext(pieces)]
        site.balancer.process.send_signal(signal.SIGINT)
        await draining(site)
        site.balancer.process.send_signal(signal.SIGINT)
        told += [piece async for piece in pieces]
    last = "".join(told).split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert (await site.balancer.end())[0] == 3


async def test_a_start_that_cannot_work_is_refused_with_status_two(site: Site) -> None:
    second = Balancer(site.balancer.config, site.balancer.port)
    await second.start()
    code, text = await second.end()
    assert code == 2
    assert f"port {second.port}" in text
    assert f"pid {site.balancer.process.pid}" in text
    assert str(os.getpid()) not in text
    await second.start("load_balancer.retry=x", "load_balancer.max_inflight=-1")
    code, text = await second.end()
    assert code == 2
    assert text.count("error: ") == 2
    assert "Traceback" not in text


async def test_a_worker_that_goes_and_comes_back_is_followed(site: Site) -> None:
    await site.d0.stop()
    began = time.monotonic()
    while (await site.client.get("/ready")).status_code == 200:
        assert time.monotonic() - began < NOTICED_S
        await asyncio.sleep(0.05)
    answer = await site.client.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    await site.d0.start()
    assert await site.balancer.ready() < NOTICED_S
    assert (await site.client.post(CHAT, json=BODY)).status_code == 200


async def test_the_openai_client_reads_answers_streams_and_errors(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.balancer.url}/v1", api_key="x", max_retries=0) as client:
        ask = {"model": "", "messages": BODY["messages"], "max_tokens": 4}
        assert (await client.chat.completions.create(**ask)).choices[0].finish_reason == "stop"
        texts = [c.choices[0].delta.content async for c in await client.chat.completions.create(**ask, stream=True)]
        assert texts == ["a", None]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ask, temperature=9, stream=stream)
            assert caught.value.code == "invalid_value"
        site.d0.act = "cut"
        stream = await client.chat.completions.create(**ask, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
