"""The key files that a configuration names: one key a line, read where they are needed. Never logged, never an argument.

Of the cluster's file the first key counts on the sockets between its processes; what is refused there is told here.
"""

from __future__ import annotations

import codecs
from collections import Counter
from pathlib import Path

from longcat_pd.curve import Admission, CurveMissing, Seal
from longcat_pd.errors import ConfigError
from longcat_pd.log import logger


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, the first one first. Raises ConfigError: not readable, without a key, or with one that no header
    can hold, which then nobody could show; the text of the error does not have it."""
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"key file {path} holds no key")
    for number, key in enumerate(keys, 1):
        if any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in key):
            text = "holds a control character, as in a file that is no plain text"
            raise ConfigError(f"key file {path}: key {number} of {len(keys)} {text}")
    return keys


def read_cluster_keys(path: str) -> tuple[str, ...]:
    """The keys of a cluster's file; the first one travels in a header of HTTP too. Raises ConfigError, as ``read_keys``,
    and for one that no header can hold."""
    keys = read_keys(path)
    for number, key in enumerate(keys, 1):
        if not all(0x20 <= byte <= 0x7E for byte in key):
            raise ConfigError(f"key file {path}: key {number} of {len(keys)} is not printable ASCII, as a header has to be")
    return tuple(key.decode("ascii") for key in keys)


def admission(key_file: str | None) -> Admission:
    """To sockets of the cluster with this key file; to everybody without one. Raises ConfigError."""
    refused: Counter[str] = Counter()

    def tell(endpoint: str, reason: str) -> None:
        """A peer that dials comes back five times a second: the first line of each reason, then the 2nd, 4th, 8th ..."""
        refused[reason] += 1
        count = refused[reason]
        if count & (count - 1) == 0:
            logger().warning("peer_refused", at=endpoint, reason=reason, count=count)

    try:
        seal = None if key_file is None else Seal.of(read_cluster_keys(key_file)[0].encode())
        return Admission(seal=seal, tell=tell)
    except CurveMissing:
        raise ConfigError("cluster_key_file: the ZeroMQ library of this machine was built without CURVE") from None
