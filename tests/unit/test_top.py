"""``longcat-pd top``: what a picture of recorded facts holds, and what it does about a connection that is lost."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longcat_pd.clock import MonotonicClock
from longcat_pd.top import command, watch
from longcat_pd.top.phases import phases
from longcat_pd.top.picture import picture
from longcat_pd.top.watch import Balancer, News, NoFacts, news, snapshot
from tests.unit import test_status_page, top_facts
from tests.unit.top_facts import Facts

SCENES: dict[str, Callable[[], Facts]] = {
    "healthy": top_facts.cluster,
    "killed": top_facts.with_a_killed_rank,
    "full": top_facts.with_a_full_pool,
    "no decode": top_facts.without_decode,
    "large": top_facts.large,
}


def drawn(facts: Facts, *, width: int = 80, remark: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False, emoji=False).print(picture(facts, remark=remark))
    return out.getvalue()


def one_line(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------ the picture


def keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path, *(name for key, inner in value.items() for name in keys(inner, f"{path}.{key}"))}
    return keys(value[0], f"{path}[]") if isinstance(value, list) and value else {path}


async def test_the_facts_of_these_tests_are_shaped_like_a_balancers() -> None:
    s = await test_status_page.seen()
    found = await test_status_page.status(s.rig)
    ours = keys({**top_facts.cluster(), "requests": [], "happened": found["happened"]})
    assert ours == keys(found)


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_word_of_the_balancer_stands_there_at_any_width(name: str, width: int) -> None:
    facts = SCENES[name]()
    text = drawn(facts, width=width)
    assert text.isascii() and "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    found = one_line(text)
    for complaint in facts["wrong"]:
        assert f"{complaint['level']} {complaint['words']}" in re.sub(r" +", " ", found), complaint
    assert ("Nothing is wrong." in found) == (not facts["wrong"])
    assert ("not serving" in found) == (not facts["ready"])
    for one in facts["instances"]:
        for rank in one["ranks"]:
            assert re.search(rf"\b{rank['rank']} {rank['state']}\b", found), rank


def test_a_healthy_cluster_is_told_in_figures() -> None:
    text = one_line(drawn(top_facts.cluster(), width=200))
    assert "longcat-pd 0.1.0, longcat-tiny: serving, 3 open requests" in text
    assert "p0 in waiting 2, running 3 of 16, step 42 ms, transfers 1, legs 1 stage 0 0 ok 128/128" in text
    assert "d0 in waiting 2, running 3 of 16, step 8.2 ms, 1.75 tokens a step, transfers 1, legs 1" in text
    assert "length p0 -> d0, 700, first token after 200 req-1" in text
    assert "p0: waited 2.0, offered 8.0, waited 10, prefill 130, cache 45; 3 chunks, 192 tokens in (64 cached)" in text
    assert "d0: waited 10, cache 185, decode 500; 8 steps, 9 tokens out" in text
    assert "2 min ago: d0 in" in text


def test_a_killed_rank_has_its_name_and_its_instance_its_reason() -> None:
    text = one_line(drawn(top_facts.with_a_killed_rank()))
    assert "p0 out: rank lost" in text and "heard 13 s ago" in text
    assert "rank 1 (stage 1) on 10.0.0.2: lost" in text
    assert "rank 1 ended with status -9. For 12 s." in text
    assert "12 s ago: p0 out (refused)" in text


def test_a_full_pool_shows_who_holds_its_blocks() -> None:
    text = one_line(drawn(top_facts.with_a_full_pool()))
    assert "d0 in, busy waiting 12, running 16 of 16" in text and "0 ok 0/128" in text
    held = "rank 0 (place 0) on 10.0.0.1: blocks 108 live, 16 reserved, 4 quarantined; lanes 3 posted, 1 unsent"
    assert held in text


def test_what_has_never_been_heard_is_not_made_up() -> None:
    text = one_line(drawn(top_facts.without_decode(), width=120))
    assert "d0 out: silent waiting -, running - of -, step -, - tokens a step, transfers -, legs 1, never heard" in text
    assert "worker unavailable no pair, 700 req-2" in text
    assert "running p0 -> d0, 1000, attempt 2 req-3" in text


def test_six_instances_of_eight_ranks_fit_where_a_terminal_is_tall() -> None:
    lines = drawn(top_facts.large()).splitlines()
    assert len(lines) < 50
    shown = [line for line in lines if "stage 3" in line]
    assert len(shown) == 2 and all("6 ok 128/128  7 ok 128/128" in line for line in shown)


def test_a_phase_that_goes_on_ends_now_and_those_that_never_began_are_not_there() -> None:
    side = {"began": 2.0, "ended": None, "events": [["arrived", 2.0], ["offered", 1.5], ["granted", 0.5]]}
    assert phases(side, "prefill", end=0.0) == [("waited", 0.5), ("offered", 1.0), ("waited", 0.5)]
    assert phases({**side, "events": []}, "decode", end=0.25) == [("waited", 1.75)]
    assert phases(side, "", end=0.0) == []


def test_control_codes_of_strangers_stay_out() -> None:
    facts = top_facts.cluster(requests=[top_facts.request(id="\x1b[2J[bold]x\x07")])
    text = drawn(facts)
    assert "\x1b" not in text and "\x07" not in text and "?[2J[bold]x?" in text


# ------------------------------------------------------------------ the connection


class Server:
    """A balancer that says what it is told to: ``answers`` to connections, one after the other; the last one repeats."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.asked: list[bytes] = []
        self.url = ""
        self.holds = asyncio.Event()  # set: a connection is closed once it has been answered
        self.came = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        self.came.set()
        writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        await writer.drain()
        await self.holds.wait()
        writer.close()


@asynccontextmanager
async def serving(*answers: bytes, holds: bool = False) -> AsyncIterator[Server]:
    told = Server()
    told.answers += answers
    if not holds:
        told.holds.set()
    server = await asyncio.start_server(told.answer, "127.0.0.1", 0)
    told.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield told
    finally:
        told.holds.set()
        server.close()
        await server.wait_closed()


def whole(value: Any, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


def stream(*facts: Facts) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b": keep-alive\n\n" + b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in facts)


REFUSED = whole({"error": {}}, "401 Unauthorized")


async def once(url: str, key: bytes | None = None) -> tuple[int | str, str]:
    out = io.StringIO()
    try:
        return await command.show_once(Balancer(url=url, key=key), out), out.getvalue()
    except NoFacts as error:
        return str(error), out.getvalue()


async def test_once_ends_as_the_cluster_is() -> None:
    async with serving(whole(top_facts.cluster()), whole(top_facts.with_a_killed_rank())) as server:
        status, text = await once(server.url, b"secret")
        assert status == 0 and "Nothing is wrong." in text and "\x1b" not in text
        assert b"GET /status HTTP" in server.asked[0] and b"Bearer secret" in server.asked[0]
        status, text = await once(server.url)
        assert status == 1 and "p0 has lost rank 1" in text and b"Bearer" not in server.asked[1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REFUSED, "wants a client's key: --key-file FILE"),
        (whole({}, "404 Not Found"), "is no balancer, or an older one: it has no /status"),
        (whole({}, "500 Oh"), "answers with status 500"),
        (whole([]), "answers with something else than the facts of a cluster"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", "does not answer: "),
    ],
)
async def test_once_says_why_there_is_no_picture(answer: bytes, words: str) -> None:
    async with serving(answer) as server:
        status, text = await once(server.url)
        assert str(status).startswith(f"{server.url} {words}") and text == ""


async def test_nobody_there_and_no_address_are_told() -> None:
    async with serving(REFUSED) as server:
        assert (await once(server.url, b"k"))[0] == f"{server.url} does not know this key"
    assert "does not answer" in str((await once(server.url))[0])
    assert "does not answer" in str((await once("127.0.0.1"))[0])


async def test_a_lost_connection_is_told_and_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE_S", 0.01)
    end = asyncio.Event()
    first, second = top_facts.cluster(), top_facts.with_a_killed_rank()
    found: list[News] = []
    async with serving(stream(first, second), whole({}, "429 Too Many"), stream(first)) as server:
        async for one in news(Balancer(url=server.url), MonotonicClock(), told_to_end=end):
            found.append(one)
            if len(found) == 5:
                end.set()
    facts = [one.facts for one in found]
    assert facts == [first, second, second, second, first]  # the last are kept while there are no newer ones
    problems = [one.problem for one in found]
    assert problems[:2] == ["", ""] and problems[4] == ""
    assert "has ended the connection; trying again, for 0 s now" in problems[2]
    assert "is looked at by as many as may already" in problems[3]
    assert all(b"GET /status/events HTTP" in asked for asked in server.asked)
    text = one_line(drawn(first, remark=f"Not up to date: {problems[2]}."))
    assert "serving, 3 open requests Not up to date: " in text
    out = io.StringIO()
    Console(file=out, width=300).print(command.shown(found[2]))
    assert "Not up to date: " in out.getvalue()


async def test_the_end_is_heard_while_nothing_comes() -> None:
    end = asyncio.Event()
    async with serving(stream(top_facts.cluster()), holds=True) as server:

        async def look() -> None:
            async for _ in news(Balancer(url=server.url), MonotonicClock(), told_to_end=end):
                asyncio.get_running_loop().call_later(0.05, end.set)

        await asyncio.wait_for(look(), 10)


async def test_what_another_try_does_not_mend_and_long_silence_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(REFUSED) as server:
        with pytest.raises(NoFacts, match="wants a client's key"):
            async for _ in news(Balancer(url=server.url), MonotonicClock(), told_to_end=asyncio.Event()):
                pytest.fail("there are no news")
    monkeypatch.setattr(watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(watch, "PATIENCE_S", 0.2)
    with pytest.raises(NoFacts, match=r"does not answer.*nothing came for"):
        async for one in news(Balancer(url=server.url), MonotonicClock(), told_to_end=asyncio.Event()):
            assert one.facts is None and "trying again" in one.problem
    with pytest.raises(NoFacts):
        await snapshot(Balancer(url=server.url))


# ------------------------------------------------------------------ the command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-m", "longcat_pd.cli", "top", *arguments]
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "80"}
    return subprocess.run(code, capture_output=True, text=True, timeout=60, check=False, env=environment)


async def test_the_command_without_a_terminal(tmp_path: Path) -> None:
    async with serving(whole(top_facts.with_a_killed_rank())) as server:
        key = tmp_path / "key"
        key.write_text("of-a-client\n")
        done = await asyncio.to_thread(run, server.url, "--once", "--key-file", str(key))
        assert done.returncode == 1 and done.stderr == "", done.stderr
        assert "\x1b" not in done.stdout and "p0 has lost rank 1" in done.stdout
        assert b"Bearer of-a-client" in server.asked[0]
    live = run(server.url)
    assert (live.returncode, live.stdout) == (2, "") and "--once" in live.stderr
    gone = run(server.url, "--once")
    assert (gone.returncode, gone.stdout) == (1, "") and gone.stderr.startswith(f"error: {server.url} does not answer")
    lacking = run("--key-file", str(tmp_path / "none"))
    assert lacking.returncode == 2 and "error: key file" in lacking.stderr


async def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    async with serving(stream(top_facts.cluster(), top_facts.with_a_killed_rank()), holds=True) as server:
        master, slave = pty.openpty()
        code = [sys.executable, "-m", "longcat_pd.cli", "top", server.url]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "60"}
        process = await asyncio.to_thread(subprocess.Popen, code, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        said = b""
        while b"p0 has lost rank 1" not in said:
            said += await asyncio.wait_for(asyncio.to_thread(os.read, master, 1 << 16), 60)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 0
        try:
            while more := await asyncio.to_thread(os.read, master, 1 << 16):
                said += more
        except OSError:  # the other side is closed
            pass
        finally:
            os.close(master)
    screen, cursor = said.rfind(b"\x1b[?1049l"), said.rfind(b"\x1b[?25h")
    assert said.startswith(b"\x1b[?1049h") and screen > 0 and cursor > 0, said[-200:]
    assert b"\x1b[?1049h" not in said[screen:] and b"\x1b[?25l" not in said[cursor:]
    assert b"Traceback" not in said
