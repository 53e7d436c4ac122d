"""Rank processes of one machine: started from a forkserver with torch preloaded, watched, told apart from a crash, ended.

The caller names the entry ("module:function") and gives each rank its configuration as one string. Knows nothing of plans.
The one place that touches the environment of processes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from longcat_pd import log
from longcat_pd.clock import Clock
from longcat_pd.engine.executor import OnExit, OnFailure
from longcat_pd.errors import RankLost
from longcat_pd.server.interfaces import interface_of

KILL_LIMIT_S = 5.0  # a process ends that long after SIGKILL at the latest

_STACKS = signal.SIGUSR1
_RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # more threads than cores cost a hundredfold
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # a rank imports the software of its device, the forkserver must not
    "TORCH_GLOO_LAZY_INIT": "0",  # a group that has been made is joined, and what listened for it is deafened
}
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
_HCCL_ADDRESS, _HCCL_INTERFACE = "HCCL_IF_IP", "HCCL_SOCKET_IFNAME"


def network_environment(host: str) -> dict[str, str]:
    """What tells the libraries of ranks by which address of this machine the ranks of others find them.

    ``host``: how the configuration names this machine. Left to themselves gloo takes the address of the host name and HCCL
    that of some card, which other machines may not reach. What this process was given for them already is respected; where
    ranks are of one machine alone, gloo keeps to it. Raises ConfigError if the machine does not have the address.
    """
    found = interface_of(host)
    if found is None:  # gloo would listen at the address of the host name
        return {} if _GLOO_INTERFACE in os.environ else {_GLOO_INTERFACE: _LOOPBACK}
    told = {}
    if _GLOO_INTERFACE not in os.environ:
        told[_GLOO_INTERFACE] = found.name
    if _HCCL_ADDRESS not in os.environ and _HCCL_INTERFACE not in os.environ:
        told[_HCCL_ADDRESS] = found.address
    return told


async def prepare(entry: str) -> None:
    """Have the forkserver import what ranks of this entry need, which takes seconds; they start in no time then."""
    await asyncio.get_running_loop().run_in_executor(None, _warm_up, entry)


class ForkedRanks:
    """Rank processes of an instance on this machine: neighbours.

    Args:
        entry: ``module:function`` that is called in each process with its configuration.
        configs: by rank.
        first: the number of the first.
        environment: laid over that of each process.
    """

    def __init__(
        self,
        entry: str,
        configs: Sequence[str],
        *,
        clock: Clock,
        first: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._entry = entry
        self._configs = tuple(configs)
        self._clock = clock
        self._first = first
        self._environment = dict(environment or {})
        self._starts: list[asyncio.Task[None]] = []
        self._processes: list[BaseProcess] = []
        self._num_running = 0
        self._all_ended = asyncio.Event()

    async def prepare(self) -> None:
        """See ``prepare``."""
        await prepare(self._entry)

    async def start(self, on_exit: OnExit, _on_loss: OnFailure | None = None) -> None:
        """Start all. ``on_exit(rank, status)`` is called on the event loop when one ends; nothing else happens to one."""
        starting = asyncio.get_running_loop().create_task(self._start(on_exit))
        self._starts.append(starting)
        await asyncio.shield(starting)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(p.pid for p in self._processes if p.pid is not None)

    def loss(self) -> RankLost | None:
        """The end of each process is told."""
        return None

    def absent(self) -> Mapping[int, str]:
        """This machine is there."""
        return {}

    def dump_stacks(self) -> None:
        """Have every living rank write the stacks of its threads to standard error, which is the instance's log."""
        for rank, process in enumerate(self._processes, self._first):
            if process.exitcode is None and process.pid is not None:
                log.logger().error("rank_stack", rank=rank, pid=process.pid)
                os.kill(process.pid, _STACKS)

    async def stop(self, grace_s: float, *, is_faulty: bool = False) -> None:
        """Wait so long for those that were told to end, then end them by force."""
        await asyncio.gather(*self._starts)  # one that was cancelled half-way is finished first, so that none is missed
        if not self._num_running:
            return
        try:
            await self._clock.within(grace_s, self._all_ended.wait())
            return
        except TimeoutError:
            for rank, process in enumerate(self._processes, self._first):
                if process.exitcode is None:
                    log.logger().warning("rank_killed", rank=rank, pid=process.pid)
                    process.kill()
        await self._clock.within(KILL_LIMIT_S, self._all_ended.wait())

    async def _start(self, on_exit: OnExit) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._fork)  # seconds: the forkserver imports torch first
        self._num_running = len(self._processes)
        for place, process in enumerate(self._processes):
            loop.add_reader(process.sentinel, self._exited, place, on_exit)

    def _fork(self) -> None:
        context = _forkserver(self._entry)
        with _for_children():
            for rank, config in enumerate(self._configs, self._first):
                told = (self._entry, config, self._environment, rank)
                process: BaseProcess = context.Process(target=_run_rank, args=told, name=f"rank-{rank}")
                process.start()
                self._processes.append(process)

    def _exited(self, place: int, on_exit: OnExit) -> None:
        process = self._processes[place]
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self._num_running -= 1
        if not self._num_running:
            self._all_ended.set()
        on_exit(self._first + place, process.exitcode if process.exitcode is not None else -1)


def _forkserver(entry: str) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", entry.partition(":")[0], __name__])
    return context


def _warm_up(entry: str) -> None:
    context = _forkserver(entry)
    with _for_children():
        process = context.Process(target=_do_nothing)
        process.start()  # once the forkserver has imported everything
    process.join(KILL_LIMIT_S)


def _do_nothing() -> None:
    """Of a process whose coming up is all that is wanted."""


@contextmanager
def _for_children() -> Iterator[None]:
    """What processes inherit that are started inside: the ranks' environment, and no terminal signals.

    SIGTERM and SIGINT often reach a whole process group; only the driver acts on them, ranks and forkserver are told by it.
    """
    resource_tracker.ensure_running()  # else it starts inside and lifts the block again
    before = dict(os.environ)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    os.environ.update(_RANK_ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run_rank(entry: str, config: str, environment: Mapping[str, str], rank: int) -> None:
    """First function of a rank process."""
    os.environ.update(environment)  # before any library looks; that of the forkserver is older than some instances
    log.set_up(rank=rank)
    faulthandler.register(_STACKS, all_threads=True)
    threading.Thread(target=_end_with_driver, name="orphan-watch", daemon=True).start()
    module, _, function = entry.partition(":")
    vars(importlib.import_module(module))[function](config)


def _end_with_driver() -> None:
    """Ends this process when the driver is gone; its own parent is the forkserver, which outlives a killed driver."""
    driver = multiprocessing.parent_process()
    assert driver is not None, "a rank process is started by a driver"
    driver.join()
    os._exit(1)
