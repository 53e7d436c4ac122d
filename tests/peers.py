"""Sockets of the tests: who may connect to them."""

from __future__ import annotations

from longcat_pd.config.keys import admission

OPEN = admission(None)
