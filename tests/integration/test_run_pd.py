"""`deploy/run_pd.sh` as an operator uses it: start, ask, look, stop; and nothing is left.

Runs the default topology on ports of its own. The installation itself is not tried here: the script finds an up-to-date
environment (that of the tests) through its stamp.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longcat_pd.cluster.processes import kill_sessions
from longcat_pd.cluster.record import RunFolder, State
from tests.clone import ROOT, Clone
from tests.ports import free_base
from tests.topology import IDLE_S

READY = "The server is fired up and ready to roll!"
QUESTION = "你好，请介绍一下自己"


@dataclass(frozen=True, kw_only=True)
class Started:
    """What runs, the command that start tells to try, and what it told of its steps."""

    state: State
    curl: str
    told: str


def verb(clone: Clone, name: str, *rest: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return clone.run("run_pd.sh", name, *rest, timeout_s=timeout_s)


def folder_of(clone: Clone) -> RunFolder:
    return RunFolder(clone.path / ".run" / "local-cpu")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


def shared_memory() -> set[Path]:
    """What lies there but semaphores, which other tests beside this one make and the product does not."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@pytest.fixture(scope="module")
def shared_memory_before() -> set[Path]:
    return shared_memory()


@pytest.fixture(scope="module")
def base() -> int:
    return free_base(250)


@pytest.fixture(scope="module")
def started(clone: Clone, base: int, shared_memory_before: set[Path]) -> Iterator[Started]:
    ports = (
        f"load_balancer.port={base}",
        f"prefill.instances.0.http_port={base + 20}",
        f"decode.instances.0.http_port={base + 120}",
    )
    settings = [part for item in ports for part in ("--set", item)]
    done = verb(clone, "start", *settings, timeout_s=300.0)
    state = folder_of(clone).read()
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert state is not None
        yield Started(
            state=state, curl=next(line for line in done.stdout.splitlines() if line.startswith("curl ")), told=done.stderr
        )
    finally:
        if state is not None:
            kill_sessions(state.processes)


@pytest.fixture(scope="module")
def running(started: Started) -> State:
    return started.state


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "", "messages": messages, "max_tokens": 24, "temperature": 0.7, **fields}


def test_the_printed_curl_is_that_of_the_readme_and_is_answered(started: Started, base: int) -> None:
    assert started.curl.replace(str(base), "8081") in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    command = f"{started.curl} --silent --show-error --noproxy '*'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert 1 <= usage["completion_tokens"] <= 64
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_steps_of_a_start_are_told_by_instance_with_seconds(clone: Clone, started: Started) -> None:
    lines = started.told.splitlines()
    assert "\x1b" not in started.told and "error" not in started.told
    for name, num_ranks in (("p0", 4), ("d0", 2)):
        own = [line for line in lines if line.startswith(f"{name} ")]
        assert re.fullmatch(
            rf"{name} processes: {num_ranks} processes in \d+\.\d s", own[own.index(f"{name} processes: begins") + 1]
        )
        assert [line for line in own if re.fullmatch(rf"{name} weights: \d+\.\d MB in \d+\.\d s", line)], own
        assert [line for line in own if re.fullmatch(rf"{name} warm-up: \d+ communicators in \d+\.\d s", line)], own
        assert len(own) == len(set(own)) == 6, "two lines for each step"
        log = (folder_of(clone).path / f"{name}.log").read_text(encoding="utf-8")
        assert log.count("weights_loaded") == 1 and len(log.splitlines()) < 60, "the log is no place for progress"


def test_a_stream_is_whole(running: State) -> None:
    events = []
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        call = client.stream("POST", f"{running.url}/v1/chat/completions", json=body(stream=True))
        with call as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_openai_client_works_both_ways(running: State) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        settings: Any = {"model": "longcat-tiny", "messages": messages, "max_tokens": 64, "temperature": 0}
        whole = client.chat.completions.create(**settings)
        with client.chat.completions.create(**settings, stream=True) as stream:
            chunks = list(stream)
        assert whole.choices[0].message.content == "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        assert "我是 LongCat-tiny" in (whole.choices[0].message.content or "")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**settings, "temperature": 9})


def test_the_log_tells_the_story_of_a_request_and_none_of_its_text(clone: Clone, running: State) -> None:
    headers = {"X-Request-Id": "the-story"}
    asked = {**body(stream=False), "return_token_ids": True}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=asked, headers=headers, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    until_idle(running.url)  # P's line may come behind the answer
    told = verb(clone, "logs", "--request", "the-story").stdout.splitlines()
    ends = {line.split()[0]: line for line in told if " request_finished " in line}
    assert len(told) == 3 and sorted(ends) == ["balancer", "d0", "p0"], told
    assert all(line.partition("| ")[2].startswith("20") and " request=the-story" in line for line in told)
    assert all(" pair=p0,d0 attempt=1" in line for line in told) and len({_fact(line, "transfer") for line in told}) == 1
    for name, facts in (
        ("p0", "queue prefill transfer"),
        ("d0", "queue transfer ttft tpot"),
        ("balancer", "queue prefill"),
    ):
        assert all(f" {fact}_ms=" in ends[name] for fact in facts.split()), ends[name]
    assert _fact(ends["d0"], "accepted").isdecimal()

    whole = verb(clone, "logs", "--since", "1d").stdout
    times = [line.partition("| ")[2][:24] for line in whole.splitlines() if line.partition("| ")[2].startswith("20")]
    assert times == sorted(times) and len(times) > 30
    for name in ("p0", "d0", "balancer"):
        events = {line.split()[4] for line in whole.splitlines() if line.split()[0] == name and len(line.split()) > 4}
        wanted = {"starting", "config_resolved", "plan", "listening", "ready"}
        wanted |= {"instance_in"} if name == "balancer" else {"weights_loaded", "warmed_up", "peer_up"}
        assert wanted <= events, wanted - events
    text = answer.json()["choices"][0]["message"]["content"]
    assert QUESTION not in whole and (len(text) < 4 or text not in whole)
    assert verb(clone, "logs", "--level", "error").stdout == ""


def until_idle(url: str) -> None:
    limit = time.monotonic() + IDLE_S
    while not (account := httpx.get(f"{url}/debug/accounting", timeout=60.0, trust_env=False).json())["idle"]:
        assert time.monotonic() < limit, account
        time.sleep(0.05)


def _fact(line: str, name: str) -> str:
    return line.partition(f" {name}=")[2].split()[0]


def test_the_operator_sees_a_ready_cluster(clone: Clone, running: State) -> None:
    for name in ("p0", "d0"):
        assert READY in (folder_of(clone).path / f"{name}.log").read_text(encoding="utf-8")
    status = verb(clone, "status")
    assert status.returncode == 0, status.stdout
    assert status.stdout.count(READY) == 3  # prefill, decode, balancer
    assert "ranks 4/4" in status.stdout
    assert "ranks 2/2" in status.stdout
    again = verb(clone, "start")
    assert again.returncode == 2
    assert "already running" in again.stderr
    logs = verb(clone, "logs", "--lines", "5")
    assert all(f"{name:<12} | " in logs.stdout for name in ("p0", "d0", "balancer"))


def test_stop_leaves_nothing(clone: Clone, running: State, shared_memory_before: set[Path]) -> None:
    begun = {process.pid for process in running.processes}
    stopped = verb(clone, "stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not begun & _sessions()
    for use in running.ports:
        with socket.socket() as probe:
            assert probe.connect_ex((use.host, use.port)) != 0, f"{use.purpose} still listens on {use.port}"
    assert shared_memory() <= shared_memory_before
    assert folder_of(clone).read() is None
    assert verb(clone, "status").returncode == 3


def test_what_cannot_work_is_refused_before_anything_is_started(clone: Clone) -> None:
    settings = ["--set", "decode.parallel.kvp_size=5", "--set", "prefill.engine.block_sise=16"]
    refused = verb(clone, "start", *settings)
    assert refused.returncode == 2
    assert "error: prefill.engine.block_sise: unknown key" in refused.stderr
    assert "error: decode.parallel.attn_tp_size=2: differs from decode.parallel.kvp_size=5" in refused.stderr
    assert folder_of(clone).read() is None


def test_a_list_of_machines_beside_the_script_is_laid_over_the_file(clone: Clone) -> None:
    example = (clone.path / "deploy" / "hosts.example.sh").read_text(encoding="utf-8")
    hosts = clone.path / "deploy" / "hosts.sh"
    hosts.write_text(example, encoding="utf-8")
    try:
        refused = verb(clone, "start")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert (
            "--iplist: has 4 addresses, local-cpu.yaml needs 2: decode.instances.0 1, prefill.instances.0 1"
            in refused.stderr
        )
        again = verb(clone, "start", "--iplist", "10.0.0.1")
        assert "--iplist: has 1 addresses" in again.stderr, "what the command line says counts more"
        hosts.write_text('MODEL_PATH="/no such/folder"\n', encoding="utf-8")
        assert "error: model.path=/no such/folder: " in verb(clone, "start").stderr
    finally:
        hosts.unlink()
    assert verb(clone, "--help").returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_the_scripts_are_sound() -> None:
    scripts = [str(script) for script in sorted((ROOT / "deploy").glob("*.sh"))]
    done = subprocess.run(["shellcheck", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _sessions() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found.add(int(fields[3]))
    return found
