"""What the doctor makes of facts: numbers, and the text of tools that it has never run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longcat_pd.cluster.facts import Devices, Facts, KeyFile, TakenPort, Weights
from longcat_pd.cluster.findings import Expected, cards, clock, rows_of, states, unequal

TABLE = """
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                          |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     910B3               | OK            | 98.2        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
| 1     910B3               | {health}      | 98.2        36                0    / 0             |
| 0       0                 | 4711          | python                   | 100                     |
"""
MAPPING = """
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t1                              0                              1                              Ascend 910B3
"""
A3 = "NPU ID Chip ID Chip Logic ID Chip Phy-ID Chip Name\n0 0 0 0 Ascend910\n0 1 1 1 Ascend910\n0 2 - - Mcu\n"
FACTS = Facts(
    release="aa",
    ports=(),
    interface="eth0",
    mtu=1500,
    free_bytes={"/x": 2 << 30},
    memory_bytes=100,
    free_memory_bytes=50,
    cores=16,
    weights=Weights(problems=(), num_shards=2, size=1 << 30, digest="d"),
    key=KeyFile(problem="", mode=0o400, digest="k"),
    limits={"open files": 65536, "locked memory": 8192, "core": 0},
    is_killed_at_logout=False,
    devices=Devices(),
    toolkit="",
)
EXPECTED = Expected(node="n0", release="aa", disk_bytes=1000, num_ranks=8, cores_per_device=2, num_devices=0, interfaces={})


def row(what: str, facts: Facts = FACTS, expected: Expected = EXPECTED) -> tuple[str, str]:
    return next((each.level, each.text) for each in rows_of(facts, expected) if each.what == what)


def test_all_is_well() -> None:
    assert {each.level for each in rows_of(FACTS, EXPECTED)} == {"ok"}


@pytest.mark.parametrize(
    ("what", "facts", "level", "text"),
    [
        ("code", replace(FACTS, release="bb"), "bad", "release bb, but the tree here is aa"),
        ("code", replace(FACTS, release=""), "bad", "no release, but"),
        ("cores", replace(FACTS, cores=15), "bad", "15, but 8 ranks x hosts.cores_per_device=2 are 16"),
        (
            "logout",
            replace(FACTS, is_killed_at_logout=True),
            "bad",
            "logind ends services with the session that began them",
        ),
        ("disk /x", replace(FACTS, free_bytes={"/x": 999}), "bad", "the code alone needs"),
        ("disk /x", replace(FACTS, free_bytes={"/x": 1 << 29}), "warn", "0.5 GiB free"),
        ("memory", replace(FACTS, free_memory_bytes=9), "warn", "0.0 of 0.0 GiB free"),
        ("limits", replace(FACTS, limits={**FACTS.limits, "open files": 1024}), "warn", "at least 4096 open files"),
        ("limits", replace(FACTS, limits={**FACTS.limits, "open files": -1}), "ok", "open files unlimited"),
        ("interface", replace(FACTS, interface=""), "warn", "none was found that carries n0"),
        (
            "weights",
            replace(FACTS, weights=Weights(problems=tuple("abcde"), num_shards=5, size=0, digest="")),
            "bad",
            "a; b; c; and 2 more",
        ),
        ("key", replace(FACTS, key=KeyFile(problem="/k holds no key", mode=0o400, digest="")), "bad", "/k holds no key"),
        (
            "key",
            replace(FACTS, key=KeyFile(problem="", mode=0o440, digest="k")),
            "bad",
            "can use it, mode 0440: chmod 0400",
        ),
        ("key", replace(FACTS, key=KeyFile(problem="", mode=0o604, digest="k")), "bad", "mode 0604"),
        (
            "ports",
            replace(FACTS, ports=(TakenPort(port=80, purpose="p0 HTTP", pid=0, by="Permission denied", is_ours=False),)),
            "bad",
            "80 (p0 HTTP): Permission denied",
        ),
    ],
)
def test_what_is_not_well(what: str, facts: Facts, level: str, text: str) -> None:
    found = row(what, facts)
    assert found[0] == level and text in found[1]


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("eth0", "ok"),
        ("eth", "ok"),
        ("=eth0", "ok"),
        ("=eth", "warn"),
        ("ib0,eth0", "ok"),
        ("ib0", "warn"),
        ("^eth", "warn"),
        ("^docker", "ok"),
    ],
)
def test_an_interface_that_the_environment_names(value: str, level: str) -> None:
    assert row("interface", expected=replace(EXPECTED, interfaces={"HCCL_SOCKET_IFNAME": value}))[0] == level


def test_locked_memory_counts_where_there_are_cards() -> None:
    found = row("limits", expected=replace(EXPECTED, num_devices=2))
    assert found[0] == "warn" and "locked memory should be unlimited" in found[1]


@pytest.mark.parametrize(
    ("mapping", "health", "count", "expected"),
    [
        (MAPPING, "OK     ", 2, ("ok", "2 of 2")),
        (MAPPING, "OK     ", 1, ("ok", "1 of 1, 2 there")),
        (MAPPING, "OK     ", 3, ("bad", "2 of 3")),
        (MAPPING, "Alarm  ", 2, ("bad", "1 of 2 are not OK: Alarm")),
        (A3, "OK     ", 2, ("ok", "2 of 2")),
        ("missing", "", 2, ("bad", "npu-smi is missing")),
        ("dcmi model initialized failed", "", 2, ("warn", "npu-smi info -m says 'dcmi model initialized failed'")),
    ],
)
def test_cards(mapping: str, health: str, count: int, expected: tuple[str, str]) -> None:
    assert cards(Devices(mapping=mapping, table=TABLE.format(health=health)), count) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("link status: UP", "link status: UP\n"), ("ok", "2 of 2 UP")),
        (("link status: UP", "link status: DOWN"), ("bad", "1 of 2 UP: device 1 DOWN")),
        (("link status: UP", "Cmd os failed"), ("warn", "not understood: device 1 'Cmd os failed'")),
        (("Cmd os failed", "link status: DOWN"), ("bad", "0 of 2 UP: device 1 DOWN")),
        (("missing", "missing"), ("warn", "hccn_tool is missing")),
        (("link status: DOWN",) * 5, ("bad", "0 of 5 UP: device 0 DOWN; device 1 DOWN; device 2 DOWN; and 2 more")),
    ],
)
def test_states_of_devices(said: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert states(said, "link status", "UP") == expected


def test_a_clock_is_wrong_only_beyond_what_the_way_there_and_back_explains() -> None:
    assert clock("n", asked=10.0, heard=10.2, told=10.1).level == "ok"
    late = clock("n", asked=10.0, heard=10.2, told=8.9)
    assert (late.level, late.text) == ("warn", "1.200 s behind this machine's, give or take 0.100")
    assert clock("n", asked=10.0, heard=14.0, told=14.9).level == "ok", "the answer may have waited for 2 s"
    assert "ahead of" in clock("n", asked=10.0, heard=10.2, told=20.0).text


def test_machines_that_differ_are_named_and_the_usual_is_told() -> None:
    assert unequal("torch", {"a": "1", "b": "1"}).text == "1"
    odd = unequal("torch", {"a": "1", "b": "", "c": "1"})
    assert (odd.level, odd.text) == ("bad", "1 on 2, but b: none")
