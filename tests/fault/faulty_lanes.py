"""Entries of prefill rank processes whose lanes have a fault: one data message is altered, lost, repeated or late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import Lanes
from longcat_pd.engine.rank import run_rank
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.frames import decode_header
from longcat_pd.kv_transfer.push import Report
from longcat_pd.kv_transfer.transport import Caller, Lane, LaneEnd
from longcat_pd.prefill_worker.rank import push_lanes

LATE_S = 1.0  # long after the commit of a short prompt

Message = Sequence[torch.Tensor]
Fault = Callable[[Lane, Message], None]


def altered(config: str) -> None:
    """One bit of the cache is another on its way."""
    _run(config, _alter)


def lost(config: str) -> None:
    """A message does not arrive."""
    _run(config, lambda _lane, _message: None)


def repeated(config: str) -> None:
    """A message arrives twice."""
    _run(config, _repeat)


def late(config: str) -> None:
    """A message is held up, so that the commit is there before it."""
    _run(config, _delay)


def _alter(lane: Lane, message: Message) -> None:
    head, body = message
    body = body.clone()
    body[-1] ^= 1  # the cache comes last
    lane.send([head, body])


def _repeat(lane: Lane, message: Message) -> None:
    lane.send(message)
    lane.send(message)


def _delay(lane: Lane, message: Message) -> None:
    time.sleep(LATE_S)
    lane.send(message)


def _run(config: str, fault: Fault) -> None:
    run_rank(wire.from_json(RankSpec, config), partial(_lanes, fault=fault))


def _lanes(spec: RankSpec, cache: KVCache, report: Report, *, fault: Fault) -> Lanes:
    push, arrival = push_lanes(spec, cache, report)
    assert push is not None
    push.caller = _FaultyCaller(push.caller, fault)
    return push, arrival


class _FaultyCaller:
    """Lanes of another caller; the first data message of the second layer, on any of them, meets the fault."""

    def __init__(self, inner: Caller, fault: Fault) -> None:
        self._inner = inner
        self.fault: Fault | None = fault

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> Lane:
        return _FaultyLane(self, self._inner.open(target, address, timeout_s))

    def close(self) -> None:
        self._inner.close()


class _FaultyLane:
    def __init__(self, owner: _FaultyCaller, inner: Lane) -> None:
        self._owner = owner
        self._inner = inner

    def send(self, message: Message) -> None:
        fault, header = self._owner.fault, decode_header(message[0])
        if fault is None or header.is_end or header.layer != 1:
            self._inner.send(message)
            return
        self._owner.fault = None
        fault(self._inner, message)

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        self._inner.receive_into(tensor, timeout_s)

    def drain(self, timeout_s: float) -> None:
        self._inner.drain(timeout_s)

    def close(self) -> None:
        self._inner.close()
