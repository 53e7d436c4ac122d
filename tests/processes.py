"""A cluster of real processes for tests that kill, stop and start them one by one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from longcat_pd.clock import READY_POLL_S
from longcat_pd.cluster.processes import Children, Process, kill_sessions, send, wait_for_end
from longcat_pd.config import resolve
from longcat_pd.config.services import BALANCER, Service, services
from tests.topology import Topology

READY_S = 150.0  # of a machine that does many things at once
ENDED_S = 90.0


class Processes:
    """Every service of a cluster in a session of its own, so that its ranks can be ended with it.

    ``modules``: what is run in place of a module that a service consists of, with arguments.
    """

    def __init__(self, config: Path, modules: Mapping[str, Sequence[str]] | None = None) -> None:
        self.config = config
        self._modules = modules or {}
        self._services = {service.name: service for service in services(resolve.unresolved(config))}
        self.url = self._services[BALANCER].url
        self.http_urls = {service.name: service.url for service in self._services.values() if service.kind == "driver"}
        self._children = Children()
        self._lives: list[Process] = []
        self.running: dict[str, Process] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._services)

    def start(self, name: str, *overrides: str) -> None:
        """``overrides``: settings that this process alone reads."""
        sets = [word for item in overrides for word in ("--set", item)]
        option, module, *arguments = self._services[name].arguments
        run = [option, *self._modules.get(module, (module,)), *arguments]
        self.launch(name, [*run, "--config", str(self.config), *sets])

    def launch(self, name: str, arguments: Sequence[str]) -> None:
        """In place of the service ``name``: an interpreter with these arguments."""
        log = self.log_file(name, len(self._lives))
        launched = self._children.launch(name, [sys.executable, *arguments], log=log, ready_url="")
        self._lives.append(launched)
        self.running[name] = launched

    def service(self, name: str) -> Service:
        return self._services[name]

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        send(self.running[name], number)

    def wait(self, name: str, seconds: float = ENDED_S) -> int:
        """Exit status, as a shell shows it."""
        assert wait_for_end([self.running[name]], timeout_s=seconds, all_of_them=True), f"{name} still runs"
        status = self._children.exit_status(self.running[name])
        assert status is not None
        return status

    def left_of(self, name: str, grace_s: float) -> list[int]:
        """What had to be killed of the session of an ended process, ``grace_s`` after."""
        return kill_sessions([self.running[name]], grace_s=grace_s)

    def log_file(self, name: str, life: int) -> Path:
        return self.config.parent / f"{life}-{name}.log"

    def log(self, name: str) -> str:
        return Path(self.running[name].log).read_text()

    def end(self) -> None:
        """Kill every process that is left in any session that this object began."""
        kill_sessions(self._lives)
        for life in self._lives:
            assert self._children.exit_status(life) is not None, f"{life.name} was killed"


def ranks_of(driver: Process) -> list[int]:
    """Ids of its rank processes by rank."""
    return children_of_forkservers(driver.pid)


def children_of_forkservers(driver: int) -> list[int]:
    """The rank processes of a driver are children of its forkserver, which is a child of the driver."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = stat.read_text(encoding="utf-8", errors="replace")
            parents[int(stat.parent.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == driver)


async def ready(url: str, client: httpx.AsyncClient, seconds: float = READY_S) -> None:
    """Wait until /ready of ``url`` says yes."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await client.get(f"{url}/ready", timeout=2.0)
            if answer.status_code == 200:
                return
        assert time.monotonic() < until, f"{url} is not ready after {seconds} s"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def running(
    config: Path, made_of: Callable[[Path], Processes] = Processes, *, seconds: float = READY_S
) -> AsyncIterator[tuple[Processes, Topology]]:
    """All processes of the file, ready."""
    processes = made_of(config)
    with _ended(processes):
        for name in processes.names:
            processes.start(name)
        async with httpx.AsyncClient(base_url=processes.url, timeout=60.0, trust_env=False) as client:
            await ready(processes.url, client, seconds)
            yield processes, Topology(processes.url, client, {})


@contextlib.contextmanager
def _ended(processes: Processes) -> Iterator[None]:
    try:
        yield
    finally:
        processes.end()


async def all_linked(processes: Processes, topology: Topology, seconds: float = READY_S) -> None:
    """Wait until all instances are ready, every link is up, and the balancer has had time to hear of it."""
    for url in (*processes.http_urls.values(), processes.url):
        await ready(url, topology.client, seconds)
    until = time.monotonic() + seconds
    while True:
        said = [await instance_answer(processes, topology, name, "/ready") for name in processes.http_urls]
        if all(link == "up" for one in said for link in one["peers"].values()):
            await asyncio.sleep(1.5 * READY_POLL_S)
            return
        assert time.monotonic() < until, said
        await asyncio.sleep(0.1)


async def gauge(processes: Processes, topology: Topology, name: str, metric: str, label: str = "") -> float:
    """What one instance shows of itself, summed over the series with this label."""
    shown = (await topology.client.get(f"{processes.http_urls[name]}/metrics")).text
    lines = [line for line in shown.splitlines() if line.startswith(f"longcat_pd_{metric}{{") and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def instance_answer(processes: Processes, topology: Topology, name: str, route: str) -> dict[str, Any]:
    """What one instance says of itself, past the balancer."""
    return dict((await topology.client.get(f"{processes.http_urls[name]}{route}")).json())
