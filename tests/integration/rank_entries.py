"""Entries of rank processes for tests of the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.rank import run_rank
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.sides import Report


def report(config: str) -> None:
    """Write what this process inherited, and end with the status that it is told."""
    told = json.loads(config)
    Path(told["out"]).write_text(
        json.dumps(
            {
                "threads": os.environ.get("OMP_NUM_THREADS"),
                "network": {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "HCCL_IF_IP") if name in os.environ},
                "autoload": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
                "blocked": sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "has_torch": "torch" in sys.modules,
            }
        )
    )
    sys.exit(told["status"])


def raise_at_start(config: str) -> None:
    """A rank that fails behind the rendezvous, when its lanes are made."""
    run_rank(wire.from_json(RankSpec, config), _no_lanes)


def _no_lanes(spec: RankSpec, cache: KVCache, report: Report) -> Lanes:
    raise ValueError("a defect of the start")


def wait_for_ever(config: str) -> None:
    """A rank that is never told to end. Its standard error goes to a file."""
    out = Path(json.loads(config)["out"])
    os.dup2(os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
    out.write_text("up")
    threading.Event().wait()
