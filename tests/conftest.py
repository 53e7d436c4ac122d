"""No test writes its log to what another has closed."""

from __future__ import annotations

import pytest
import structlog


@pytest.fixture(autouse=True)
def _own_log() -> None:
    """A test that starts a command in this process leaves a log behind that goes to that test's output."""
    structlog.reset_defaults()
