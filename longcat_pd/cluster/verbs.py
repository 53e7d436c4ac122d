"""The verbs of ``deploy/run_pd.sh``, as a table. Knows none of them but by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from longcat_pd.cluster import code, doctor, logs, look, restart, start, stop


class Verb(NamedTuple):
    """What a verb does, what it takes besides what all take, and what the operator is told of it."""

    main: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None]
    help: str


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "start": Verb(start.main, start.arguments, "start all services on their machines, and wait until they serve"),
        "stop": Verb(
            stop.main, stop.arguments, "let running requests finish, then end what start began, or one instance of it"
        ),
        "restart": Verb(restart.main, restart.arguments, "stop, then start"),
        "status": Verb(look.status, look.no_arguments, "each service: whether it is ready now, and since when"),
        "code": Verb(code.main, code.arguments, "make the tree of this machine the current release of every machine"),
        "doctor": Verb(doctor.main, look.no_arguments, "whether the machines are ready for the cluster, and alike"),
        "logs": Verb(logs.main, logs.arguments, "what all processes have written, in the order of time"),
    }
)
