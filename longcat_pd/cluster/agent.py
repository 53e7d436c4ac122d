"""``python -m longcat_pd.cluster.agent start|stop|status|logs``: one verb on one machine of a cluster, this one.

The job comes as a line of JSON on standard input, orders behind it; answers leave as lines of JSON on standard output
(``jobs.py``). Ends with the session: whoever gave the job is gone when standard input is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from longcat_pd.cluster import agent_logs, agent_look, agent_start, agent_stop
from longcat_pd.cluster.jobs import Event, Gone, Job, Orders, as_line
from longcat_pd.errors import ConfigError
from longcat_pd.wire import MalformedRecord

EXIT_OK, EXIT_REFUSED = 0, 2

Say = Callable[[Event], None]
VERBS: Mapping[str, Callable[[Job, Orders, Say], None]] = MappingProxyType(
    {"start": agent_start.start, "stop": agent_stop.stop, "status": agent_look.status, "logs": agent_logs.logs}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the verb. Exit status 2: it was refused, and ``refused`` or standard error says why."""
    (verb,) = sys.argv[1:] if arguments is None else arguments
    orders = Orders(sys.stdin.fileno())
    try:
        VERBS[verb](orders.job(), orders, _say)
    except ConfigError as error:
        _say(Event(refused=error.message))
        return EXIT_REFUSED
    except MalformedRecord as error:
        sys.stderr.write(f"the code here is of another version: {error}\n")
        return EXIT_REFUSED
    except Gone:
        return EXIT_OK
    return EXIT_OK


def _say(event: Event) -> None:
    """What nobody hears any more is not said: what has been begun is ended all the same."""
    try:
        sys.stdout.buffer.write(as_line(event))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        sys.stdout = sys.stderr


if __name__ == "__main__":
    sys.exit(main())
