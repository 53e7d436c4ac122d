"""Small checkpoints and compiled steps for tests that run processes."""

from tests.graphs import graphs
from tests.parity.conftest import tiny

__all__ = ["graphs", "tiny"]
