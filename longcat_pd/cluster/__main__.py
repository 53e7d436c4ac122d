"""``deploy/run_pd.sh``: the verbs over the machines of a cluster, from one of them or from elsewhere.

Owns the command line. ``options`` has ``root`` (the folder with ``.run``), ``config`` (absolute), ``overrides`` (everything
that is laid over the file), and the verb's own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.cluster import overlay
from longcat_pd.cluster.machines import is_known_to_run
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, complain
from longcat_pd.cluster.verbs import VERBS
from longcat_pd.errors import ConfigError

DEFAULT_CONFIG = Path("deploy/config/cluster/local-cpu.yaml")
OF_WHAT_RUNS = ("stop", "status", "logs")  # they mean what was started, whatever list of machines there is by now


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status: 0 done, 1 failed, 2 refused, 3 (status) not running; of a failed start the culprit's."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.root = options.root.absolute()
    options.config = Path(options.config or options.root / DEFAULT_CONFIG).absolute()
    try:
        _check_text([*given, str(options.root), str(options.config)])
        if options.verb not in OF_WHAT_RUNS or not is_known_to_run(options):
            options.overrides = overlay.overrides(options.config, options)
        return VERBS[options.verb].main(options)
    except ConfigError as error:
        for line in error.message.splitlines():
            complain(f"error: {line}")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_FAILED
    except BrokenPipeError:  # whoever read has seen enough; the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK if options.verb in ("status", "logs", "doctor") else EXIT_FAILED


def _check_text(given: Sequence[str]) -> None:
    """Paths and options travel to the machines as text. Raises ConfigError."""
    for text in given:
        if (shown := os.fsencode(text).decode(errors="replace")) != text:
            raise ConfigError(f"{shown}: is not UTF-8, which paths and options have to be here")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_pd.sh", description="Start, look at and stop a cluster.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="|".join(VERBS))
    for name, about in VERBS.items():
        verb = verbs.add_parser(name, help=about.help, description=about.help)
        verb.add_argument("config", nargs="?", metavar="CLUSTER_YAML", help=f"default: {DEFAULT_CONFIG}")
        text = "laid over the file; repeatable"
        verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value", help=text)
        overlay.arguments(verb)
        about.arguments(verb)
    return parser


if __name__ == "__main__":
    sys.exit(main())
