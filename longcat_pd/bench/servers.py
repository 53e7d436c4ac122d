"""What the bench measures, as processes: checkpoints, one engine, a cluster. Knows nothing of their insides."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_LIMIT_S = 300.0
LOOK_S = 0.1


class BenchFailed(Exception):
    """A process that is to be measured did not start."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Something that answers. ``pids``: name -> process that leads it; its children count with it."""

    url: str
    start_s: float
    pids: dict[str, int]


def make_checkpoint(
    folder: Path, variant: str, *, dtype: str, overrides: Sequence[str] = (), is_predictable: bool = False
) -> Path:
    """A small random checkpoint in ``folder``."""
    command = ["longcat_pd.tiny", "--variant", variant, "--dtype", dtype, "--out", str(folder)]
    if is_predictable:
        command.append("--predictable")
    subprocess.run([sys.executable, "-m", *command, *overrides], check=True, stdout=subprocess.DEVNULL)
    return folder


def quantized(source: Path, folder: Path) -> Path:
    """The same checkpoint with int8 MLPs and experts, in ``folder``."""
    command = ["longcat_pd.quantize", str(source), str(folder)]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    return folder


@contextmanager
def engine(
    model: Path, port: int, *, folder: Path, settings: Sequence[str] = (), more: Sequence[str] = ()
) -> Iterator[Served]:
    """`longcat-pd serve`: both phases in one engine. ``more``: other arguments of the command."""
    log = folder / f"serve-{port}.log"
    command = [sys.executable, "-m", "longcat_pd.cli", "serve", "--model", str(model), "--port", str(port)]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *_set(settings), *more], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process, log=log)
        yield Served(url=f"http://127.0.0.1:{port}", start_s=time.monotonic() - began, pids={"engine": process.pid})
    finally:
        process.terminate()
        process.wait(timeout=60.0)


@contextmanager
def cluster(config: Path, *, root: Path, settings: Sequence[str] = ()) -> Iterator[Served]:
    """A cluster through the verbs of run_pd.sh, with its run folder under ``root``."""
    verbs = [sys.executable, "-m", "longcat_pd.cluster", "--root", str(root)]
    began = time.monotonic()
    started = subprocess.run([*verbs, "start", str(config), *_set(settings)], capture_output=True, text=True, check=False)
    if started.returncode:
        raise BenchFailed(f"{config} did not start:\n{started.stdout}{started.stderr}")
    start_s = time.monotonic() - began
    state = json.loads((root / ".run" / config.stem / "state.json").read_text(encoding="utf-8"))
    try:
        yield Served(
            url=state["url"], start_s=start_s, pids={process["name"]: process["pid"] for process in state["processes"]}
        )
    finally:
        subprocess.run([*verbs, "stop", str(config), "--timeout-s", "30"], capture_output=True, check=False)


def _set(settings: Sequence[str]) -> list[str]:
    return [part for item in settings for part in ("--set", item)]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], *, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            try:
                if client.get(f"{url}/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            break
    raise BenchFailed(f"{url} did not become ready; see {log}:\n{log.read_text(errors='replace')[-2000:]}")


def resident_mib(pid: int) -> dict[str, float]:
    """Memory of a process and of every process below it, in MiB: shared pages counted once, by halves and thirds (PSS)."""
    children = _children()
    own, below = _pss_mib(pid), [_pss_mib(child) for child in _descendants(pid, children)]
    return {"driver": own, "ranks": sum(below), "processes": 1 + len(below)}


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes and all below them have taken so far."""
    children = _children()
    return sum(_cpu_s(p) for pid in pids for p in (pid, *_descendants(pid, children)))


def cpu_share(pids: Sequence[int], seconds: float) -> float:
    """Cores that these processes and all below them keep busy, watched for so long."""
    before = cpu_seconds(pids)
    threading.Event().wait(seconds)
    return (cpu_seconds(pids) - before) / seconds


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat(entry)[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    return children


def _stat(folder: Path) -> list[str]:
    """Fields of /proc/PID/stat behind the name: state, parent, ..."""
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()


def _cpu_s(pid: int) -> float:
    """Seconds of all threads: exact to a nanosecond, where the stat file counts ticks."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []):
        yield child
        yield from _descendants(child, children)


def _pss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024
