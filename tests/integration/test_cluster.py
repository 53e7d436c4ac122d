"""The verbs of run_pd.sh over stand-ins for the services: what was started is ended, a failed start leaves nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from longcat_pd.cluster import agent_stop
from longcat_pd.cluster.jobs import Event, Job, Order, Orders, as_line
from longcat_pd.cluster.processes import Children, Process, kill_sessions, life, send, wait_for_end
from longcat_pd.cluster.record import RunFolder, State
from longcat_pd.errors import ConfigError
from tests.ports import free_base
from tests.unit.test_resolve import CHECKPOINT

# Answers /ready, starts a child that outlives it, ends on SIGTERM.
SERVICE = """
import http.server, json, signal, subprocess, sys
subprocess.Popen(["sleep", "600"])
class Face(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        step = {"step": "weights", "unit": "bytes", "done": 7000, "total": 7000, "seconds": 1.25, "ended": True}
        told = {"ready": True, "ranks": {"total": 2, "ok": 2}, "peers": {"d0": "up"}, "reasons": [], "start": [step]}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Face)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("The server is fired up and ready to roll!", flush=True)
server.serve_forever()
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(CHECKPOINT))
    (tmp_path / "weights" / "model.safetensors").touch()
    base = free_base(30)
    sections = {
        "model": {"path": "weights"},
        "load_balancer": {"port": base},
        "prefill": {"instances": [{"name": "p0", "http_port": base + 10}]},
        "decode": {"instances": [{"name": "d0", "http_port": base + 20}]},
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
        yield dataclasses.replace(service, arguments=("stand_in_" + service.name + ".py", port))

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
    told = sorted(run.err.splitlines())
    assert told == [f"{name} weights: {said}" for name in ("d0", "p0") for said in ("7.0 kB in 1.2 s", "begins")]
    begun = {process.pid for process in run.processes}
    assert len(begun) == 3
    assert begun <= sessions()

    assert run("status") == 0
    shown = run.out
    assert "ready, ranks 2/2, d0 up" in shown
    assert shown.count("The server is fired up and ready to roll!") == 3
    assert run("status", "--iplist", "10.0.0.1 10.0.0.2 10.0.0.3", "--cluster-key", "/k") == 0, "another list bars nothing"

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


def test_logs_of_another_cluster_that_runs_are_left_alone(run: Runner, tmp_path: Path) -> None:
    assert run("start") == 0, run.err
    log = run.folder.path / "d0.log"
    run.config = tmp_path / "other.yaml"
    tree = json.loads((tmp_path / "small.yaml").read_text())
    run.config.write_text(json.dumps({**tree, "log_dir": str(run.folder.path)}))
    assert run("start") == 2
    assert f"error: log_dir={log.parent}: {log} is being written by {tmp_path / 'small.yaml'}" in run.err
    assert not Path(f"{log}.1").exists()
    run.config = tmp_path / "small.yaml"
    run("stop")


def test_stop_waits_no_longer_than_told_and_kills(run: Runner) -> None:
    run.scripts["p0"] = SERVICE.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    assert run("start") == 0
    assert run("stop", "--timeout-s", "3") == 1
    assert "did not end by themselves: p0" in run.out
    assert run.folder.read() is None


def test_a_foreign_process_under_a_recorded_id_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        mistaken = Process(name="p0", pid=stranger.pid, started=1, life=life(), log="", ready_url="")
        assert not mistaken.is_alive
        send(mistaken, signal.SIGKILL)
        assert kill_sessions([mistaken]) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_a_machine_does_now_has_nothing_to_do_with_a_life_before(tmp_path: Path) -> None:
    """After a boot a daemon may be in a session that has the number of a service that ran before."""
    children = Children()
    leader = children.launch("x", ["sh", "-c", "sleep 600 & sleep 0.1"], log=tmp_path / "x.log", ready_url="")
    assert wait_for_end([leader], timeout_s=20.0, all_of_them=True)
    assert leader.pid in sessions(), "its child is left"
    before = dataclasses.replace(leader, life="another boot")
    running = children.launch("y", ["sleep", "600"], log=tmp_path / "y.log", ready_url="")
    assert running.is_alive and not dataclasses.replace(running, life="another boot").is_alive
    assert kill_sessions([before, dataclasses.replace(running, life="another boot")]) == []
    assert leader.pid in sessions() and running.is_alive
    assert len(kill_sessions([leader, running])) == 2
    assert [children.exit_status(process) for process in (leader, running)] == [0, 128 + signal.SIGKILL]


def test_a_record_that_was_cut_off_is_told_and_hinders_no_other_cluster(run: Runner) -> None:
    other = RunFolder(run.folder.path.parent / "other")
    with other.one_at_a_time():
        (other.path / "state.json").write_text('{"config": "/x.yaml", "proc')
    assert run("start") == 0, run.err
    assert run("status") == 0
    with pytest.raises(ConfigError, match="the record of what runs is damaged"):
        other.read()
    record = run.folder.path / "state.json"
    whole = record.read_text()
    record.write_text("")
    assert run("start") == 2 and run("stop") == 2
    assert f"error: {record}: the record of what runs is damaged" in run.err
    record.unlink()
    assert run("stop") == 1
    assert "is recorded, so nothing was ended, but its ports are taken:" in run.err and "is taken by pid " in run.err
    record.write_text(whole)
    run("stop")
    assert run.folder.read() is None


def test_orders_that_come_together_are_all_heard(tmp_path: Path) -> None:
    """Who is interrupted while services drain says so at once."""
    children, folder = Children(), RunFolder(tmp_path / "run" / "c")
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    drains = children.launch("d0", [sys.executable, "-c", code], log=tmp_path / "d0.log", ready_url="http://127.0.0.1:1")
    deadline = time.monotonic() + 20.0
    while "up" not in (tmp_path / "d0.log").read_text():
        assert time.monotonic() < deadline
    with folder.one_at_a_time():
        folder.write(State(config="c", url="", drain_s=60.0, ports=(), processes=(drains,)))
    job = Job(config="c", text="", folder=str(folder.path), logs="", url="", nodes=(), services=(), ports=())
    read, write = os.pipe()
    os.write(write, as_line(Order(verb="end", group="driver", within_s=60.0)) + as_line(Order(verb="finish")))
    said: list[Event] = []
    began = time.monotonic()
    agent_stop.stop(job, Orders(read), said.append)
    assert time.monotonic() - began < 20.0
    assert said[-1].stopped is not None and said[-1].stopped.late == ("d0",)
    assert children.exit_status(drains) == 128 + signal.SIGKILL
    os.close(read)
    os.close(write)


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
