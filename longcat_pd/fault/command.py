"""``longcat-pd fault``: set, list and clear the fault switches of a cluster that has them, signal its processes, relay.

Owns the command line and what it prints. Knows the route ``/admin/fault`` of the balancer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from longcat_pd.config.keys import read_keys
from longcat_pd.config.resolve import unresolved
from longcat_pd.config.services import balancer_url
from longcat_pd.errors import ConfigError
from longcat_pd.fault.relay import HERE, Direction, RelayFaults, relaying
from longcat_pd.fault.signals import SIGNALS, find
from longcat_pd.faults import LONGEST_S, MOST, RECORDS, SWITCHES, Switch

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
DEFAULT_URL = "http://127.0.0.1:8081"
_ANSWER_S = 10.0
_LAST_PORT = 65535


def _seconds(text: str) -> float:
    """Raises ArgumentTypeError."""
    value = float(text)
    if not 0 <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {LONGEST_S:g}")
    return value


def _number(text: str, most: int = MOST) -> int:
    """Raises ArgumentTypeError."""
    value = int(text)
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {most}")
    return value


def _bytes(text: str) -> int:
    return _number(text, 1 << 50)


def _port(text: str) -> int:
    return _number(text, _LAST_PORT)


_PARAMETERS: dict[str, dict[str, Any]] = {
    "seconds": {"type": _seconds, "help": "how much longer, or how long it stays (0: until it is cleared)"},
    "after": {"type": _number, "metavar": "N", "help": "so many occasions pass first"},
    "times": {"type": _number, "metavar": "N", "help": "it strikes so often (default 1; 0: always)"},
    "layer": {"type": _number, "metavar": "N", "help": "of the model (default: any)"},
    "record": {"choices": RECORDS, "help": "which records"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the cluster did not answer or refused, 2 wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        if options.verb == "relay":
            return asyncio.run(_relay(options))
        if options.verb in SIGNALS:
            return _signal(options)
        return _tell_cluster(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_OK


def _tell_cluster(options: argparse.Namespace) -> int:
    told: dict[str, Any] = {"instance": options.instance} if options.instance is not None else {}
    if options.verb == "clear":
        told["clear"] = options.switch
    elif options.verb != "list":
        given = {key: value for key in (*_PARAMETERS, "rank") if (value := vars(options).get(key)) is not None}
        told |= {"name": options.verb, **given}
        if options.instance is None:
            raise ConfigError("--instance is needed: whose fault it is")
    url = balancer_url(unresolved(options.config)) if options.config is not None else options.url.rstrip("/")
    key = {} if options.key_file is None else {b"authorization": b"Bearer " + read_keys(options.key_file)[0]}
    try:
        answer = httpx.post(f"{url}/admin/fault", json=told, headers=key, timeout=_ANSWER_S, trust_env=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        sys.stderr.write(f"error: {url} does not answer: {error}\n")
        return EXIT_FAILED
    if answer.status_code != httpx.codes.OK:
        sys.stderr.write(f"error: {answer.status_code} {answer.text}\n")
        if answer.status_code == httpx.codes.NOT_FOUND:
            sys.stderr.write("a cluster has this route if its file says `faults: true`\n")
        return EXIT_FAILED
    try:
        return _show(answer.json())
    except (ValueError, TypeError, KeyError, AttributeError):
        sys.stderr.write(f"error: {url} answers with something else than the faults of a cluster\n")
        return EXIT_FAILED


def _show(said: dict[str, Any]) -> int:
    """What each instance has set, once all of it was understood. Raises what a foreign answer leads to."""
    instances: dict[str, Any] = said["instances"] if "instances" in said else {said["instance"]: said}
    wrong = "".join(f"error: {name}: {each['error']['message']}\n" for name, each in instances.items() if "error" in each)
    lines = "".join(_lines_of(each) for each in instances.values() if "error" not in each)
    sys.stderr.write(wrong)
    sys.stdout.write(lines)
    return EXIT_FAILED if wrong else EXIT_OK


def _lines_of(said: dict[str, Any]) -> str:
    """What is set at one instance."""
    faults = [" ".join([f.pop("name"), *(f"{key}={value}" for key, value in f.items())]) for f in said["faults"]]
    return "".join(f"{said['instance']:<8} {line}\n" for line in faults or ["-"])


def _signal(options: argparse.Namespace) -> int:
    if options.config is None or options.instance is None:
        raise ConfigError(f"{options.verb}: needs --config and --instance")
    pid = find(options.config, options.instance, options.rank)
    os.kill(pid, SIGNALS[options.verb])
    who = options.instance if options.rank is None else f"{options.instance} rank {options.rank}"
    sys.stdout.write(f"{SIGNALS[options.verb].name} to {who}, process {pid}\n")
    return EXIT_OK


async def _relay(options: argparse.Namespace) -> int:
    direction: Direction = options.direction
    faults = RelayFaults(
        direction=direction,
        delay_s=options.delay,
        stall_after=0 if options.stall else options.stall_after_bytes,
        cut_after=options.cut_after_bytes,
        resets=options.reset,
    )
    host, _, port = options.to.rpartition(":")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ConfigError(f"--to {options.to}: must be HOST:PORT", param="to")
    try:
        async with relaying((host.strip("[]"), int(port)), port=options.listen, faults=faults) as relay:
            sys.stdout.write(f"{HERE}:{relay.port} to {options.to}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
    except OSError as error:
        raise ConfigError(f"--listen {options.listen}: {error.strerror}", param="listen") from error
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd fault", description="Make a CPU cluster fail, on purpose.")
    for key, value in _common(parser, default=None).items():
        parser.set_defaults(**{key: value})
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="SWITCH|list|clear|kill|stop|cont|relay")
    for name, switch in SWITCHES.items():
        _add_switch(verbs.add_parser(name, help=switch.help, description=switch.help), switch)
    _common(verbs.add_parser("list", help="what is set"), default=argparse.SUPPRESS)
    clear = verbs.add_parser("clear", help="of one switch, or of all")
    clear.add_argument("switch", nargs="?", default="all", choices=[*SWITCHES, "all"])
    _common(clear, default=argparse.SUPPRESS)
    for name, number in SIGNALS.items():
        _common(verbs.add_parser(name, help=f"{number.name} to a process on this machine"), default=argparse.SUPPRESS)
    _add_relay(verbs.add_parser("relay", help="pass on TCP, or not, on loopback"))
    return parser


def _common(parser: argparse.ArgumentParser, *, default: Any) -> dict[str, Any]:
    """Arguments that may stand before and behind the verb. What they are if they stand nowhere."""
    parser.add_argument("--url", default=default, help=f"of the balancer, or of one instance (default {DEFAULT_URL})")
    parser.add_argument("--config", default=default, metavar="CLUSTER_YAML", help="in place of --url")
    parser.add_argument("--key-file", default=default, metavar="FILE", help="with the operator's key, if there is one")
    parser.add_argument("--instance", default=default, metavar="NAME", help="whose process; for signals also balancer")
    parser.add_argument(
        "--rank", type=_number, default=default, metavar="K", help="of which (default: all; for signals: none)"
    )
    return {"url": DEFAULT_URL}


def _add_switch(parser: argparse.ArgumentParser, switch: Switch) -> None:
    for name in (*switch.needs, *switch.takes):
        parser.add_argument(f"--{name}", required=name in switch.needs, **_PARAMETERS[name])
    _common(parser, default=argparse.SUPPRESS)


def _add_relay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", type=_port, default=0, metavar="PORT", help="on loopback (default: a free one)")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="of loopback")
    parser.add_argument("--delay", type=_seconds, default=0.0, metavar="SECONDS", help="of each piece")
    parser.add_argument("--stall", action="store_true", help="nothing passes")
    parser.add_argument("--stall-after-bytes", type=_bytes, metavar="N", help="then nothing passes")
    parser.add_argument("--cut-after-bytes", type=_bytes, metavar="N", help="of each connection, which ends then")
    parser.add_argument("--reset", action="store_true", help="a cut is a reset")
    parser.add_argument("--direction", choices=("to", "from", "both"), default="both", help="which way the faults are")
