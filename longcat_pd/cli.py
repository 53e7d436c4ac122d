"""The ``longcat-pd`` command: a table from command to the module that has its ``main``, loaded when chosen.

A command that needs no torch starts without it. Knows nothing of what the commands take.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, what this user may have of it, a file


class Command(NamedTuple):
    """Where a command lives: ``function(arguments) -> exit status`` in ``module``."""

    module: str
    function: str
    help: str


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "fault": Command("longcat_pd.fault.command", "main", "make a CPU cluster fail, on purpose, in a named way"),
        "infer": Command("longcat_pd.standalone.infer", "main", "answer a file of request bodies, one JSON object a line"),
        "plan": Command("longcat_pd.plan.command", "main", "what a cluster YAML asks of cards, machines and links"),
        "render": Command("longcat_pd.render.main", "main", "write Kubernetes manifests or systemd units of a cluster"),
        "replay": Command(
            "longcat_pd.replay.command", "main", "ask for a recorded answer again, perhaps on another layout"
        ),
        "serve": Command("longcat_pd.standalone.serve", "main", "serve one engine over HTTP, without a balancer"),
        "top": Command("longcat_pd.top.command", "main", "what the balancer's status page shows, in a terminal"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments behind the command to it. Exit status 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if given else 2
    command = COMMANDS.get(given[0])
    if command is None:
        sys.stderr.write(f"error: {given[0]!r} is not a command\n{_usage()}")
        return 2
    try:
        run = vars(importlib.import_module(command.module))[command.function]
        status = int(run(given[1:]))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough
        _drop_the_rest()
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)  # whoever waits has to see of what it ended
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_the_rest()
        sys.stderr.write(f"error: nothing more can be written: {error.strerror}\n")
        return 1
    return status


def _drop_the_rest() -> None:
    """Of standard output, which the interpreter must not try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    rows = "".join(f"  {name:<8} {command.help}\n" for name, command in COMMANDS.items())
    return f"usage: longcat-pd COMMAND [arguments]\n\n{rows}\nlongcat-pd COMMAND --help says what a command takes.\n"


if __name__ == "__main__":
    sys.exit(main())
