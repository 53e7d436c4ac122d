"""KILL, STOP and CONT for a driver, one of its ranks or the balancer of a cluster that runs on this machine.

Finds a process by the port that it listens on, so that a stopped one is found too, however it was started.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from longcat_pd.config.resolve import unresolved
from longcat_pd.config.services import services
from longcat_pd.errors import ConfigError

SIGNALS: Mapping[str, signal.Signals] = MappingProxyType(
    {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
)
_LISTENS = "0A"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Process(NamedTuple):
    pid: int
    parent: int
    started: int  # in ticks since the machine began


def find(config: str, instance: str, rank: int | None) -> int:
    """The id of a process of this machine's cluster. Raises ConfigError: no such service, or it does not run here."""
    urls = {service.name: service.url for service in services(unresolved(config)) if service.url}
    if instance not in urls:
        raise ConfigError(f"instance={instance}: not a service of {config}; known: {', '.join(urls)}", param="instance")
    address = urlsplit(urls[instance])
    driver = listener_at(address.hostname or "", address.port or 0)
    if driver is None:
        raise ConfigError(f"{instance}: no process of this user listens at {address.netloc} on this machine")
    if rank is None:
        return driver
    ranks = ranks_of(driver)
    if not 0 <= rank < len(ranks):
        raise ConfigError(f"rank={rank}: {instance} has {len(ranks)} rank processes on this machine", param="rank")
    return ranks[rank]


def listener_at(host: str, port: int) -> int | None:
    """Who listens there, if it can be seen: a process of this user, on this machine."""
    wanted = {f"socket:[{inode}]" for inode in _listening_sockets(host, port)}
    holders = {process.pid: process.parent for process in _processes() if wanted & _descriptors(process.pid)}
    return next((pid for pid, parent in holders.items() if parent not in holders), None)


def ranks_of(driver: int) -> list[int]:
    """Ids of the rank processes of a driver by rank: they are children of its forkserver, begun one after the other."""
    known = {process.pid: process for process in _processes()}
    of_it = [p for p in known.values() if p.parent in known and known[p.parent].parent == driver]
    return [process.pid for process in sorted(of_it, key=lambda process: (process.started, process.pid))]


def _listening_sockets(host: str, port: int) -> Iterator[str]:
    """Inodes of sockets that take what is sent to an address, or to any that a name of this machine means."""
    wanted = set(_addresses_of(host))
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.is_file() else ():
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == _LISTENS and int(number, 16) == port and _takes(_address(address), wanted):
                yield fields[9]


def _addresses_of(host: str) -> Iterator[_Address]:
    """Nothing for a name that means nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            yield _plain(ipaddress.ip_address(str(place[0]).partition("%")[0]))


def _address(words: str) -> _Address:
    """As /proc/net has it: words of 32 bits, each as this machine stores it."""
    parts = [int(words[place : place + 8], 16).to_bytes(4, sys.byteorder) for place in range(0, len(words), 8)]
    return _plain(ipaddress.ip_address(b"".join(parts)))


def _plain(address: _Address) -> _Address:
    """An address of IPv4 inside of one of IPv6 as what it is."""
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address


def _takes(listening: _Address, wanted: Iterable[_Address]) -> bool:
    """Sockets of ``::`` take IPv4 too, those of 0.0.0.0 nothing else."""
    return any(
        listening == address or (listening.is_unspecified and (listening.version == 6 or address.version == 4))
        for address in wanted
    )


def _processes() -> Iterator[_Process]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = stat.read_text(encoding="utf-8", errors="replace")
            fields = text[text.rindex(")") + 2 :].split()
            yield _Process(int(stat.parent.name), int(fields[1]), int(fields[19]))


def _descriptors(pid: int) -> set[str]:
    """What its open files are; nothing of a process that is another user's or gone."""
    found = set()
    with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(str(link.readlink()))
    return found
