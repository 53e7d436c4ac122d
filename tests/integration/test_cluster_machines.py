"""The verbs of run_pd.sh over several machines: a stand-in for ssh gives each address a folder of its own on this one.

What the stand-in cannot show, real sshd and real links, is in ``tests/hosts``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.cluster.processes import kill_sessions
from longcat_pd.cluster.record import RunFolder
from tests.clone import ROOT
from tests.integration.test_cluster import SERVICE, sessions
from tests.ports import free_base
from tests.unit.test_resolve import CHECKPOINT

D0, D1, P0 = "10.77.0.1", "10.77.0.2", "10.77.0.3"  # decode instance on two machines; prefill and the balancer

SERVICES = {"d0": D0, "d0.1": D1, "p0": P0, "balancer": P0}

# Takes the place of ssh: the command runs here, with the machine's own folder wherever hosts.path is named. A file
# NODE.fault is what ssh says when it fails.
SSH = """#!/bin/bash
while [[ "$1" != -- ]]; do shift; done
rig={rig} node="$2" command="$3"
if [[ -e "$rig/$node.fault" ]]; then cat "$rig/$node.fault" >&2; exit 255; fi
echo $$ > "$rig/$node.ssh"
exec bash -c "${{command//$rig\\/root/$rig\\/$node}}" < <(exec sed -u "s|$rig/root|$rig/$node|g" 2>/dev/null)
"""

# The verbs in a process of their own, with scripts in place of the services; they listen on loopback.
VERBS = """
import dataclasses, sys
from longcat_pd.cluster import __main__ as verbs, machines

real_services, real_ports = machines.services, machines.ports_of_node

def services(config):
    for service in real_services(config):
        port = service.url.rpartition(":")[2]
        url = "http://127.0.0.1:" + port if port else ""
        script = sys.argv[1] + "/" + service.name + ".py"
        yield dataclasses.replace(service, arguments=(script, port), url=url)

def ports_of_node(config, node):
    return tuple(use._replace(host="127.0.0.1") for use in real_ports(config, node))

machines.services, machines.ports_of_node = services, ports_of_node
sys.exit(verbs.main(sys.argv[2:]))
"""
WAITS = "import signal; signal.pause()"
END = "lambda *_: (print('told at', time.monotonic(), flush=True), sys.exit(0))"
ENDS = f"import signal, sys, time; signal.signal(signal.SIGTERM, {END}); signal.pause()"
CLEAN = SERVICE.replace('subprocess.Popen(["sleep", "600"])\n', "")  # leaves no child
CLEAN = CLEAN.replace("lambda *_: sys.exit(0)", END).replace("import http.server", "import time, http.server")


class Rig:
    """Three machines. ``out`` and ``err`` are what the last verb said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "small.yaml"
        self.scripts = {"p0": CLEAN, "d0": CLEAN, "d0.1": ENDS, "balancer": CLEAN}
        self.out = self.err = ""
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH.format(rig=shlex.quote(str(folder))))
        (folder / "bin" / "ssh").chmod(0o755)
        (folder / "weights").mkdir()
        (folder / "weights" / "config.json").write_text(json.dumps(CHECKPOINT))
        (folder / "weights" / "model.safetensors").touch()
        for node in (D0, D1, P0):
            (folder / node).mkdir()
            (folder / node / "current").symlink_to(ROOT)
        base = free_base(30)
        self.tree = {
            "model": {"path": "weights"},
            "cluster_key_file": "/etc/longcat_pd/cluster.key",
            "load_balancer": {"port": base},
            "hosts": {"path": f"{folder}/root", "python": sys.executable},
            "prefill": {"instances": [{"name": "p0", "http_port": base + 10, "nodes": [P0]}]},
            "decode": {
                "parallel": {"kvp_size": 2, "attn_tp_size": 2},
                "instances": [{"name": "d0", "http_port": base + 20, "nodes": [D0, D1]}],
            },
        }

    def begin(self, verb: str, *rest: str) -> subprocess.Popen[str]:
        self.config.write_text(json.dumps(self.tree))
        for name, script in self.scripts.items():
            (self.folder / f"{name}.py").write_text(script)
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        options = ["--root", str(self.folder), verb, str(self.config), *rest]
        return subprocess.Popen(
            [sys.executable, "-c", VERBS, str(self.folder), *options],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self, process: subprocess.Popen[str], text: str) -> bool:
        """Whether a verb that runs comes to say this."""
        watch = threading.Timer(60.0, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            return any(text in line for line in iter(process.stdout.readline, ""))
        finally:
            watch.cancel()

    def end(self, process: subprocess.Popen[str]) -> int:
        self.out, self.err = process.communicate(timeout=90)
        return process.returncode

    def __call__(self, verb: str, *rest: str) -> int:
        return self.end(self.begin(verb, *rest))

    def run_folder(self, node: str) -> RunFolder:
        return RunFolder(self.folder / node / "run" / "small")

    def pids(self) -> dict[str, int]:
        states = [self.run_folder(node).read() for node in (D0, D1, P0)]
        return {process.name: process.pid for state in states if state is not None for process in state.processes}

    def told_at(self, node: str, service: str) -> float:
        """When a service was told to end."""
        text = (self.run_folder(node).path / f"{service}.log").read_text()
        return float(text.rpartition("told at")[2])

    def fault(self, node: str, text: str) -> None:
        (self.folder / f"{node}.fault").write_text(text)

    def mend(self, node: str) -> None:
        (self.folder / f"{node}.fault").unlink()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for node in (D0, D1, P0):
        state = rig.run_folder(node).read()
        if state is not None:
            kill_sessions(state.processes)


def test_start_status_logs_restart_stop(rig: Rig) -> None:
    assert rig("start") == 0, rig.err
    assert f"warning: load_balancer.host=127.0.0.1: the balancer answers to {P0} alone; 0.0.0.0 or an" in rig.err
    assert f"started d0.1 on {D1}, pid" in rig.out
    port = rig.tree["load_balancer"]["port"]
    assert f"ready: http://127.0.0.1:{port}" in rig.out
    begun = rig.pids()
    assert begun.keys() == {"d0", "d0.1", "p0", "balancer"}
    assert set(begun.values()) <= sessions()
    assert len({rig.run_folder(node).path for node in (D0, D1, P0)}) == 3

    assert rig("start") == 2
    running = [f"{name} (pid {begun[name]}) on {node}" for name, node in (("d0", D0), ("d0.1", D1), ("p0", P0))]
    assert all(text in rig.err for text in running), rig.err
    assert rig.pids() == begun, "the second start changed nothing"

    assert rig("status") == 0
    assert rig.out.count("ready, ranks 2/2") == 3
    assert f"d0.1         {D1}       pid {begun['d0.1']}" in rig.out

    assert rig("logs", "--lines", "3") == 0
    assert {line.partition(" ")[0] for line in rig.out.splitlines()} == {"d0", "p0", "balancer"}, "d0.1 says nothing"
    assert rig("logs", "--node", P0) == 0
    assert "d0 " not in rig.out and "p0 " in rig.out
    _write_lines(rig)
    assert rig("logs", "--request", "r1") == 0
    assert rig.out.splitlines() == [
        "balancer     | 2026-11-30T10:00:01.000Z warning retry request=r1",
        "d0.1         | 2026-11-30T10:00:02.000Z error rank_fault request=r1",
        "d0.1         | Traceback (most recent call last):",
        "d0           | 2026-11-30T10:00:03.000Z info request_finished request=r1",
        "balancer     | 2026-11-30T10:00:04.000Z info request_finished request=r1",
    ], "of all machines, in the order of time"
    assert rig("logs", "--level", "warning", "--since", "2026-11-30T10:00:02Z") == 0
    assert rig.out.count("\n") == 2 and "rank_fault" in rig.out
    assert rig("logs", "--since", "soon") == 2 and "--since soon: neither a time" in rig.err
    rig.fault(P0, "ssh: connect to host 10.77.0.3 port 22: Connection refused")
    assert rig("logs", "--request", "r2") == 1
    assert rig.out == "d0           | 2026-11-30T10:00:03.500Z info request_finished request=r2\n", "what the others have"
    assert f"error: {P0}: connection refused on port 22" in rig.err
    rig.mend(P0)
    following = rig.begin("logs", "--follow", "--lines", "1")
    for text in ("news", "more news"):
        with (rig.run_folder(D1).path / "d0.1.log").open("a") as log:
            log.write(f"{text}\n")
        assert rig.says(following, f"d0.1         | {text}\n")
    following.send_signal(signal.SIGINT)
    assert rig.end(following) == 0, rig.err

    assert rig("restart") == 0, rig.err
    again = rig.pids()
    assert again.keys() == begun.keys()
    assert not set(again.values()) & set(begun.values())
    assert not set(begun.values()) & sessions()

    assert rig("stop") == 0, rig.out + rig.err
    assert rig.out == "stopped\n"
    told = {name: rig.told_at(node, name) for name, node in SERVICES.items()}
    assert sorted(told, key=lambda name: told[name])[0] == "balancer", "nothing new arrives while the drivers finish"
    assert sorted(told, key=lambda name: told[name])[-1] == "d0.1", "ranks of further nodes after their driver"
    assert not set(again.values()) & sessions()
    assert rig.pids() == {}
    assert rig("status") == 3


def test_one_instance_is_started_again_and_nothing_else_is_touched(rig: Rig) -> None:
    assert rig("restart", "--instance", "d0") == 2
    assert "--instance d0: nothing is known here to run of this cluster" in rig.err
    assert rig("start") == 0, rig.err
    first = rig.pids()
    rig.tree["load_balancer"]["port"] += 1  # the file of now is not what runs, and is not asked
    assert rig("restart", "--instance", "d1") == 2
    assert "--instance d1: not a service of small; known: d0, p0, balancer" in rig.err

    assert rig("restart", "--instance", "d0") == 0, rig.out + rig.err
    second = rig.pids()
    assert rig.out.endswith("ready: d0\n") and "started d0.1" in rig.out and "started p0" not in rig.out
    assert {name for name in first if first[name] == second[name]} == {"p0", "balancer"} and second.keys() == first.keys()
    assert {first["d0"], first["d0.1"]} & sessions() == set()

    assert rig("restart", "--instance", "balancer") == 0, rig.err
    third = rig.pids()
    assert third["balancer"] != second["balancer"] and third["d0.1"] == second["d0.1"]

    os.kill(second["d0"], signal.SIGKILL)
    rig.scripts["d0.1"] = "import sys; sys.exit('error: no room')"
    assert rig("restart", "--instance", "d0") == 1
    assert f"d0.1 on {D1} ended with status 1" in rig.err and "error: no room" in rig.err
    assert rig("status") == 1
    assert "d0           10.77.0.1       not started" in rig.out and rig.out.count("ready, ranks 2/2") == 2
    rig.scripts["d0.1"] = ENDS
    assert rig("restart", "--instance", "d0") == 0, "what has ended by itself is started too: " + rig.err
    last = rig.pids()
    assert rig("status") == 0 and last.keys() == first.keys()
    assert rig("stop") == 0, rig.err
    assert rig.pids() == {} and not set(last.values()) & sessions()


def test_one_instance_is_stopped_and_all_else_runs_on(rig: Rig) -> None:
    assert rig("stop", "--instance", "d0") == 2
    assert "--instance d0: nothing is known here to run of this cluster" in rig.err
    assert rig("start") == 0, rig.err
    first = rig.pids()
    assert rig("stop", "--instance", "d1") == 2 and "known: d0, p0, balancer" in rig.err

    assert rig("stop", "--instance", "d0") == 0, rig.out + rig.err
    assert rig.out == "stopped d0\n"
    assert rig.told_at(D0, "d0") < rig.told_at(D1, "d0.1"), "ranks of further nodes after their driver"
    assert rig.pids() == {name: first[name] for name in ("p0", "balancer")}
    assert not {first["d0"], first["d0.1"]} & sessions()
    assert rig("status") == 1
    assert rig.out.count("not started") == 2
    assert rig("stop", "--instance", "d0") == 0, "nothing of it is left to stop"

    assert rig("restart", "--instance", "d0") == 0, rig.out + rig.err
    assert rig("status") == 0 and rig.pids().keys() == first.keys()
    for name in ("balancer", "p0", "d0"):
        assert rig("stop", "--instance", name) == 0, rig.err
    assert rig.pids() == {}
    assert rig("stop") == 0, rig.err
    assert rig("status") == 3


def _write_lines(rig: Rig) -> None:
    """Lines as services write them, at the end of their logs; the test's own services have nothing to say."""
    for node, name, lines in (
        (D0, "d0", ("03.000Z info request_finished request=r1", "03.500Z info request_finished request=r2")),
        (D1, "d0.1", ("02.000Z error rank_fault request=r1\nTraceback (most recent call last):",)),
        (P0, "balancer", ("01.000Z warning retry request=r1", "04.000Z info request_finished request=r1")),
    ):
        with (rig.run_folder(node).path / f"{name}.log").open("a") as log:
            log.writelines(f"2026-11-30T10:00:{line}\n" for line in lines)


def test_machines_that_cannot_be_reached_are_all_named_and_nothing_is_started(rig: Rig) -> None:
    rig.fault(D0, "ssh: connect to host 10.77.0.1 port 22: Connection refused")
    rig.fault(P0, f"No ED25519 host key is known for {P0} and you have requested strict checking.")
    assert rig("start") == 2
    assert f"error: {D0}: connection refused on port 22" in rig.err
    assert f"error: {P0}: the host key of {P0} is not in the known hosts of ssh: ask for it over a safe way" in rig.err
    assert rig.pids() == {}
    assert list(rig.folder.glob("10.*/run/*/*.log")) == []


def test_what_all_machines_have_against_a_start_comes_at_once(rig: Rig) -> None:
    (rig.folder / "weights" / "model.safetensors").unlink()
    rig.tree["hosts"]["setup_files"] = [f"{rig.folder}/set_env.sh"]
    port = rig.tree["decode"]["instances"][0]["http_port"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + 2))
        listener.listen()
        assert rig("start") == 2
    assert f"error: {D0}: decode.instances[0].http_port={port + 2}: port {port + 2}" in rig.err
    assert f"error: {D0}, {D1}, {P0}: hosts.setup_files: {rig.folder}/set_env.sh is not there" in rig.err
    assert "has neither model.safetensors.index.json nor model.safetensors" in rig.err
    assert rig.pids() == {}

    (rig.folder / P0 / "current").unlink()
    (rig.folder / P0 / "bb22").mkdir()
    (rig.folder / P0 / "bb22" / "longcat_pd").symlink_to(ROOT / "longcat_pd")
    (rig.folder / P0 / "current").symlink_to("bb22")
    assert rig("start") == 2
    differs = "the code differs between machines: run 'run_pd.sh code'; release"
    assert f"error: {P0}: {differs} bb22 here" in rig.err and f"error: {D0}, {D1}: {differs} {ROOT.name} here" in rig.err

    (rig.folder / P0 / "current").unlink()
    assert rig("start") == 2
    assert f"error: {P0}: no code in {rig.folder}/{P0}/current; run 'run_pd.sh code' first" in rig.err


def test_addresses_that_mean_another_machine_to_others(rig: Rig) -> None:
    rig.tree["prefill"]["instances"][0].pop("nodes")
    assert rig("start") == 2
    assert rig.err == f"error: nodes: 127.0.0.1 is not this machine to {D0}, {D1}; name an address that they reach\n"
    assert rig.pids() == {}


def test_setup_files_are_sourced_and_the_environment_is_laid_over(rig: Rig) -> None:
    file = rig.folder / "set_env.sh"
    script = ["export FROM_FILE=yes OF_BOTH=file", f"cat /proc/$$/cmdline >>{rig.folder}/seen", "set -xu", "test $# -eq 0"]
    file.write_text("\n".join(script))
    value = "api-key=SE$(echo C)RET 'a\"\n b"
    rig.tree["hosts"]["setup_files"] = [str(file)]
    rig.tree["env"] = {"OF_BOTH": value}
    rig.scripts["p0"] = f"import os; print([os.environ[k] for k in ('FROM_FILE', 'OF_BOTH')], flush=True)\n{CLEAN}"
    assert rig("start") == 0, rig.err
    log = (rig.run_folder(P0).path / "p0.log").read_text()
    assert str(["yes", value]) in log and log.count("api-key") == 1, "neither has the trace of the shell shown it"
    seen = (rig.folder / "seen").read_bytes()
    assert b"--config\0" in seen and b"api-key" not in seen
    kept = [*rig.run_folder(P0).path.glob("*.[yj]*"), *(rig.folder / ".run" / "small").glob("*.yaml")]
    assert sorted(path.name for path in kept) == ["cluster.yaml", "started.yaml", "state.json"]
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
    assert rig("stop") == 0


def _until_nothing_runs(rig: Rig) -> None:
    """Nothing of it; a stand-in for ssh may end a moment behind the verb that used it."""
    deadline = time.monotonic() + 30
    while rig.pids() or any(str(rig.folder) in line for line in _commands()):
        assert time.monotonic() < deadline, (rig.pids(), _commands())
        time.sleep(0.1)


def test_a_service_that_ends_names_its_machine_and_ends_all_others(rig: Rig) -> None:
    rig.scripts["d0.1"] = 'import sys, time; time.sleep(2); print("error: no card 3", flush=True); sys.exit(2)'
    rig.scripts["balancer"] = WAITS
    assert rig("start") == 2
    assert f"the start failed: d0.1 on {D1} ended with status 2" in rig.err
    assert "error: no card 3" in rig.err
    assert rig.out.endswith("stopped\n")
    assert rig.pids() == {}
    assert f"started p0 on {P0}" in rig.out, "another machine had something to end"
    _until_nothing_runs(rig)


def test_a_machine_that_is_lost_during_a_start_ends_it_everywhere(rig: Rig) -> None:
    rig.scripts["balancer"] = WAITS
    starting = rig.begin("start")
    assert rig.says(starting, "started balancer"), rig.end(starting)
    agent = int((rig.folder / f"{D1}.ssh").read_text())
    os.kill(agent, signal.SIGKILL)
    assert rig.end(starting) == 1
    assert f"the start failed: {D1}: the agent ended with status 137" in rig.err
    assert rig.pids() == {}, "what the lost agent had begun was found and ended too"
    _until_nothing_runs(rig)


def test_without_the_one_who_asked_nothing_stays_half_started(rig: Rig) -> None:
    rig.scripts["balancer"] = WAITS
    starting = rig.begin("start")
    assert rig.says(starting, "started balancer"), rig.end(starting)
    starting.kill()
    rig.end(starting)
    _until_nothing_runs(rig)


def test_ctrl_c_ends_what_was_started(rig: Rig) -> None:
    rig.scripts["balancer"] = WAITS
    starting = rig.begin("start")
    assert rig.says(starting, "started balancer"), rig.end(starting)
    starting.send_signal(signal.SIGINT)
    assert rig.end(starting) == 1
    assert "interrupted: stopping what was started" in rig.out
    assert rig.pids() == {}


def test_a_start_that_nobody_listens_to_is_no_success(rig: Rig) -> None:
    rig.scripts["balancer"] = WAITS
    starting = rig.begin("start")
    assert starting.stdout is not None
    starting.stdout.close()
    assert starting.wait(90) == 1
    assert starting.stderr is not None
    starting.stderr.close()
    assert rig.pids() == {}


def test_stop_names_machines_that_cannot_be_reached_and_stops_the_others(rig: Rig) -> None:
    assert rig("start") == 0, rig.err
    begun = rig.pids()
    rig.fault(D1, f"ssh: connect to host {D1} port 22: No route to host")
    assert rig("status") == 1
    assert f"d0.1         {D1}       unknown: the machine cannot be asked: no route to it" in rig.out
    assert rig("stop") == 1
    assert f"error: {D1}: not stopped: no route to it" in rig.err
    assert rig.pids() == {"d0.1": begun["d0.1"]}
    whole = rig.tree["decode"]["instances"][0]["nodes"]
    rig.tree["decode"]["instances"][0]["nodes"] = [D0]
    assert rig("start", "--set", "decode.engine.block_size=x") == 2, "refused for another reason"
    rig.mend(D1)
    assert rig("start") == 2, "the file does not name the machine any more"
    assert f"already running: d0.1 (pid {begun['d0.1']}) on {D1}" in rig.err
    rig.tree["decode"]["instances"][0]["nodes"] = whole
    assert rig("start") == 2
    assert f"already running: d0.1 (pid {begun['d0.1']}) on {D1}" in rig.err
    assert rig("stop") == 0, rig.out + rig.err
    assert rig.pids() == {}


def test_a_machine_at_which_another_verb_is_at_work_is_left_alone(rig: Rig) -> None:
    with rig.run_folder(P0).one_at_a_time():
        assert rig("start") == 2
        assert f"error: {P0}: another start or stop is at work in {rig.run_folder(P0).path}" in rig.err
        assert rig("stop") == 2
    assert rig.pids() == {}
    assert list(rig.folder.glob("10.*/run/*/*.log")) == []


def test_other_machines_need_a_folder(rig: Rig) -> None:
    rig.tree["hosts"].pop("path")
    assert rig("start") == 2
    assert rig.err == f"error: hosts.path: needed for {D0}, {D1}, {P0}, which is not this machine\n"


def test_machines_as_a_list_and_a_start_that_is_found_again_without_it(rig: Rig) -> None:
    rig.tree["prefill"]["instances"][0].pop("nodes")
    testpath = rig.tree["hosts"].pop("path")
    assert rig("start", "--testpath", testpath, "--iplist", f"{D0} {D1}") == 2
    assert "--iplist: has 2 addresses, small.yaml needs 3: decode.instances.0 2, prefill.instances.0 1" in rig.err
    assert rig("start", "--testpath", testpath, "--iplist", f"{D0} {D1} {P0}") == 0, rig.err
    assert rig("status") == 0, rig.out
    rig.tree["prefill"]["instances"].append({"name": "p1", "http_port": 20000})
    assert rig("stop", "--testpath", testpath, "--iplist", f"{D0} {D1} {P0}") == 0, "the file says otherwise by now"
    assert rig.pids() == {}
    assert rig("stop", "--testpath", testpath, "--iplist", f"{D0} {D1} {P0}") == 2, "nothing else is known"


def _commands() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "pytest" not in text:
            found.append(text)
    return found
