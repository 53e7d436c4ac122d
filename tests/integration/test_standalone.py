"""``longcat-pd serve`` and ``infer`` as a user starts them, on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from longcat_pd import wire
from longcat_pd.tiny.make import write_tiny
from tests.peers import OPEN
from tests.ports import free_base
from tests.terminal import screen_of, terminal

LIMIT_S = 60.0
STEPS = "longcat_pd_step_seconds_count{"
COMMAND = str(Path(sys.executable).parent / "longcat-pd")
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 3000, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "chat"
    write_tiny(path, "chat", seed=0, dtype="float32", with_tokenizer=True, overrides=("num_layers=2",))
    return path


class Server:
    def __init__(self, checkpoint: Path, log: Path, *more: str, stderr: TextIO | None = None) -> None:
        self.port = free_base()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [
            COMMAND,
            "serve",
            "--model",
            str(checkpoint),
            "--port",
            str(self.port),
            *more,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=stderr or out, start_new_session=True)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def decode_steps(self) -> float:
        text = httpx.get(self.url + "/metrics").text
        (count,) = (line for line in text.splitlines() if line.startswith(STEPS) and 'phase="decode"' in line)
        return float(count.rpartition(" ")[2])

    def wait_ready(self) -> None:
        self.until(lambda: self.process.poll() is not None or self.status("/ready") == 200)
        assert self.process.poll() is None, self.log

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code
        except httpx.TransportError:
            return 0

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit, self.log
            time.sleep(0.05)

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, timeout=LIMIT_S)

    def account(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.url + "/debug/accounting", timeout=5.0).json()
        return answer

    def rank_pids(self) -> list[int]:
        """The children of the forkserver."""
        children = _children(self.process.pid)
        return [pid for child in children for pid in _children(child)]

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    made = Server(checkpoint, tmp_path / "log")
    yield made
    made.kill()


def without_events(text: str) -> str:
    """Of what a server has written, what is no line of the log."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line))


class Stream(threading.Thread):
    """Reads an answer as it comes."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._server = server
        self.start()

    def run(self) -> None:
        body = {**ENDLESS, "stream": True}
        with httpx.stream("POST", self._server.url + "/v1/completions", json=body, timeout=LIMIT_S) as answer:
            self.lines += [line for line in answer.iter_lines() if line]

    def wait_begun(self) -> None:
        self._server.until(lambda: self._server.account()["driver"]["requests_running"] == 1)

    def last(self) -> str:
        self.join(LIMIT_S)
        return self.lines[-1]


def test_a_day_of_a_server(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    server.until(lambda: server.status("/health") == 200)
    server.wait_ready()
    assert "The server is fired up and ready to roll!" in server.log
    assert "ranks weights" not in without_events(server.log), "a log has no bars"
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    online = server.complete(body).json()["choices"][0]["token_ids"]
    assert len(online) == 6

    lines = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    lines.write_text("\n".join([json.dumps(body), "{", json.dumps(chat), "", json.dumps({**body, "n": 2})]))
    command = [COMMAND, "infer", "--model", str(checkpoint), "--input", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stderr == ""
    one, error, message, two = (json.loads(line) for line in done.stdout.splitlines())
    assert one["choices"][0]["token_ids"] == online
    assert error["error"]["code"] == "invalid_json"
    assert message["object"] == "chat.completion" and message["usage"]["completion_tokens"] <= 3
    assert [c["token_ids"] for c in two["choices"]] == [online, online]

    with httpx.stream("POST", server.url + "/v1/completions", json={**ENDLESS, "stream": True}, timeout=LIMIT_S) as gone:
        events = gone.iter_lines()
        next(events)
        assert server.account()["driver"]["requests_running"] == 1
    server.until(lambda: bool(server.account()["idle"]))
    assert 0 < server.decode_steps() < ENDLESS["max_tokens"] / 2, "nobody decodes for who is gone"

    pids = [server.process.pid, *server.rank_pids()]
    os.killpg(server.process.pid, signal.SIGTERM)  # the whole group, as a terminal or a service manager does
    assert server.end() == 0
    server.until(lambda: not any(_is_alive(pid) for pid in pids))


def test_infer_without_a_model_asks_the_one_of_the_package(tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}))
    command = [COMMAND, "infer", "--input", str(lines), "--set", "model.default_max_tokens=64"]
    with terminal(columns=200) as seen:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=seen.stream, text=True, check=True, timeout=LIMIT_S)
        first, *start = seen.screen()
    answer = json.loads(done.stdout)
    assert (answer["model"], answer["choices"][0]["finish_reason"]) == ("longcat-tiny", "stop")
    assert "LongCat" in answer["choices"][0]["message"]["content"]
    assert "no --model" in first
    assert len(start) == 2 and re.fullmatch(r"ranks weights: \d+\.\d MB in \d+\.\d s", start[0]), start


def test_a_drain_lets_what_runs_finish_and_a_second_signal_cuts_it(server: Server) -> None:
    server.wait_ready()
    stream = Stream(server)
    stream.wait_begun()
    os.killpg(server.process.pid, signal.SIGTERM)
    server.until(lambda: server.status("/ready") == 503)
    refused = server.complete({"prompt": [5], "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert stream.is_alive() and server.status("/health") == 200
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.end() == 3
    assert json.loads(stream.last().removeprefix("data: "))["error"]["code"] == "draining"


def test_a_killed_rank_ends_requests_and_the_process(server: Server) -> None:
    server.wait_ready()
    stream = Stream(server)
    stream.wait_begun()
    (rank,) = server.rank_pids()
    os.kill(rank, signal.SIGKILL)
    assert server.end() == 1
    assert json.loads(stream.last().removeprefix("data: "))["error"]["code"] == "rank_lost"
    assert "rank_lost" in server.log


def test_a_terminal_sees_the_start_and_a_killed_driver_leaves_no_rank_behind(checkpoint: Path, tmp_path: Path) -> None:
    with terminal(columns=200) as seen:
        server = Server(checkpoint, tmp_path / "log", stderr=seen.stream)
        try:
            server.wait_ready()
            written = seen.seen()
            (rank,) = server.rank_pids()
            os.kill(server.process.pid, signal.SIGKILL)
            server.until(lambda: not _is_alive(rank))
        finally:
            server.kill()
    lines = without_events("\n".join(screen_of(written)))
    assert re.search(r"\nranks processes: 1 processes in [\d.]+ s\nranks weights: [\d.]+ MB in [\d.]+ s\n*$", lines), lines
    assert "ranks processes: [....................]   0%  0 of 1 processes" in written
    assert "The server is fired up and ready to roll!" in written


def test_what_cannot_work_is_refused_before_it_starts(checkpoint: Path, tmp_path: Path) -> None:
    missing = Server(tmp_path / "nowhere", tmp_path / "log1")
    assert missing.end() == 2 and "error: model.path=" in missing.log and "Traceback" not in missing.log
    taken = wire.BlockingSocket("pull", "tcp://127.0.0.1:*", bind=True, admission=OPEN)
    port = taken.endpoint.rsplit(":", 1)[1]
    try:
        second = Server(checkpoint, tmp_path / "log2", "--port", port)
        assert second.end() == 2 and port in second.log and "Traceback" not in second.log
    finally:
        taken.close()
    absent = tmp_path / "absent.jsonl"
    command = [COMMAND, "infer", "--model", str(checkpoint), "--input", str(absent)]
    assert subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S).returncode == 2


def test_a_checkpoint_that_lacks_a_tensor_ends_with_its_name(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    server = Server(broken, tmp_path / "log")
    assert server.end() == 2
    assert "error:" in server.log


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()  # a child is listed with the thread that started it
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
