"""A whole cluster over four hosts: decode on 0 and 1, prefill on 2 and 3, the balancer on 3; the faults that hosts have."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.cluster.code import distribute
from tests.clone import ROOT
from tests.hosts.clusters import cluster_tree, place, write_cluster
from tests.hosts.rig import Hosts

ENGINE = {"block_size": 16, "max_num_seqs": 4, "rank_lost_s": 4, "step_timeout_s": 20, "drain_timeout_s": 4}
SOON_S = 120.0  # a dead link is noticed after 15 s, one who gave a job and has gone after 30


class Cluster:
    """The verbs of run_pd.sh over the hosts. ``said``: all that the last of them wrote."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        tree = cluster_tree(hosts, model=hosts.disk / "model")
        tree["model"]["served_name"] = "tiny"
        for role in ("decode", "prefill"):
            tree[role]["engine"] = dict(ENGINE)
        self.hosts, self.said = hosts, ""
        self.file = write_cluster(folder / "four.yaml", tree)
        self._root = folder / "root"
        self._root.mkdir()
        self.url = f"http://{hosts.address(3)}:8081"

    def __call__(self, verb: str, *rest: str, timeout_s: float = 240.0) -> int:
        done = subprocess.run(
            [sys.executable, "-m", "longcat_pd.cluster", "--root", str(self._root), verb, str(self.file), *rest],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        self.said = done.stdout
        print(f"{verb} -> {done.returncode}\n{done.stdout}")
        return done.returncode

    def ask(self, timeout_s: float = 120.0) -> tuple[int, Any]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s, trust_env=False)
        return answer.status_code, answer.json()

    def left(self) -> list[list[str]]:
        """Processes of each host besides sshd."""
        return [self.hosts.processes(number) for number in range(4)]


@pytest.fixture(scope="module")
def deployed(machines: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Code on all hosts, and the checkpoint that came with it in a place of its own."""
    machines.restore()
    cluster = Cluster(machines, tmp_path_factory.mktemp("cluster"))
    assert distribute(ROOT, cluster.file, overrides=()) == 0
    for number in range(4):
        machines.exec(number, f"cp -r {place(machines)}/current/longcat_pd/tiny/trained/bf16 {machines.disk}/model")
    return cluster


@pytest.fixture
def cluster(deployed: Cluster) -> Iterator[Cluster]:
    """Nothing of it runs at the beginning, and nothing at the end."""
    deployed.hosts.restore(keeps_disks=True)
    yield deployed
    deployed.hosts.restore(keeps_disks=True)
    for number in range(4):
        deployed.hosts.exec(number, f"rm -rf {place(deployed.hosts)}/run")


def test_start_answers_stop_and_nothing_stays(cluster: Cluster) -> None:
    assert cluster("start") == 0, cluster.said
    assert f"curl -X POST {cluster.url}/v1/chat/completions" in cluster.said
    status, answer = cluster.ask()
    assert status == 200 and 1 <= answer["usage"]["completion_tokens"] <= 8, answer
    seen = cluster.hosts.exec(0, f"curl -sf --noproxy '*' {cluster.url}/ready && echo; cat /proc/net/dev")
    assert '"ready":true' in seen.replace(" ", ""), "hosts see the balancer under its own address too"
    assert cluster("status") == 0 and cluster.said.count("ready") >= 3
    before = cluster.left()
    assert all(before)
    assert cluster("start") == 2 and "already running" in cluster.said
    assert cluster.left() == before, "the second start has neither doubled nor ended anything"
    assert cluster("stop") == 0, cluster.said
    assert cluster.left() == [[]] * 4
    assert cluster("status") == 3


@pytest.mark.slow
def test_a_link_that_is_cut_in_service_and_comes_back(cluster: Cluster) -> None:
    assert cluster("start") == 0, cluster.said
    cluster.hosts.link(1, False)
    status, answer = cluster.ask()
    assert status >= 500 and "error" in answer, "ranks of the decode instance cannot be reached"
    assert cluster("status") != 0 and cluster.hosts.address(1) in cluster.said
    cluster.hosts.link(1, True)
    cluster("stop")
    assert cluster.left() == [[]] * 4, cluster.said
    assert cluster("start") == 0, cluster.said
    assert cluster.ask()[0] == 200
    assert cluster("stop") == 0


@pytest.mark.slow
def test_a_host_that_loses_its_power_in_service(cluster: Cluster) -> None:
    assert cluster("start") == 0, cluster.said
    cluster.hosts.kill(1)
    status, answer = cluster.ask()
    assert status >= 500 and "error" in answer
    assert cluster("logs", "--lines", "200") != 3
    missed = (f"rank 1 on {cluster.hosts.address(1)} has", f"node 1 ({cluster.hosts.address(1)}) of d0")
    assert any(name in cluster.said for name in missed), "the driver names the machine, whichever it misses first"
    assert cluster("stop") == 1 and cluster.hosts.address(1) in cluster.said
    assert [cluster.hosts.processes(number) for number in (0, 2, 3)] == [[]] * 3
    cluster.hosts.revive(1)
    assert cluster("start") == 0, cluster.said
    assert cluster("stop") == 0


def test_a_host_that_never_comes_up(cluster: Cluster) -> None:
    cluster.hosts.kill(2)
    assert cluster("start") == 2
    assert cluster.hosts.address(2) in cluster.said
    assert [cluster.hosts.processes(number) for number in (0, 1, 3)] == [[]] * 3


def test_hosts_that_are_not_who_they_should_be_and_keys_that_open_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.hosts.write_known_hosts(without=[1])
    assert cluster("start") == 2
    assert f"the host key of {cluster.hosts.address(1)} is not in" in cluster.said
    cluster.hosts.write_known_hosts()
    cluster.hosts.new_host_key(1)
    assert cluster("start") == 2
    address, known = cluster.hosts.address(1), cluster.hosts.known_hosts
    assert f"error: {address}: its host key is not the one in {known}" in cluster.said
    assert cluster.said.count("error: ") == 1
    cluster.hosts.write_known_hosts()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    assert cluster("start", "--set", f"hosts.identity_file={tmp_path / 'other'}") == 2
    assert "permission denied" in cluster.said
    assert cluster.left() == [[]] * 4


def test_weights_that_one_host_lacks(cluster: Cluster) -> None:
    cluster.hosts.exec(1, f"mv {cluster.hosts.disk}/model {cluster.hosts.disk}/elsewhere")
    try:
        assert cluster("start") == 2
    finally:
        cluster.hosts.exec(1, f"mv {cluster.hosts.disk}/elsewhere {cluster.hosts.disk}/model")
    assert "model.path" in cluster.said and cluster.hosts.address(1) in cluster.said
    assert cluster.left() == [[]] * 4


def test_a_port_that_is_taken(cluster: Cluster) -> None:
    address = cluster.hosts.address(2)
    cluster.hosts.listen(2, 30001)
    assert cluster("start") == 2
    assert f"port 30001 on {address}" in cluster.said and "is taken by pid" in cluster.said
    assert [cluster.hosts.processes(number) for number in (0, 1, 3)] == [[]] * 3


@pytest.mark.slow
def test_a_cable_that_is_pulled_during_a_start_ends_it_on_all_hosts(cluster: Cluster) -> None:
    hosts, log = cluster.hosts, f"{place(cluster.hosts)}/run/four/d0.1.log"
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(cluster, "start")
        deadline = time.monotonic() + SOON_S
        while "there" not in hosts.exec(1, f"test -e {log} && echo there", check=False):
            assert time.monotonic() < deadline, "it does not start"
        hosts.link(1, False)
        assert starting.result() == 1
    assert f"the start failed: {hosts.address(1)}: the link is dead" in cluster.said
    assert [hosts.processes(number) for number in (0, 2, 3)] == [[]] * 3
    deadline = time.monotonic() + SOON_S
    while left := hosts.processes(1):  # nobody can tell it, so its agent has to notice by itself
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
