"""Fixtures of the parity tests that are wanted here too."""

from tests.parity.conftest import tiny as tiny
