"""What ranks of two instances tell each other by way of a store, to which everybody may write who reaches its port.

Each word is signed with the cluster's key and for its place, so that none can be made, changed or said again elsewhere
without the key; where the cluster has none, it is only told from damage. Nothing here is secret, and a store can still be
kept from working. Knows neither lanes nor calls.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from longcat_pd.config.keys import read_cluster_keys
from longcat_pd.parallel.listening import Listeners

_PURPOSE = b"longcat_pd lanes"


class Unsigned(RuntimeError):
    """A word that nobody who has the key has put there."""


class Signature:
    """Of a cluster, by its first key; b"": one without."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(key, person=_PURPOSE).digest()

    @classmethod
    def of_file(cls, key_file: str | None) -> Signature:
        """Raises ConfigError."""
        return cls(b"" if key_file is None else read_cluster_keys(key_file)[0].encode())

    def sign(self, place: str, word: bytes) -> bytes:
        """The word as it is written at a place."""
        return self._of(place, word) + word

    def read(self, place: str, signed: bytes) -> bytes:
        """The word that was signed for a place. Raises Unsigned."""
        mark, word = signed[: hashlib.sha256().digest_size], signed[hashlib.sha256().digest_size :]
        if not hmac.compare_digest(mark, self._of(place, word)):
            raise Unsigned(f"what stands at {place} is not signed with the key of this cluster")
        return word

    def _of(self, place: str, word: bytes) -> bytes:
        named = place.encode()
        return hmac.digest(self._key, len(named).to_bytes(8, "big") + named + word, "sha256")


class _SignedStore(Store):
    """The store as the library sees it that makes a group: the words of one group, each signed.

    ``began``: called before the first word, which tells where this end listens. ``limit``: of a wait that names none.
    """

    def __init__(
        self, store: Store, name: str, *, signature: Signature, began: Callable[[], None], limit: timedelta
    ) -> None:
        super().__init__()
        self._store: Any = store  # its stub knows values as str; they are bytes too
        self._name = name
        self._signature = signature
        self._began = began
        self._limit = limit

    def set(self, key: str, value: Any) -> None:
        """Write bytes."""
        self._began()
        place = f"{self._name}/{key}"
        self._store.set(place, self._signature.sign(place, value))

    def get(self, key: str) -> bytes:
        """Read, once it is there. Raises Unsigned."""
        place = f"{self._name}/{key}"
        return self._signature.read(place, self._store.get(place))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        self._store.wait([f"{self._name}/{key}" for key in keys], timeout or self._limit)

    def has_extended_api(self) -> bool:
        """Only these."""
        return False


def make_pair(store: Store, name: str, me: int, *, signature: Signature, limit: timedelta) -> ProcessGroupGloo:
    """A group of two who meet in the store under a name that is used once. Nobody else is heard once they have.

    Raises RuntimeError, as gloo does, and Unsigned.
    """
    listeners = Listeners()
    listeners.begin()
    try:
        meeting = _SignedStore(store, name, signature=signature, began=listeners.note, limit=limit)
        group = ProcessGroupGloo(meeting, me, 2, limit)
    finally:
        listeners.note()
    listeners.deafen(name)
    return group
