"""No test writes its log to what another has closed, and commands can be interrupted however the tests were started."""

from __future__ import annotations

import signal

import pytest
import structlog


def pytest_configure() -> None:
    """What a shell starts in the background ignores SIGINT, and so would every command that tests start to interrupt it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_log() -> None:
    """A test that starts a command in this process leaves a log behind that goes to that test's output."""
    structlog.reset_defaults()
