"""By which interface a machine has an address, and what the libraries of ranks are told of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from longcat_pd.errors import ConfigError
from longcat_pd.server import interfaces
from longcat_pd.server.interfaces import Interface, interface_of
from longcat_pd.server.launch import network_environment

CARRIED = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.7"),
    Interface("bond1:2", "10.1.0.7"),
    Interface("bond1", "fd00::7"),
]
NAMES = {"w7": ["127.0.1.1", "10.1.0.7"], "w8": ["10.0.0.8"], "six": ["fd00::7"], "own": ["127.0.1.1"]}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., list[Any]] = socket.getaddrinfo

    def resolved(host: str, port: None, **options: Any) -> list[Any]:
        return [entry for address in NAMES.get(host, [host]) for entry in real(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(interfaces, "interfaces", lambda: iter(CARRIED))
    for name in ("GLOO_SOCKET_IFNAME", "HCCL_IF_IP", "HCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "host, name, address",
    [
        ("10.0.0.7", "eth0", "10.0.0.7"),
        ("10.1.0.7", "bond1:2", "10.1.0.7"),
        ("w7", "bond1:2", "10.1.0.7"),
        ("fd00::7", "bond1", "fd00::7"),
        ("fd00:0::7", "bond1", "fd00::7"),
        ("six", "bond1", "fd00::7"),
    ],
)
def test_the_interface_that_carries_the_address(host: str, name: str, address: str) -> None:
    assert interface_of(host) == Interface(name, address)
    assert network_environment(host) == {"GLOO_SOCKET_IFNAME": name, "HCCL_IF_IP": address}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "0.0.0.0", "own"])
def test_loopback_and_every_address_need_no_interface(host: str) -> None:
    assert interface_of(host) is None and network_environment(host) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_address_that_the_machine_has_not_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no interface of this machine carries w8 \(10\.0\.0\.8\); there are lo 127\.0\.0\.1"
    ):
        interface_of("w8")
    with pytest.raises(ConfigError, match=r"nodes: nobody\.invalid: "):
        interface_of("nobody.invalid")


def test_what_the_process_was_given_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert network_environment("10.0.0.7") == {"HCCL_IF_IP": "10.0.0.7"}
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "ib0")
    assert network_environment("10.0.0.7") == {}
    monkeypatch.delenv("HCCL_SOCKET_IFNAME")
    monkeypatch.setenv("HCCL_IF_IP", "10.9.0.7")
    assert network_environment("10.0.0.7") == {}


def test_the_machines_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = list(interfaces.interfaces())
    assert Interface("lo", "127.0.0.1") in found
    assert {interface.name.partition(":")[0] for interface in found} <= {name for _, name in socket.if_nameindex()}
