"""Lanes over torch.distributed: a two-rank gloo process group for each pair of ranks, apart from every other group.

Where a device has a network of its own, a second group beside it carries the large tensors (``device_pair.py``); headers,
deadlines between messages and the end of a lane are gloo's everywhere.

Owns the meeting of the two ends: a TCPStore that the decode instance's rank 0 serves. A source writes who it is under the
first free number of the target rank's calls, in one step, so that none is taken and left empty by one that dies; the target
waits for the numbers in order. Both ends then make the group under a name that holds both incarnations and a word of this
call alone, so every new lane between the same two ranks has a new name. All of it is signed (``parallel/meeting.py``).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from longcat_pd.config.schema import RankSpec
from longcat_pd.kv_transfer.device_pair import SOURCE, TARGET, Carrier, MakeCarrier, carriers_of, no_carrier
from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd, LaneTimeout
from longcat_pd.log import Refusals
from longcat_pd.parallel.listening import store_server
from longcat_pd.parallel.meeting import Signature, Unsigned, make_pair
from longcat_pd.parallel.platform import platform_of
from longcat_pd.wire import MalformedRecord, from_json, to_json

HOST_BYTES = 4096  # tensors that are larger are the carrier's, if the lane has one; a header is smaller

_DATA_TAG, _CLOSING_TAG = 0, 1
_FOREVER = timedelta(days=365)
_CLOSING = timedelta(milliseconds=1)
_GOODBYE_LIMIT_S = 1.0
_TAKEN = "taken"  # in place of a call that the target has read
_TAKEN_KEPT = 1024  # of these, so that a source that counted a while ago finds no number free that is behind


def _translate(error: RuntimeError) -> LaneClosed | LaneTimeout:
    """gloo raises RuntimeError for everything; only the text tells a wait that was too long from a peer that is gone."""
    text = str(error).split(". This is typically")[0].rsplit("] ", 1)[-1]
    if text.startswith(("Timed out", "Wait timeout")):
        return LaneTimeout(text)
    return LaneClosed(text)


class GlooLane:
    """One end of a pair group; see ``transport.Lane``. ``me``: SOURCE or TARGET. ``carrier``: of large tensors."""

    def __init__(self, group: ProcessGroupGloo, me: int, carrier: Carrier | None = None) -> None:
        self._group: Any = group  # its stub lacks the calls that it inherits
        self._me = me
        self._carrier = carrier
        self._posted: list[tuple[Work, torch.Tensor]] = []
        self._closing = threading.Lock()
        self._is_closed = False

    def send(self, message: Sequence[torch.Tensor]) -> None:
        """Post."""
        try:
            for tensor in message:
                carrier = self._carrier_of(tensor)
                if carrier is not None:
                    carrier.send(tensor)
                else:
                    work: Work = self._group.send([tensor], TARGET, _DATA_TAG)
                    self._posted.append((work, tensor))
        except RuntimeError as error:
            raise _translate(error) from error

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """Wait for the next tensor. A large one on a device always has a deadline: it comes right behind its header."""
        carrier = self._carrier_of(tensor)
        if carrier is not None:
            assert timeout_s is not None, "a wait on a device without a deadline"
            carrier.receive_into(tensor, timeout_s)
            return
        limit = _FOREVER if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            self._group.recv([tensor], SOURCE, _DATA_TAG).wait(limit)
        except RuntimeError as error:
            raise _translate(error) from error

    def drain(self, timeout_s: float) -> None:
        """Wait for everything posted."""
        try:
            for work, _ in self._posted:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _translate(error) from error
        finally:
            self._posted.clear()
        if self._carrier is not None:
            self._carrier.drain(timeout_s)

    def close(self) -> None:
        """A receive that is too late closes the pair, and with it every wait of both ends; there is no gentler way."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if self._carrier is not None:
            self._carrier.close()
        try:
            self._group.recv([torch.empty(1, dtype=torch.int64)], 1 - self._me, _CLOSING_TAG).wait(_CLOSING)
        except RuntimeError:
            return  # as intended, or the pair was broken before

    def _carrier_of(self, tensor: torch.Tensor) -> Carrier | None:
        """Both ends know the size of what comes, and choose alike."""
        return self._carrier if tensor.nbytes > HOST_BYTES else None


@dataclass(frozen=True, slots=True)
class _CallRecord:
    """What a source writes into the store."""

    source: LaneEnd
    target: LaneEnd
    word: str

    @property
    def group_name(self) -> str:
        """Name of the pair group."""
        ends = (f"{end.instance}.{end.incarnation}.{end.rank}" for end in (self.source, self.target))
        return f"lane/{'-'.join(ends)}/{self.word}"


def _count_key(target: LaneEnd) -> str:
    """How many calls the target has read; it alone writes it."""
    return f"calls/{target.incarnation}/{target.rank}"


def _call_key(target: LaneEnd, number: int) -> str:
    return f"call/{target.incarnation}/{target.rank}/{number}"


def _write_call(store: TCPStore, target: LaneEnd, word: str, signature: Signature, timeout_s: float) -> None:
    """Write under the first free number. Raises RuntimeError when the store is gone, LaneTimeout."""
    number, until = store.add(_count_key(target), 0), time.monotonic() + timeout_s
    while time.monotonic() < until:
        number += 1
        key = _call_key(target, number)
        text = signature.sign(key, word.encode()).hex()
        there: Any = store.compare_set(key, "", text)  # bytes, and whose else they are nobody knows
        if there != _TAKEN.encode():
            store.set(key, there)  # wakes who waits for it, which the exchange alone need not do
        if there == text.encode():
            return
    raise LaneTimeout(f"{target.instance} rank {target.rank} has a queue of calls that did not end in {timeout_s:g} s")


def _connect(address: tuple[str, int], timeout_s: float, *, serve: bool = False) -> TCPStore:
    try:
        told: Any = store_server(*address) if serve else {"host_name": address[0], "port": address[1]}
        return TCPStore(**told, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as error:
        raise LaneClosed(f"no lane store at {address[0]}:{address[1]}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class LaneMakers:
    """What an instance's lanes are made with. ``carrier``: that of each; ``signature``: of what is written in the store."""

    carrier: MakeCarrier = no_carrier
    signature: Signature = field(default_factory=lambda: Signature(b""))

    @classmethod
    def of(cls, spec: RankSpec) -> LaneMakers:
        """Of a rank. Raises ConfigError."""
        carrier = carriers_of(platform_of(spec.instance.device), spec.local_rank)
        return cls(carrier, Signature.of_file(spec.instance.cluster_key_file))

    def pair(self, store: TCPStore, record: _CallRecord, me: int, timeout_s: float) -> GlooLane:
        """One end of a lane, when the other is there. Raises LaneClosed, LaneTimeout."""
        name = record.group_name
        try:
            group = make_pair(store, name, me, signature=self.signature, limit=timedelta(seconds=timeout_s))
            return GlooLane(group, me, self.carrier(PrefixStore(f"{name}/device", store), me, timeout_s))
        except RuntimeError as error:
            raise _translate(error) from error


class GlooCaller:
    """See ``transport.Caller``."""

    def __init__(self, me: LaneEnd, makers: LaneMakers | None = None) -> None:
        self._me = me
        self._makers = makers or LaneMakers()

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> GlooLane:
        """Call the target and make the pair. The store's connection belongs to the lane: a slow peer holds up no other."""
        store = _connect(address, timeout_s)
        record = _CallRecord(self._me, target, secrets.token_hex(8))
        try:
            _write_call(store, target, to_json(record), self._makers.signature, timeout_s)
        except RuntimeError as error:
            raise LaneClosed(f"the lane store of {target.instance} is gone") from error
        return self._makers.pair(store, record, SOURCE, timeout_s)

    def close(self) -> None:
        """Nothing is shared."""


@dataclass(frozen=True, slots=True)
class GlooCall:
    """See ``transport.Call``."""

    record: _CallRecord
    address: tuple[str, int]
    makers: LaneMakers

    @property
    def source(self) -> LaneEnd:
        """Who asks."""
        return self.record.source

    def open(self, timeout_s: float) -> GlooLane:
        """This end of the pair."""
        return self.makers.pair(_connect(self.address, timeout_s), self.record, TARGET, timeout_s)


class GlooListener:
    """See ``transport.Listener``.

    Args:
        me: this rank; rank 0 serves the store for all ranks of its instance.
        address: where the store is served; port 0 (rank 0 alone) takes a free one.
        timeout_s: how long to wait until rank 0 serves it.
        makers: of each lane.
    """

    def __init__(
        self, me: LaneEnd, address: tuple[str, int], timeout_s: float, *, makers: LaneMakers | None = None
    ) -> None:
        self._me = me
        self._makers = makers or LaneMakers()
        self._server = _connect(address, timeout_s, serve=True) if me.rank == 0 else None
        self.address = address if self._server is None else (address[0], self._server.port)
        self._is_over = False
        self._goodbye = secrets.token_hex(16)  # whoever reaches the store can write there
        self._waiting = _connect(self.address, timeout_s)  # a connection serves one wait at a time
        self._next = 1
        self._refusals = Refusals()

    def next_call(self) -> GlooCall | None:
        """Wait for the next number."""
        while True:
            try:
                place, text = self._take_next()
            except DistError:  # the store went with rank 0: the instance ends
                self._is_over = True
                return None
            try:
                word = self._makers.signature.read(place, bytes.fromhex(text.decode()))
                if word == self._goodbye.encode():
                    return None
                record = from_json(_CallRecord, word)
            except (MalformedRecord, ValueError, Unsigned) as error:
                self._refusals.tell("a caller of lanes", str(error))
                continue
            if record.target == self._me:  # else a call for a former life of this rank
                return GlooCall(record, self.address, self._makers)

    def _take_next(self) -> tuple[str, bytes]:
        key = _call_key(self._me, self._next)
        self._waiting.wait([key], _FOREVER)
        text: bytes = self._waiting.get(key)
        self._waiting.set(key, _TAKEN)
        self._waiting.set(_count_key(self._me), str(self._next))
        if self._next > _TAKEN_KEPT:
            self._waiting.delete_key(_call_key(self._me, self._next - _TAKEN_KEPT))
        self._next += 1
        return key, text

    def close(self) -> None:
        """A call that means the end. If the store is gone, so is the wait."""
        if self._is_over:
            return
        try:
            store, signature = _connect(self.address, _GOODBYE_LIMIT_S), self._makers.signature
            _write_call(store, self._me, self._goodbye, signature, _GOODBYE_LIMIT_S)
        except (RuntimeError, LaneClosed, LaneTimeout):
            return


def caller_of(spec: RankSpec, me: LaneEnd) -> GlooCaller:
    """What opens the lanes of a prefill rank. Raises ConfigError."""
    return GlooCaller(me, LaneMakers.of(spec))


def listener_of(spec: RankSpec, me: LaneEnd, address: tuple[str, int], timeout_s: float) -> GlooListener:
    """What hears of the lanes to a decode rank. Raises ConfigError."""
    return GlooListener(me, address, timeout_s, makers=LaneMakers.of(spec))
