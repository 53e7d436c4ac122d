"""One forkserver for a whole test run, with everything loaded that rank processes of tests import.

Without it the server loads what the first test asks for, and every later rank process imports the rest again. Files of
tests that ranks import must not need much: no transformers.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

from longcat_pd.server.launch import _for_children

LOADED = (
    "torch",
    "pytest",
    "longcat_pd.engine.runner",
    "longcat_pd.prefill_worker.rank",
    "longcat_pd.decode_worker.rank",
    "longcat_pd.server.launch",
)


def start_server() -> None:
    """Start it, unless it runs already. Called before anything that starts rank processes."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*LOADED])
    with _for_children():
        forkserver.ensure_running()
