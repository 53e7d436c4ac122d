"""Processes that this product began: started, recognised later, waited for and ended, by identity and never by name.

A process is its id and its start time, since ids are used again, in one life of the machine; each leads a session of its
own, so that whatever it started can be found after its death. Knows nothing of roles or configuration. Linux: /proc and
process descriptors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.errors import ConfigError

# no such id; or one that a thread of another process has by now, with the second number before Linux 6.15
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
KILL_S = 20.0  # until a process that was killed has ended: one that waits for a device or a disk may not


class StillAlive(ConfigError):
    """Processes that were killed and have not ended. ``killed``: the ids of all that were killed; ``left``: of these."""

    def __init__(self, killed: Sequence[int], left: Sequence[int]) -> None:
        super().__init__(f"{KILL_S:g} s after they were killed these processes have not ended: {', '.join(map(str, left))}")
        self.killed = tuple(killed)
        self.left = tuple(left)


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process that ``Children`` started. ``started``: clock ticks after boot. ``ready_url`` is asked by status.

    ``life``: of the machine (``life``), outside of which id and start time mean nothing.
    """

    name: str
    pid: int
    started: int
    life: str
    log: str
    ready_url: str

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs; one that has ended and was not yet reaped does not."""
        found = _look_at(self)
        return found is not None and found.state not in "ZX"


def life() -> str:
    """Of this machine: from its boot, or as a container from its start; another life gives the same ids to others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@dataclass(frozen=True)
class _Look:
    """What /proc says of a process."""

    pid: int
    state: str
    session: int
    started: int


class Children:
    """The processes that this one started, so that their exit statuses can be told. They outlive it."""

    def __init__(self) -> None:
        self._handles: dict[Process, subprocess.Popen[bytes]] = {}

    def launch(
        self, name: str, command: Sequence[str], *, log: Path, ready_url: str, stdin: int = subprocess.DEVNULL
    ) -> Process:
        """Start a command in a session of its own, all output into a new file ``log``, ``stdin`` as its standard input.

        The one before stays, as ``….log.1``: who starts again after a crash still wants to know why.
        """
        if log.exists():
            log.replace(f"{log}.1")
        with log.open("wb") as output:
            handle = subprocess.Popen(
                list(command), stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        found = _look(handle.pid)
        assert found is not None, "a child that was not waited for is in /proc, dead or alive"
        process = Process(name=name, pid=handle.pid, started=found.started, life=life(), log=str(log), ready_url=ready_url)
        self._handles[process] = handle
        return process

    @property
    def processes(self) -> list[Process]:
        """All that were started, also those that have ended."""
        return list(self._handles)

    def exit_status(self, process: Process) -> int | None:
        """Exit status as a shell shows it (128 + n after signal n); None while it runs."""
        code = self._handles[process].poll()
        return 128 - code if code is not None and code < 0 else code


def wait_for_end(processes: Sequence[Process], *, timeout_s: float, all_of_them: bool) -> bool:
    """Wait until one, or all, of the processes have ended. False: time is over. No process: True at once."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        waiting = {fd for process in processes if (fd := _descriptor(process, stack)) is not None}
        if len(waiting) < len(processes) and not all_of_them:
            return True
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting:
            ended = poller.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            if not ended:
                return False
            for fd, _ in ended:
                poller.unregister(fd)
                waiting.discard(fd)
            if not all_of_them:
                return True
    return True


def wait_for_news(processes: Sequence[Process], *, fd: int, timeout_s: float) -> None:
    """Wait until one of the processes has ended, something can be read from ``fd``, or time is over."""
    with contextlib.ExitStack() as stack:
        waiting = [_descriptor(process, stack) for process in processes]
        if None in waiting:
            return
        poller = select.poll()
        for descriptor in (fd, *waiting):
            assert descriptor is not None
            poller.register(descriptor, select.POLLIN)
        poller.poll(max(timeout_s, 0.0) * 1000)


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process; nothing happens if it has ended."""
    with contextlib.ExitStack() as stack:
        fd = _descriptor(process, stack)
        if fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)


def kill_sessions(processes: Sequence[Process], *, grace_s: float = 0.0) -> list[int]:
    """Kill what is left, after ``grace_s``, of the sessions that these processes lead or led. Returns the ids.

    Raises StillAlive where something has not ended ``KILL_S`` later.
    """
    wait_for_end(list(_members(processes)), timeout_s=grace_s, all_of_them=True)
    killed: list[int] = []
    deadline = time.monotonic() + KILL_S
    while members := list(_members(processes)):
        for member in members:
            send(member, signal.SIGKILL)
        killed += [member.pid for member in members if member.pid not in killed]
        if time.monotonic() >= deadline:
            raise StillAlive(killed, [member.pid for member in members])
        wait_for_end(members, timeout_s=min(deadline - time.monotonic(), 5.0), all_of_them=True)
    wait_for_end(processes, timeout_s=5.0, all_of_them=True)
    return killed


def _members(processes: Sequence[Process]) -> Iterator[Process]:
    """Live processes in the sessions of ``processes``. A session whose leader's id was given to another is not ours."""
    this_life = life()
    leaders = {process.pid: process for process in processes if process.life == this_life}
    foreign = {pid for pid, ours in leaders.items() if (now := _look(pid)) is not None and now.started != ours.started}
    for entry in Path("/proc").iterdir():
        found = _look(int(entry.name)) if entry.name.isdigit() else None
        if found is None or found.state in "ZX" or found.session not in leaders or found.session in foreign:
            continue
        leader = leaders[found.session]
        yield dataclasses.replace(leader, pid=found.pid, started=found.started)


def _descriptor(process: Process, stack: contextlib.ExitStack) -> int | None:
    """A descriptor of the process, closed by ``stack``; None if it is gone.

    One that has ended and was not yet reaped has a descriptor: it tells whether all of its threads have ended too.
    """
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        return None
    stack.callback(os.close, fd)
    return fd if _look_at(process) is not None else None


def _look_at(process: Process) -> _Look | None:
    """None if it is gone, whoever has its id now."""
    found = _look(process.pid)
    return found if found is not None and found.started == process.started and process.life == life() else None


def _look(pid: int) -> _Look | None:
    """None also for processes of others, where /proc hides them."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Look(pid=pid, state=fields[0], session=int(fields[3]), started=int(fields[19]))
