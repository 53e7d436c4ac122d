"""Lanes that have faults (``faults.py``), over those of any transport: late, silent, broken, or with one message changed.

Stands where a prefill rank opens its lanes. Knows the form of a message (``frames.py``), so that a fault can be that of one
block of one layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from longcat_pd.faults import Switches
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.frames import Header, decode_header, encode_header
from longcat_pd.kv_transfer.transport import Caller, Lane, LaneClosed, LaneEnd, LaneTimeout

Message = tuple[torch.Tensor, ...]

_ROW_INTS = 3  # of the table in front of the blocks: entry, block, digest
_ROW_BYTES = 8 * _ROW_INTS


class FaultyCaller:
    """``Caller`` in front of another. ``cache``: what leaves is of this one."""

    def __init__(self, inner: Caller, switches: Switches, cache: KVCache) -> None:
        self._inner = inner
        self._switches = switches
        self._cache = cache

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> Lane:
        """A new lane."""
        return FaultyLane(self._inner.open(target, address, timeout_s), self._switches, self._cache)

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class FaultyLane:
    """The source's end of a lane in front of another. What goes wrong does so in ``drain``, which has a deadline."""

    def __init__(self, inner: Lane, switches: Switches, cache: KVCache) -> None:
        self._inner = inner
        self._switches = switches
        self._cache = cache
        self._posted: list[Message] = []
        self._overtaken: Message | None = None
        self._is_closed = threading.Event()

    def send(self, message: Sequence[torch.Tensor]) -> None:
        """Post."""
        if self._is_closed.is_set():
            raise LaneClosed("lane closed")
        self._posted.append(tuple(message))

    def drain(self, timeout_s: float) -> None:
        """Deliver what was posted, or what becomes of it."""
        end = time.monotonic() + timeout_s
        posted, self._posted = self._posted, []
        for message in posted:
            self._wait_while("lane_stall", end, timeout_s)
            for each in self._what_becomes_of(message):
                if self._switches.is_on("lane_half"):
                    self._inner.send(each[:1])
                    self._inner.drain(max(end - time.monotonic(), 0.0))
                    self._wait_while("lane_half", end, timeout_s)
                    each = each[1:]
                self._inner.send(each)
        self._inner.drain(max(end - time.monotonic(), 0.0))

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """As it is."""
        self._inner.receive_into(tensor, timeout_s)

    def close(self) -> None:
        """End the lane, and what waits on it."""
        self._is_closed.set()
        self._switches.notify()
        self._inner.close()

    def _wait_while(self, name: str, end: float, timeout_s: float) -> None:
        is_over = not self._switches.wait_while(name, end - time.monotonic(), until=self._is_closed.is_set)
        if is_over:
            self.close()
            raise LaneTimeout(f"nothing moved for {timeout_s} s")
        if self._is_closed.is_set():
            raise LaneClosed("lane closed")

    def _what_becomes_of(self, message: Message) -> list[Message]:
        """What is delivered in place of a message. An end is only overtaken, or overtakes."""
        if self._overtaken is not None:
            overtaken, self._overtaken = self._overtaken, None
            return [message, overtaken]
        header = decode_header(message[0])
        if header.is_end:
            return [message]
        slow = self._switches.strike("lane_slow")
        if slow is not None and self._is_closed.wait(slow.seconds):
            raise LaneClosed("lane closed")
        if self._switches.strike("lane_cut") is not None:
            self.close()
            raise LaneClosed("lane closed by a fault that was asked for")
        if self._switches.strike("lane_reorder", layer=header.layer) is not None:
            self._overtaken = message
            return []
        if self._switches.strike("lane_repeat", layer=header.layer) is not None:
            return [message, message]
        return [self._changed(header, message)]

    def _changed(self, header: Header, message: Message) -> Message:
        for name, change in _CHANGES.items():
            if self._switches.strike(name, layer=header.layer) is not None:
                entries = self._cache.spec.entries_of_layer(header.layer)
                table = header.num_items * _ROW_BYTES
                rows = message[1][:table].view(torch.int64).view(-1, _ROW_INTS)
                first = self._cache.tensor(entries[int(rows[0, 0])].name)[0]
                return change(header, message[1], first.nbytes)
        return message


def _without_first_block(header: Header, body: torch.Tensor, num_bytes: int) -> Message:
    table = header.num_items * _ROW_BYTES
    body = torch.cat([body[_ROW_BYTES:table], body[table + num_bytes :]])
    return encode_header(replace(header, num_items=header.num_items - 1, body_bytes=len(body))), body


def _with_another_bit(header: Header, body: torch.Tensor, _num_bytes: int) -> Message:
    body = body.clone()
    body[-1] ^= 1  # the blocks come last
    return encode_header(header), body


_CHANGES: dict[str, Callable[[Header, torch.Tensor, int], Message]] = {
    "lane_lose": _without_first_block,
    "lane_alter": _with_another_bit,
}
