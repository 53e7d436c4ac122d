"""Hosts for the tests of this folder: made once, whole again after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.rig import Hosts, missing
from tests.parity.conftest import tiny as tiny


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts. Skips where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def hosts(machines: Hosts) -> Iterator[Hosts]:
    """The four hosts, each running, connected, known and with an empty disk when the test begins."""
    machines.restore()
    yield machines
