"""``longcat-pd fault kill|stop|cont``: whose process it is, found by its port, and its ranks by their parents."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.errors import ConfigError
from longcat_pd.fault import command
from longcat_pd.fault.signals import find, listener_at
from tests.ports import free_base

# a driver that listens, its forkserver, and two ranks that tell the order they came in
DRIVER = """
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
rank = "import time; time.sleep(600)"
server = f"import subprocess, sys; ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}]) for _ in range(2)];"
server += "print(*(r.pid for r in ranks), flush=True); [r.wait() for r in ranks]"
subprocess.run([sys.executable, "-c", server])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Path, int, list[int]]]:
    base = free_base(100)
    tree = {
        "model": {"path": str(tmp_path)},
        "load_balancer": {"port": base},
        "prefill": {"instances": [{"name": "p0", "http_port": base + 10}]},
        "decode": {"instances": [{"name": "d0", "http_port": base + 20}]},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(tree))
    arguments = [sys.executable, "-c", DRIVER, str(base + 20)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        ranks = [int(word) for word in driver.stdout.readline().split()]
        try:
            yield path, driver.pid, ranks
        finally:
            for pid in (*ranks, driver.pid):
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)


def state(pid: int) -> str:
    """As the kernel has it; of one that is gone as of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "Z"
    return text[text.rindex(")") + 2]


def becomes(pid: int, wanted: str) -> bool:
    until = time.monotonic() + 60.0
    while state(pid) not in wanted:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_driver_and_its_ranks_are_found_and_signalled(
    cluster: tuple[Path, int, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, driver, ranks = cluster
    assert find(str(path), "d0", None) == driver
    assert [find(str(path), "d0", rank) for rank in (0, 1)] == ranks
    config = ["--config", str(path), "--instance", "d0"]
    assert command.main(["stop", *config, "--rank", "1"]) == 0
    assert becomes(ranks[1], "T") and state(ranks[0]) != "T" and state(driver) != "T"
    assert command.main(["stop", *config]) == 0 and becomes(driver, "T")
    assert [find(str(path), "d0", rank) for rank in (0, 1)] == ranks, "though their driver is stopped"
    assert command.main([*config, "--rank", "1", "cont"]) == 0 and becomes(ranks[1], "S")
    assert command.main(["cont", *config]) == 0 and becomes(driver, "S")
    assert command.main(["kill", *config, "--rank", "0"]) == 0 and becomes(ranks[0], "Z")
    assert capsys.readouterr().out.splitlines()[-1] == f"SIGKILL to d0 rank 0, process {ranks[0]}"


def test_who_is_not_there_is_named(cluster: tuple[Path, int, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _, _ = cluster
    for instance, rank, said in (
        ("d1", None, "instance=d1: not a service of .*; known: d0, p0, balancer"),
        ("p0", None, "p0: no process of this user listens at 127"),
        ("d0", 2, "rank=2: d0 has 2 rank processes on this machine"),
        ("d0", -1, "rank=-1: d0 has 2 rank processes on this machine"),
    ):
        with pytest.raises(ConfigError, match=said):
            find(str(path), instance, rank)
    assert command.main(["kill", "--instance", "d0"]) == 2
    assert "needs --config and --instance" in capsys.readouterr().err
    assert listener_at("127.0.0.9", int(path.read_text().split('"http_port": ')[-1].split("}")[0])) is None


@pytest.mark.parametrize(
    ("listens", "host", "is_it"),
    [
        ("::1", "127.0.0.1", False),
        ("::1", "::1", True),
        ("::", "127.0.0.1", True),
        ("::", "::1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "127.0.0.2", True),
        ("0.0.0.0", "::1", False),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "a.b.c.invalid", False),
    ],
)
def test_who_listens_at_another_address_is_left_alone(listens: str, host: str, is_it: bool) -> None:
    with socket.socket(socket.AF_INET6 if ":" in listens else socket.AF_INET) as listener:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((listens, 0))
        except OSError:
            pytest.skip(f"this machine has no {listens}")
        listener.listen()
        assert (listener_at(host, listener.getsockname()[1]) is not None) == is_it
