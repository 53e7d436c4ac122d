"""The run folder of a cluster on one machine: who was started, from which file, under which ports; one verb at a time.

``<root>/.run/<name of the YAML>/``, or ``<hosts.path>/run/<name>/``: ``state.json``, ``lock``, ``cluster.yaml`` as the
services read it, and the logs. Starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.cluster.processes import Process
from longcat_pd.config.checks import PortUse
from longcat_pd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class State:
    """What ``start`` began. ``drain_s``: how long the services may take to end by themselves; ``tree``: the folder of the
    code that they run, several with ":" between them.
    """

    config: str
    url: str
    drain_s: float
    ports: tuple[PortUse, ...]
    processes: tuple[Process, ...]
    tree: str = ""

    def of(self, names: Sequence[str], ports: Sequence[PortUse]) -> State:
        """That part of it."""
        mine = tuple(process for process in self.processes if process.name in names)
        return dataclasses.replace(self, processes=mine, ports=tuple(ports))

    @property
    def alive(self) -> list[Process]:
        """The processes that still run."""
        return [process for process in self.processes if process.is_alive]


class RunFolder:
    """The folder of one cluster, made on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "cluster.yaml"
        self._file = path / "state.json"

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Keep other verbs that change something out. Raises ConfigError at once if one is at work."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"{self.path}: the run folder cannot be made or written to: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another start or stop is at work in {self.path}") from error
            yield

    def read(self) -> State | None:
        """What was recorded; None: nothing is running. Raises ConfigError for a record that is damaged, or foreign."""
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
            ports = tuple(PortUse(*use) for use in data.pop("ports"))
            processes = tuple(Process(**process) for process in data.pop("processes"))
            return State(**data, ports=ports, processes=processes)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise ConfigError(f"{self._file}: the record of what runs is another user's: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = "is damaged, or of another version: end by hand what it names, then remove it"
            raise ConfigError(f"{self._file}: the record of what runs {text} ({error})") from error

    def write(self, state: State) -> None:
        """Record it, whole or not at all, whatever becomes of the machine."""
        write_private(self._file, json.dumps(dataclasses.asdict(state), indent=1))

    def others(self) -> list[State]:
        """The other clusters of the same root that have processes alive, as far as their records can be read."""
        found = []
        for file in sorted(self.path.parent.glob("*/state.json")):
            with contextlib.suppress(ConfigError):
                state = RunFolder(file.parent).read() if file != self._file else None
                found += [state] if state is not None and state.alive else []
        return found

    def add(self, state: State) -> None:
        """Record these processes, beside those of other services that are recorded."""
        before = self.read()
        names = {process.name for process in state.processes}
        others = [process for process in before.processes if process.name not in names] if before is not None else []
        ports = dict.fromkeys((*(before.ports if before is not None else ()), *state.ports))
        trees = ":".join(dict.fromkeys([*(before.tree.split(":") if before is not None else ()), state.tree]))
        self.write(dataclasses.replace(state, ports=tuple(ports), tree=trees, processes=(*others, *state.processes)))

    def drop(self, processes: Sequence[Process]) -> None:
        """These processes run no more; nothing does when no others are recorded."""
        before = self.read()
        left = [process for process in before.processes if process not in processes] if before is not None else []
        if before is None or not left:
            self.clear()
        else:
            self.write(dataclasses.replace(before, processes=tuple(left)))

    def clear(self) -> None:
        """Nothing is running any more."""
        self._file.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, whatever becomes of the machine; nobody but its owner reads it.

    A configuration's ``env`` may hold what is secret.
    """
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # one that was left behind may have another mode
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def last_lines(log: str | Path, count: int) -> Sequence[str]:
    """The end of a log; nothing if there is none."""
    path = Path(log)
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [line.rstrip("\n") for line in deque(lines, maxlen=count)]
