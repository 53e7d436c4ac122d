"""``deploy/run_pd.sh``: start, status, stop and logs of a cluster on this machine.

Owns the order of things and what the operator is told. Knows of the services only their command lines, ``/ready`` and
logs; who was started is ``record.py``, how processes are found again ``processes.py``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longcat_pd.cluster.processes import Children, Process, kill_sessions, send, wait_for_end
from longcat_pd.cluster.record import RunFolder, State, last_lines
from longcat_pd.config.checks import pools, port_uses
from longcat_pd.config.resolve import instance_spec, load, unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.preflight import free_memory_bytes, port_findings, total_memory_findings

DEFAULT_CONFIG = Path("deploy/config/cluster/local-cpu.yaml")
DEFAULT_CHECKPOINT = Path(".run/models/tiny-2.0")
READY_LINE = "The server is fired up and ready to roll!"
START_S = 300.0  # until everything is ready, if nothing has to be compiled
COMPILE_S = 300.0  # more for each graph: half a minute on an idle core
LOOK_S = 0.5  # between two looks at /ready; the end of a process is noticed at once
HELPERS_END_S = 3.0  # what a driver leaves behind ends by itself within this, if it ends at all
EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_NOT_RUNNING = 0, 1, 2, 3


class StartFailed(Exception):
    """A process ended, or time was over, before the cluster was ready."""

    def __init__(self, message: str, *, culprit: Process | None = None, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status: 0 done, 1 failed, 2 refused, 3 (status) not running; of a failed start the culprit's."""
    options = _parser().parse_args(arguments)
    config = Path(options.config or options.root / DEFAULT_CONFIG).absolute()
    folder = RunFolder(options.root / ".run" / config.stem)
    verbs = {"start": _start, "status": _status, "stop": _stop, "logs": _logs}
    try:
        return verbs[options.verb](folder, config, options=options)
    except ConfigError as error:
        for line in error.message.splitlines():
            _say(f"error: {line}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # whoever read has seen enough; the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_pd.sh", description="Start, look at and stop a cluster on this machine.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="start|status|stop|logs")
    for name, text in (
        ("start", "start balancer, prefill and decode instances, and wait until they serve"),
        ("status", "each process: whether it is ready now, and the line of its log that says since when"),
        ("stop", "let running requests finish, then end every process that start began"),
        ("logs", "the last lines of every log"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("config", nargs="?", metavar="CLUSTER_YAML", help=f"default: {DEFAULT_CONFIG}")
        verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
        if name in ("start", "stop"):
            verb.add_argument("--timeout-s", type=float, help="how long to wait at most")
        if name == "logs":
            verb.add_argument("--lines", type=int, default=20, help="of each log")
            verb.add_argument("--follow", action="store_true", help="go on until interrupted")
    return parser


def _start(folder: RunFolder, config: Path, *, options: argparse.Namespace) -> int:
    wanted = Path(unresolved(config, options.overrides).model.path)
    with folder.one_at_a_time():
        before = folder.read()
        if before is not None and before.alive:
            names = ", ".join(f"{process.name} (pid {process.pid})" for process in before.alive)
            raise ConfigError(f"{config.stem} is already running: {names}; stop it first")
        if before is not None:
            kill_sessions(before.processes)  # left behind by processes that died
        _make_default_checkpoint(options.root, wanted)
        cluster = load(config, options.overrides)
        if findings := [*port_findings(port_uses(cluster)), *_memory_findings(cluster)]:
            raise ConfigError("\n".join(findings))
        children = Children()
        state = _launch_all(folder, config, cluster=cluster, overrides=options.overrides, children=children)
        try:
            _wait_until_ready(state, children, timeout_s=options.timeout_s or _patience_s(cluster))
        except StartFailed as failure:
            _report(failure)
            _end(folder, state, drain_s=5.0)
            return failure.status
        except KeyboardInterrupt:
            _say("interrupted: stopping what was started")
            _end(folder, state, drain_s=5.0)
            return EXIT_FAILED
    _say(f"ready: {state.url}; logs in {folder.path}. Try:\n\n{_curl(state.url, cluster.load_balancer.api_key_file)}\n")
    return EXIT_OK


def _memory_findings(cluster: ClusterConfig) -> Iterator[str]:
    names = [instance.name for _, pool in pools(cluster) for instance in pool.instances]
    specs = [instance_spec(cluster, name) for name in names]
    yield from total_memory_findings(specs, available_bytes=free_memory_bytes())


def _make_default_checkpoint(root: Path, wanted: Path) -> None:
    default = (root / DEFAULT_CHECKPOINT).resolve()
    if wanted != default or (default / "config.json").is_file():
        return
    _say(f"making a small random checkpoint in {default} (once)")
    command = [sys.executable, "-m", "longcat_pd.tiny", "--variant", "2.0", "--out", str(default)]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if made.returncode:
        raise ConfigError(f"model.path={default}: the checkpoint could not be made (exit status {made.returncode})")


def _launch_all(
    folder: RunFolder, config: Path, *, cluster: ClusterConfig, overrides: Sequence[str], children: Children
) -> State:
    """Start every process and record each one at once, so that whatever happens now, ``stop`` finds it."""
    logs = Path(cluster.log_dir) if cluster.log_dir else folder.path
    logs.mkdir(parents=True, exist_ok=True)
    balancer = cluster.load_balancer
    host = "127.0.0.1" if balancer.host in ("0.0.0.0", "::") else balancer.host
    state = State(
        config=str(config),
        url=f"http://{host}:{balancer.port}",
        drain_s=15.0 + max(pool.engine.drain_timeout_s for _, pool in pools(cluster)),
        ports=tuple(port_uses(cluster)),
        processes=(),
    )
    settings = ["--config", str(config), *(part for item in overrides for part in ("--set", item))]
    for name, command, url in _services(cluster, state.url):
        full = ["env", *(f"{key}={value}" for key, value in cluster.env.items()), sys.executable, "-m", *command]
        process = children.launch(name, [*full, *settings], log=logs / f"{name}.log", ready_url=url)
        state = State(**{**vars(state), "processes": (*state.processes, process)})
        folder.write(state)
        _say(f"started {name}, pid {process.pid}, log {process.log}")
    return state


def _services(cluster: ClusterConfig, url: str) -> Iterator[tuple[str, list[str], str]]:
    """(name, module and its arguments, where it is asked whether it is ready)."""
    for role, pool in pools(cluster):
        for instance in pool.instances:
            module = f"longcat_pd.{role}_worker"
            yield instance.name, [module, "--instance", instance.name], f"http://{instance.host}:{instance.http_port}"
    yield "balancer", ["longcat_pd.load_balancer"], url


def _patience_s(cluster: ClusterConfig) -> float:
    """How long a start may take: a rank compiles its graphs one after the other before it is ready."""
    graphs = max(pool.num_graphs for _, pool in pools(cluster))
    return START_S + graphs * COMPILE_S


def _wait_until_ready(state: State, children: Children, *, timeout_s: float) -> None:
    """Until the balancer sees a linked pair. Raises StartFailed when a process ends first or time is over."""
    began, shown = time.monotonic(), ""
    while True:
        status, answer = _ask(state.url)
        if status == http.client.OK:
            return
        waited = time.monotonic() - began
        reasons = ", ".join(_reasons(answer)) or "no answer yet"
        if reasons != shown:
            _say(f"{waited:5.1f} s: {reasons}")
            shown = reasons
        if waited > timeout_s:
            raise StartFailed(f"not ready after {timeout_s:g} s: {reasons} (--timeout-s waits longer)")
        if wait_for_end(state.processes, timeout_s=LOOK_S, all_of_them=False):
            culprit = next(process for process in state.processes if not process.is_alive)
            code = children.exit_status(culprit)
            raise StartFailed(f"{culprit.name} ended with status {code}", culprit=culprit, status=code or EXIT_FAILED)


def _ask(url: str) -> tuple[int, Any]:
    """Status and JSON of ``/ready``; status 0 if there was no answer."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=2.0)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def _reasons(answer: Any) -> Iterator[str]:
    """The codes and details of an answer of ``/ready``."""
    for reason in answer.get("reasons", []) if isinstance(answer, dict) else []:
        yield " ".join(str(reason[key]) for key in ("code", "detail") if reason.get(key))


def _report(failure: StartFailed) -> None:
    _say(f"error: the start failed: {failure}", file=sys.stderr)
    if failure.culprit is not None:
        _say(f"the end of {failure.culprit.log}:", file=sys.stderr)
        for line in last_lines(failure.culprit.log, 25):
            _say(f"  {line}", file=sys.stderr)


def _status(folder: RunFolder, config: Path, *, options: argparse.Namespace) -> int:
    del options
    state = folder.read()
    if state is None:
        _say(_not_running(folder, config))
        return EXIT_NOT_RUNNING
    _say(f"{config.stem}: {state.config}, {state.url}")
    is_ready = True
    for process in state.processes:
        status, answer = _ask(process.ready_url) if process.is_alive else (0, None)
        is_ready = is_ready and status == http.client.OK
        _say(f"  {process.name:<12} pid {process.pid:<8} {_condition(process, status, answer=answer)}")
        for line in last_lines(process.log, 100_000):
            if READY_LINE in line:
                _say(f"  {'':<12} {line}")
    return EXIT_OK if is_ready else EXIT_FAILED


def _condition(process: Process, status: int, *, answer: Any) -> str:
    if not process.is_alive:
        return f"ended; see {process.log}"
    if not isinstance(answer, dict):
        return "running, no answer yet"
    ranks = answer.get("ranks")
    shown = [f"ranks {ranks['ok']}/{ranks['total']}"] if ranks else []
    shown += [f"{name} {link}" for name, link in answer.get("peers", {}).items()]
    shown += list(_reasons(answer))
    return ", ".join(["ready" if status == http.client.OK else "not ready", *shown])


def _not_running(folder: RunFolder, config: Path) -> str:
    """Says so, and which other clusters of this folder do run."""
    others = "".join(f"\n{other.config} is; name that file to mean it" for other in folder.others())
    return f"{config.stem} is not running{others}"


def _stop(folder: RunFolder, config: Path, *, options: argparse.Namespace) -> int:
    with folder.one_at_a_time():
        state = folder.read()
        if state is None:
            _say(_not_running(folder, config))
            return EXIT_NOT_RUNNING if folder.others() else EXIT_OK
        return _end(folder, state, drain_s=state.drain_s if options.timeout_s is None else options.timeout_s)


def _end(folder: RunFolder, state: State, *, drain_s: float) -> int:
    """The balancer first, so that nothing new arrives while the workers finish; then what is left is killed."""
    deadline = time.monotonic() + drain_s
    balancers = [process for process in state.processes if process.name == "balancer"]
    workers = [process for process in state.processes if process.name != "balancer"]
    try:
        for group in (balancers, workers):
            for process in group:
                send(process, signal.SIGTERM)
            alive = [process for process in group if process.is_alive]
            wait_for_end(alive, timeout_s=max(deadline - time.monotonic(), 0.0), all_of_them=True)
    except KeyboardInterrupt:
        _say("interrupted: no more waiting")
    late = [process.name for process in state.alive]
    killed = kill_sessions(state.processes, grace_s=0.0 if late else HELPERS_END_S)
    if killed:
        _say(f"killed {len(killed)} processes that did not end by themselves: {', '.join(late) or 'ranks left behind'}")
    findings = list(port_findings(state.ports))
    for line in findings:
        _say(f"error: {line}", file=sys.stderr)
    folder.clear()
    _say("stopped" if not findings else "stopped, but ports are still taken")
    return EXIT_FAILED if killed or findings else EXIT_OK


def _logs(folder: RunFolder, config: Path, *, options: argparse.Namespace) -> int:
    state = folder.read()
    files = (
        [process.log for process in state.processes] if state else [str(log) for log in sorted(folder.path.glob("*.log"))]
    )
    if not files:
        _say(f"{config.stem} has no logs in {folder.path}")
        return EXIT_NOT_RUNNING
    follow = ["--follow=name"] if options.follow else []
    try:
        return subprocess.run(["tail", f"--lines={options.lines}", *follow, *files], check=False).returncode
    except KeyboardInterrupt:
        return EXIT_OK


def _curl(url: str, key_file: str | None) -> str:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": "你好，请介绍一下自己"}],
        "max_tokens": 64,
        "temperature": 0.7,
        "stream": False,
    }
    data = json.dumps(body, ensure_ascii=False)
    key = f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(key_file)})"' if key_file else ""
    return f"curl -X POST {url}/v1/chat/completions -H \"Content-Type: application/json\"{key} -d '{data}'"


def _say(text: str, *, file: Any = None) -> None:
    stream = file or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
