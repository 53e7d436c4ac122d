"""The verbs of run_pd.sh over stand-ins for the services: what was started is ended, a failed start leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from longcat_pd.cluster.processes import Children, Process, kill_sessions, send, wait_for_end
from longcat_pd.cluster.record import RunFolder
from tests.unit.test_resolve import CHECKPOINT

# Answers /ready, starts a child that outlives it, ends on SIGTERM.
SERVICE = """
import http.server, json, signal, subprocess, sys
subprocess.Popen(["sleep", "600"])
class Face(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"ready": True, "ranks": {"total": 2, "ok": 2}, "peers": {"d0": "up"}, "reasons": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Face)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("The server is fired up and ready to roll!", flush=True)
server.serve_forever()
"""


def free_base() -> int:
    """A port with five free ones behind it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base = int(probe.getsockname()[1])
        try:
            for offset in range(6):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", base + offset))
        except OSError:
            continue
        return base


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(CHECKPOINT))
    (tmp_path / "weights" / "model.safetensors").touch()
    sections = {
        "model": {"path": "weights"},
        "load_balancer": {"port": free_base()},
        "prefill": {"instances": [{"name": "p0", "http_port": free_base()}]},
        "decode": {"instances": [{"name": "d0", "http_port": free_base()}]},
    }
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(sections))
    return file


# The verbs in a process of their own, with scripts in place of the services.
VERBS = """
import dataclasses, sys
from longcat_pd.cluster import __main__ as verbs, machines

real = machines.services

def services(config):
    for service in real(config):
        port = service.url.rsplit(":", 1)[1]
        yield dataclasses.replace(service, arguments=("-m", "stand_in_" + service.name, port))

machines.services = services
sys.exit(verbs.main())
"""


class Runner:
    """Runs a verb; ``out`` and ``err`` are what the last one said."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.folder = RunFolder(config.parent / ".run" / "small")
        self.scripts = {"p0": SERVICE, "d0": SERVICE, "balancer": SERVICE}
        self.out = self.err = ""

    def __call__(self, verb: str, *rest: str) -> int:
        folder = self.config.parent
        for name, script in self.scripts.items():
            (folder / f"stand_in_{name}.py").write_text(script)
        command = [sys.executable, "-c", VERBS, "--root", str(folder), verb, str(self.config), *rest]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        self.out, self.err = done.stdout, done.stderr
        return done.returncode

    @property
    def processes(self) -> Sequence[Process]:
        state = self.folder.read()
        assert state is not None
        return state.processes


@pytest.fixture
def run(config: Path) -> Iterator[Runner]:
    runner = Runner(config)
    yield runner
    state = runner.folder.read()
    if state is not None:
        kill_sessions(state.processes)


def sessions() -> set[int]:
    """Sessions of all live processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found.add(int(fields[3]))
    return found


def test_start_status_logs_stop(run: Runner) -> None:
    assert run("status") == 3
    assert run("start") == 0
    assert "curl -X POST http://127.0.0.1:" in run.out
    begun = {process.pid for process in run.processes}
    assert len(begun) == 3
    assert begun <= sessions()

    assert run("status") == 0
    shown = run.out
    assert "ready, ranks 2/2, d0 up" in shown
    assert shown.count("The server is fired up and ready to roll!") == 3
    assert run("status", "--iplist", "10.0.0.1 10.0.0.2 10.0.0.3") == 0, "another list bars nothing"

    assert run("start") == 2
    assert "already running: d0 (pid" in run.err

    other = RunFolder(run.folder.path.parent / "other")
    assert [state.config for state in other.others()] == [str(run.config)], "who stops another is told of this one"
    assert run.folder.others() == []

    assert run("logs", "--lines", "50") == 0
    assert "ready to roll" in run.out

    run("stop")  # the stand-ins leave a child behind, which is killed and told
    assert "killed 3 processes that did not end by themselves: ranks left behind" in run.out
    assert not begun & sessions()
    assert run.folder.read() is None
    assert run("stop") == 0
    assert run("status") == 3


def test_a_service_that_ends_ends_the_start_and_all_others(run: Runner) -> None:
    run.scripts["d0"] = 'import sys; print("error: block_size differs", flush=True); sys.exit(2)'
    run.scripts["balancer"] = "import signal; signal.pause()"
    assert run("start") == 2
    error = run.err
    assert "the start failed: d0 ended with status 2" in error
    assert "error: block_size differs" in error
    assert run.folder.read() is None
    log = run.folder.path / "p0.log"
    assert log.is_file()
    run.scripts["d0"] = run.scripts["balancer"] = SERVICE
    assert run("start") == 0, "the same command works afterwards"
    assert "block_size differs" in (run.folder.path / "d0.log.1").read_text(), "and the log of the failure is still there"
    assert "block_size differs" not in (run.folder.path / "d0.log").read_text()


def test_a_start_that_takes_too_long_is_ended(run: Runner) -> None:
    run.scripts["balancer"] = "import signal; signal.pause()"
    assert run("start", "--timeout-s", "1.5") == 1
    assert "not ready after 1.5 s: no answer yet" in run.err
    assert run.folder.read() is None


def test_a_port_that_is_taken_is_refused_before_anything_starts(run: Runner) -> None:
    port = json.loads(run.config.read_text())["decode"]["instances"][0]["http_port"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + 2))
        listener.listen()
        assert run("start") == 2
    error = run.err
    assert f"port {port + 2} on 127.0.0.1 (d0 plans) is taken by pid" in error
    assert run.folder.read() is None
    assert run("start", "--set", "decode.engine.block_size=0") == 2
    assert "error: decode.engine.block_size=0: must be at least 1" in run.err


def test_stop_waits_no_longer_than_told_and_kills(run: Runner) -> None:
    run.scripts["p0"] = SERVICE.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    assert run("start") == 0
    assert run("stop", "--timeout-s", "0.5") == 1
    assert "did not end by themselves: p0" in run.out
    assert run.folder.read() is None


def test_a_foreign_process_under_a_recorded_id_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        mistaken = Process(name="p0", pid=stranger.pid, started=1, log="", ready_url="")
        assert not mistaken.is_alive
        send(mistaken, signal.SIGKILL)
        assert kill_sessions([mistaken]) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_ends_are_noticed_and_statuses_told(tmp_path: Path) -> None:
    children = Children()

    def start(code: str) -> Process:
        return children.launch("x", [sys.executable, "-c", code], log=tmp_path / f"{len(code)}.log", ready_url="")

    quick, slow = start("raise SystemExit(7)"), start("import signal; signal.pause()")
    assert wait_for_end([quick, slow], timeout_s=20.0, all_of_them=False)
    assert not wait_for_end([quick, slow], timeout_s=0.1, all_of_them=True)
    assert (children.exit_status(quick), children.exit_status(slow)) == (7, None)
    assert kill_sessions([quick, slow]) == [slow.pid]
    os.waitid(os.P_PID, slow.pid, os.WEXITED | os.WNOWAIT)
    assert children.exit_status(slow) == 128 + signal.SIGKILL
