"""By which interface a machine has an address, from the machine's own tables. Knows no library that wants to know."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.errors import ConfigError

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # struct ifreq of a 64-bit Linux: 16 bytes of name, then a socket address
_MOST_ENTRIES = 4096
_INET6_TABLE = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this machine, and the interface that carries it (with its label, where it is not the first there)."""

    name: str
    address: str


def interface_of(host: str) -> Interface | None:
    """The interface of this machine that ``host`` means; None where that is loopback or every address.

    ``host``: a name or an address. Raises ConfigError if nobody knows the name, or no interface carries the address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"nodes: {host}: {error.strerror}", param="nodes") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    wanted = [str(address) for address in addresses if not address.is_loopback and not address.is_unspecified]
    if not wanted:
        return None
    carried = list(interfaces())
    for address in wanted:
        for interface in carried:
            if interface.address == address:
                return interface
    meant = host if host in wanted else f"{host} ({', '.join(dict.fromkeys(wanted))})"
    there = ", ".join(f"{interface.name} {interface.address}" for interface in carried)
    raise ConfigError(f"nodes: no interface of this machine carries {meant}; there are {there}", param="nodes")


def interfaces() -> Iterator[Interface]:
    """Every address of this machine: IPv4, then IPv6."""
    room = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    table = room.tobytes()[: struct.unpack("iL", answer)[0]]
    for start in range(0, len(table), _ENTRY_BYTES):
        entry = table[start : start + _ENTRY_BYTES]
        yield Interface(entry[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24]))
    for line in _INET6_TABLE.read_text(encoding="ascii").splitlines() if _INET6_TABLE.is_file() else ():
        digits, *_, name = line.split()
        yield Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
