"""Small checkpoints for tests that run processes."""

from tests.parity.conftest import tiny

__all__ = ["tiny"]
