"""Ports that are taken: named with who holds them, together with everything else that stands against a start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.config.checks import PortUse
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.preflight import inspect, port_findings
from tests.unit.test_resolve import cluster

__all__ = ["cluster"]


@pytest.fixture
def held_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_who_holds_a_port_is_named_and_a_free_one_is_not(held_port: int) -> None:
    (line,) = port_findings([PortUse("127.0.0.1", held_port, "HTTP", "x.http_port")])
    assert "is taken by pid " in line
    assert "pytest" in line
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert not list(port_findings([PortUse("127.0.0.1", port, "HTTP", "x.http_port")]))


def test_an_address_of_another_machine_is_refused() -> None:
    (line,) = port_findings([PortUse("192.0.2.1", 30000, "HTTP", "d0.http_port")])
    assert line == "d0.http_port=30000: port 30000 on 192.0.2.1 (HTTP) Cannot assign requested address"


def test_ports_and_memory_are_refused_together(cluster: Path, held_port: int) -> None:
    overrides = [f"prefill.instances.0.http_port={held_port - 3}", "decode.instances=[{name: d0, http_port: 1100}]"]
    flight = inspect(instance_spec(load(cluster, overrides), "p0"), available_bytes=100 << 20)
    assert flight.plan
    with pytest.raises(ConfigError) as caught:
        flight.raise_if_refused()
    lines = caught.value.message.splitlines()
    assert f"p0.http_port={held_port}: port {held_port} on 127.0.0.1 (outputs) is taken by pid" in "\n".join(lines[:-1])
    assert lines[-1].startswith("prefill p0 needs 0.")
