"""Ends of processes that the agent started: those that do not come, that come in parts, and that others hide."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.cluster import agent_start, agent_stop, processes
from longcat_pd.cluster.jobs import Event, Orders
from longcat_pd.cluster.processes import Children, Process, StillAlive, kill_sessions, life
from longcat_pd.cluster.record import RunFolder, State

# The first thread ends alone, as of a process that exits while another of its threads is in a device's driver.
IN_PARTS = """
import ctypes, os, platform, signal, sys, threading
signal.alarm(300)
def rest():
    open(sys.argv[1]).read()
    print("the end", flush=True)
    os._exit(7)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def begun(folder: Path, *command: str) -> tuple[Children, State]:
    children = Children()
    process = children.launch("d0", command, log=folder / "d0.log", ready_url="")
    state = State(config="c.yaml", url="", drain_s=1.0, ports=(), processes=(process,))
    RunFolder(folder).write(state)
    return children, state


def test_what_does_not_end_though_it_was_killed_is_told_and_stays_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, state = begun(tmp_path, "sleep", "60")
    (process,) = state.processes
    with monkeypatch.context() as patched:
        patched.setattr(processes, "send", lambda *_: None)  # as a process that waits for a disk
        patched.setattr(processes, "KILL_S", 0.2)
        with pytest.raises(StillAlive, match=f"have not ended: {process.pid}$"):
            kill_sessions(state.processes)
        stopped = agent_stop.finish(RunFolder(tmp_path), state)
    assert (stopped.num_killed, stopped.late, stopped.left) == (1, ("d0",), (process.pid,))
    assert RunFolder(tmp_path).read() == state
    stopped = agent_stop.finish(RunFolder(tmp_path), state)
    assert (stopped.num_killed, stopped.left) == (1, ())
    assert RunFolder(tmp_path).read() is None
    assert children.exit_status(process) == 128 + signal.SIGKILL


def test_processes_that_are_hidden_are_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children, state = begun(tmp_path, "sleep", "60")
    read_text = Path.read_text

    def hidden(path: Path, **how: Any) -> str:
        if str(path) == "/proc/1/stat":
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", hidden)
        killed = kill_sessions(state.processes)
    assert killed == [state.processes[0].pid]
    assert children.exit_status(state.processes[0]) == 128 + signal.SIGKILL


def test_an_id_that_a_thread_of_another_has_now_is_nobody_of_ours(tmp_path: Path) -> None:
    over, ids = threading.Event(), list[int]()
    begun = threading.Event()

    def stay() -> None:
        ids.append(threading.get_native_id())
        begun.set()
        over.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        begun.wait()
        process = Process(name="d0", pid=ids[0], started=1, life=life(), log=str(tmp_path / "d0.log"), ready_url="")
        state = State(config="c.yaml", url="", drain_s=1.0, ports=(), processes=(process,))
        RunFolder(tmp_path).write(state)
        stopped = agent_stop.end_all(RunFolder(tmp_path), state, within_s=1.0)
    finally:
        over.set()
        thread.join()
    assert (stopped.num_killed, stopped.late, stopped.left) == (0, (), ())
    assert RunFolder(tmp_path).read() is None


def test_a_process_has_ended_when_all_of_its_threads_have(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # the last thread ends when it has been opened
    children, state = begun(tmp_path, sys.executable, "-c", IN_PARTS, str(gate))
    (process,) = state.processes
    deadline = time.monotonic() + 60.0
    while process.is_alive:
        assert time.monotonic() < deadline
        os.sched_yield()
    assert children.exit_status(process) is None, "one thread is left"
    down, up = os.pipe()
    said: list[Event] = []

    def say(event: Event) -> None:
        said.append(event)
        if event.ended is not None:
            os.close(up)  # whoever gave the job has heard it

    opening = threading.Timer(1.0, gate.write_text, [""])
    opening.start()
    assert not agent_start._is_kept(state, children, orders=Orders(down), say=say)
    opening.join()
    os.close(down)
    (ended,) = (event.ended for event in said if event.ended is not None)
    assert (ended.service, ended.status, ended.lines) == ("d0", 7, ("the end",))
