"""Decode rank: the thread of one lane, which receives messages into buffers of its own and hands them over.

Owns the deadlines of a message and the end of a lane; knows neither transfers nor the cache.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch

from longcat_pd.kv_transfer.frames import HEADER_INTS, Header, MalformedFrame, decode_header
from longcat_pd.kv_transfer.sides import LaneOptions
from longcat_pd.kv_transfer.transport import Call, Lane, LaneClosed, LaneEnd, LaneTimeout
from longcat_pd.log import Refusals

JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message that has been received. An end has an empty body."""

    source: LaneEnd
    header: Header
    body: torch.Tensor


class Arrivals(Protocol):
    """What receives the messages of all lanes of a rank. ``changed``: guards everything."""

    changed: threading.Condition
    options: LaneOptions
    refusals: Refusals

    def bound(self, header: Header) -> None:
        """Before its body is given room. Raises MalformedFrame for one that no message has."""

    def has_place_for(self, message: Message) -> bool:
        """Whether the lane may go on with it. With ``changed`` held."""

    def keep_if_early(self, message: Message) -> bool:
        """Keep a message whose transfer is not announced yet; False if it is. With ``changed`` held."""

    def deal_with(self, message: Message) -> None:
        """A message of a transfer that was announced. Raises MalformedFrame."""

    def lost(self, source: LaneEnd, reason: str) -> None:
        """The lane has ended."""


class ArrivalLane:
    """The thread of one lane: receives into its own buffer and hands over."""

    def __init__(self, owner: Arrivals, call: Call) -> None:
        self.thread = threading.Thread(
            target=self._run, name=f"arrive-{call.source.instance}.{call.source.rank}", daemon=True
        )
        self._owner = owner
        self._call = call
        self._lane: Lane | None = None
        self._is_ending = False

    def close(self) -> None:
        """End the thread."""
        with self._owner.changed:
            self._is_ending = True
            lane = self._lane
            self._owner.changed.notify_all()
        if lane is not None:
            lane.close()
        if self.thread.ident is not None:
            self.thread.join(JOIN_S)

    def _run(self) -> None:
        source = self._call.source
        reason = "aborted: the lane ends"
        try:
            lane = self._open()
            while True:
                self._receive_message(lane)
        except LaneTimeout as error:
            reason = f"timed_out: lane from {source.instance} rank {source.rank}: {error}"
        except MalformedFrame as error:
            reason = f"peer_lost: lane from {source.instance} rank {source.rank}: {error}"
            with self._owner.changed:
                self._owner.refusals.tell(f"lane from {source.instance} rank {source.rank}", str(error))
        except LaneClosed as error:
            reason = f"peer_lost: lane from {source.instance} rank {source.rank}: {error}"
        finally:  # also when a defect of ours ends the thread
            if self._lane is not None:
                self._lane.close()
            self._owner.lost(source, reason)

    def _open(self) -> Lane:
        lane = self._call.open(self._owner.options.connect_timeout_s)
        with self._owner.changed:
            self._lane = lane
            is_ending = self._is_ending
        if is_ending:
            raise LaneClosed("the rank ends")
        return lane

    def _receive_message(self, lane: Lane) -> None:
        head = torch.empty(HEADER_INTS, dtype=torch.int64)
        lane.receive_into(head, None)
        header = decode_header(head)
        self._owner.bound(header)
        body = torch.empty(header.body_bytes, dtype=torch.uint8)
        if not header.is_end:
            lane.receive_into(body, self._owner.options.timeout_s)
        message, timeout_s = Message(self._call.source, header, body), self._owner.options.timeout_s
        with self._owner.changed:
            if not self._owner.changed.wait_for(lambda: self._is_ending or self._owner.has_place_for(message), timeout_s):
                raise LaneTimeout(f"bytes of a transfer that was not announced within {timeout_s} s")
            if self._is_ending:
                raise LaneClosed("the lane ends")
            is_kept = self._owner.keep_if_early(message)
        if not is_kept:
            self._owner.deal_with(message)
