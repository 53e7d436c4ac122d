"""The agent's ``start``: what stands against it on this machine, then its services, until the whole cluster is ready.

Ends what it began unless it is told to keep it: also when whoever gave the job is gone.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from longcat_pd import own
from longcat_pd.cluster import agent_checks
from longcat_pd.cluster.agent_stop import end_all
from longcat_pd.cluster.jobs import Answer, Ended, Event, Found, Gone, Job, Orders, Progress, Started, named
from longcat_pd.cluster.processes import Children, Process, kill_sessions, wait_for_news
from longcat_pd.cluster.ready import LogWatch, ask, reasons, start_of
from longcat_pd.cluster.record import RunFolder, State, last_lines
from longcat_pd.config.services import BALANCER, Service
from longcat_pd.errors import ConfigError
from longcat_pd.progress.steps import Stage

DECISION_S = 900.0  # until all machines of a cluster have told what stands against a start
LOOK_S = 0.5  # between two looks at /ready and the logs; the end of a process is noticed at once
FAILED_DRAIN_S = 5.0  # what never served has nothing to finish
LAST_LINES = 25
_TREE = Path(__file__).parents[2]

# The environment is kept while setup files are sourced, which may want it otherwise, or show what they do.
_SHELL = """\
longcat_pd_command=("$@") longcat_pd_env=()
while IFS= read -r -d '' pair; do longcat_pd_env+=("$pair"); done
exec </dev/null
set --
{sourced}
{{ set +xv; }} 2>/dev/null
for pair in ${{longcat_pd_env[@]+"${{longcat_pd_env[@]}}"}}; do export "$pair" || exit 2; done
unset pair
exec "${{longcat_pd_command[@]}}"
"""

Say = Callable[[Event], None]


def start(job: Job, orders: Orders, say: Say) -> None:
    """Say what was found; after ``go`` start, and say what happens; after ``keep`` leave it running."""
    folder = RunFolder(Path(job.folder))
    with folder.one_at_a_time():
        before = _before(folder, job)
        alive = before.alive if before is not None else []
        if before is not None and not alive:
            kill_sessions(before.processes)  # left behind by processes that died
        findings = () if alive else tuple(agent_checks.findings(job, folder))
        names = named((process.name, process.pid) for process in alive)
        found = Found(is_recorded=before is not None, alive=names, findings=findings, code=_TREE.name)
        say(Event(found=found))
        order = orders.next(DECISION_S)
        if order is None or order.verb != "go" or alive or findings:
            return
        children = Children()
        if not job.is_part:
            folder.clear()
        try:
            state = _launch_all(job, folder, children=children, say=say)
        except OSError as error:  # no room for a log, or for the record
            kill_sessions(children.processes)
            folder.drop(children.processes)
            raise ConfigError(f"nothing can be started: {error}") from error
        if not _is_kept(state, children, orders=orders, say=say):
            say(Event(stopped=end_all(folder, state, within_s=FAILED_DRAIN_S)))


def _before(folder: RunFolder, job: Job) -> State | None:
    """What is recorded of the services that are to be started."""
    state = folder.read()
    return state.of([service.name for service in job.services], job.ports) if job.is_part and state is not None else state


def _launch_all(job: Job, folder: RunFolder, *, children: Children, say: Say) -> State:
    """Start every service and record each one at once, so that whatever happens now, ``stop`` finds it."""
    state = State(
        config=job.config,
        url=job.url,
        drain_s=job.drain_s,
        ports=job.ports,
        processes=(),
        tree=str(_TREE),
    )
    for service in job.services:
        log = Path(job.logs) / f"{service.name}.log"
        command = _command(service, job, folder)
        with _environment(service) as stdin:
            process = children.launch(service.name, command, log=log, ready_url=service.url, stdin=stdin)
        state = State(**{**vars(state), "processes": (*state.processes, process)})
        folder.add(state)
        say(Event(started=Started(service=process.name, pid=process.pid, log=process.log)))
    return state


def _command(service: Service, job: Job, folder: RunFolder) -> list[str]:
    """The service, once a shell has laid its environment, which comes on standard input, over that of the setup files."""
    sourced = (f"source {name} || {{ echo error: {name} failed; exit 2; }}" for name in map(shlex.quote, job.setup_files))
    script = _SHELL.format(sourced="\n".join(sourced))
    return ["bash", "-c", script, "bash", *own.command(*service.arguments), "--config", str(folder.config)]


@contextlib.contextmanager
def _environment(service: Service) -> Iterator[int]:
    """A file of its NAME=VALUE, which no folder has: every user sees command lines, and what is given may be secret."""
    with os.fdopen(os.memfd_create("environment"), "wb") as file:
        file.write(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in service.env.items()))
        file.flush()
        file.seek(0)
        yield file.fileno()


def _is_kept(state: State, children: Children, *, orders: Orders, say: Say) -> bool:
    """Tell what happens until an order comes; whether that is to keep what was started."""
    running = list(state.processes)
    logs = {process.name: LogWatch(process.log) for process in running}
    balancer = next((process for process in running if process.name == BALANCER), None)
    said = Answer(is_ready=False, reasons=())
    starts = _Starts(state.processes, say)
    try:
        while True:
            if balancer in running and balancer is not None:
                answer = _answer(balancer)
                if answer != said:
                    said = answer
                    say(Event(answer=answer))
            for name in [name for name, log in logs.items() if log.look()]:
                starts.end(name)
                say(Event(ready=name))
            starts.look()
            wait_for_news(running, fd=orders.fd, timeout_s=LOOK_S)
            for process, status in [(each, children.exit_status(each)) for each in running]:
                if status is not None:  # all of its threads have ended too
                    running.remove(process)
                    starts.forget(process.name)
                    lines = tuple(last_lines(process.log, LAST_LINES))
                    say(Event(ended=Ended(service=process.name, status=status, log=process.log, lines=lines)))
            if (order := orders.next(0.0)) is not None:
                return order.verb == "keep"
    except Gone:
        return False


class _Starts:
    """Drivers that do not serve yet, and what each has said last of how far it is."""

    def __init__(self, processes: Iterable[Process], say: Say) -> None:
        self._urls = {process.name: process.ready_url for process in processes if process.ready_url}
        self._urls.pop(BALANCER, None)  # it has no ranks
        self._said: dict[str, tuple[Stage, ...]] = {}
        self._say = say

    def look(self) -> None:
        """Ask them, and say what has changed."""
        for name in self._urls:
            self._look_at(name)

    def end(self, name: str) -> None:
        """It serves: say for the last time how it went."""
        if name in self._urls:
            self._look_at(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        """It is asked no more."""
        self._urls.pop(name, None)

    def _look_at(self, name: str) -> None:
        stages = start_of(ask(self._urls[name])[1])
        if stages and stages != self._said.get(name):
            self._said[name] = stages
            self._say(Event(progress=Progress(service=name, stages=stages)))


def _answer(balancer: Process) -> Answer:
    status, answer = ask(balancer.ready_url)
    return Answer(is_ready=status == http.client.OK, reasons=tuple(reasons(answer)))
