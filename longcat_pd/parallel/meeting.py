"""How ranks know each other for ranks of one cluster, where everybody may write and call who reaches their ports.

They meet in a store. Each word there is signed with the cluster's key and for its place, so that none can be made, altered
or said again elsewhere without the key: gloo believes every byte that it finds there. What listens for a group hears nobody
once the group is joined, and those who came first show each other that they have the key. Where a cluster has none, all
this only shows damage. Nothing here is secret; a store can still be kept from working, and a stranger who comes in the
milliseconds in which a group is joined can end it, and with it the rank.

Knows neither layouts nor lanes. For gloo: other libraries have their own ways.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from longcat_pd.config.keys import read_cluster_keys
from longcat_pd.parallel.listening import deafen

_PURPOSE = b"longcat_pd ranks"
_MARK_BYTES = hashlib.sha256().digest_size


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
        mark, word = signed[:_MARK_BYTES], signed[_MARK_BYTES:]
        if not hmac.compare_digest(mark, self._of(place, word)):
            raise Unsigned(f"what is said at {place} is not signed with the key of this cluster")
        return word

    def _of(self, place: str, word: bytes) -> bytes:
        named = place.encode()
        return hmac.digest(self._key, len(named).to_bytes(8, "big") + named + word, "sha256")


class SignedStore(Store):
    """A store as torch.distributed sees it that makes groups: each word signed. Counts are not.

    Args:
        name: of the meeting; no other one ever has it.
        limit: of a wait that names none.

    Attributes:
        told: words of this end, by which each of its groups tells where it listens.
    """

    def __init__(self, store: Store, name: str, *, signature: Signature, limit: timedelta) -> None:
        super().__init__()
        self._store: Any = store  # its stub knows values as str; they are bytes too
        self._name = name
        self._signature = signature
        self._limit = limit
        self.told: list[bytes] = []

    def set(self, key: str, value: Any) -> None:
        """Write; bytes or str."""
        place, word = self._place(key), value if isinstance(value, bytes) else value.encode()
        self.told.append(word)
        self._store.set(place, self._signature.sign(place, word))

    def get(self, key: str) -> bytes:
        """Read, once it is there. Raises Unsigned."""
        place = self._place(key)
        return self._signature.read(place, self._store.get(place))

    def add(self, key: str, value: int) -> int:
        """Count."""
        count: int = self._store.add(self._place(key), value)
        return count

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        self._store.wait([self._place(key) for key in keys], timeout or self._limit)

    def has_extended_api(self) -> bool:
        """Only these."""
        return False

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"


def make_pair(store: Store, name: str, me: int, *, signature: Signature, limit: timedelta) -> ProcessGroupGloo:
    """A group of two who meet in the store under a name that is used once. From any thread.

    Raises RuntimeError, as gloo does, and Unsigned.
    """
    meeting = SignedStore(store, name, signature=signature, limit=limit)
    group = ProcessGroupGloo(meeting, me, 2, limit)
    deafen(meeting.told, name)
    prove(group, name, me, [1 - me], signature=signature, limit=limit)
    return group


def prove(group: Any, name: str, me: int, others: Sequence[int], *, signature: Signature, limit: timedelta) -> None:
    """Show the other places of a group that this one has the key, and see that they have it. All of them call it.

    When it returns, all others have begun it: none of them needs the store any more by way of which they joined.

    Raises RuntimeError, as the group does, and Unsigned.
    """
    shown = [_as_tensor(signature.sign(f"{name}/{me}/{to}", b"")) for to in others]
    seen = [torch.empty(_MARK_BYTES, dtype=torch.uint8) for _ in others]
    works = [group.send([mark], to, 0) for mark, to in zip(shown, others, strict=True)]
    works += [group.recv([mark], frm, 0) for mark, frm in zip(seen, others, strict=True)]
    for work in works:
        work.wait(limit)
    for mark, frm in zip(seen, others, strict=True):
        signature.read(f"{name}/{frm}/{me}", bytes(mark.tolist()))


def _as_tensor(word: bytes) -> torch.Tensor:
    return torch.tensor(list(word), dtype=torch.uint8)
