"""The large tensors of a lane between two devices, over a two-rank group of the devices' own backend (HCCL).

They come from host memory and end in host memory, as everything on a lane does; between the hosts they take the devices'
network. A lane's headers never travel here: a receive that is posted on a device waits there, cannot be taken back, and
has no deadline of its own. So one is posted only when a header says that its bytes are under way, and what limits a wait is
a timer that ends the pair, for both ends and for good.

This has been driven with gloo in the part of HCCL and with a scripted group. It has not run on a device; in particular it
is not shown that ending a group there wakes a wait for it, nor how soon when the other end has died in the middle of a
tensor (else HCCL_EXEC_TIMEOUT ends it).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from longcat_pd.kv_transfer.transport import LaneClosed, LaneTimeout
from longcat_pd.parallel.platform import Platform, Runtime

SOURCE, TARGET = 0, 1


class Carrier(Protocol):
    """What carries the large tensors of a lane; see ``transport.Lane`` for the calls."""

    def send(self, tensor: torch.Tensor) -> None:
        """Post."""
        ...

    def receive_into(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Wait for the next tensor."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Wait for everything posted."""
        ...

    def close(self) -> None:
        """From any thread."""
        ...


# (store, SOURCE or TARGET, seconds until both ends are there) -> None where hosts reach each other as well as devices do
MakeCarrier = Callable[[Any, int, float], Carrier | None]


def no_carrier(store: Any, me: int, timeout_s: float) -> None:
    """For a lane between hosts alone."""


def carriers_of(platform: Platform, index: int) -> MakeCarrier:
    """For the lanes of the rank at place ``index`` of its node."""

    def make(store: Any, me: int, timeout_s: float) -> Carrier | None:
        runtime = platform.runtime
        runtime.prepare_thread(index)
        group = runtime.make_pair(store, me)
        return None if group is None else DevicePair(group, me, runtime, platform.device(index), timeout_s)

    return make


class DevicePair:
    """A ``Carrier``. It is made and used by the thread of its lane.

    Args:
        group: of two, with ``send`` and ``recv`` of tensors on ``device``, whose works make the thread's stream wait.
        me: SOURCE or TARGET.
        timeout_s: until a first exchange, which builds the connection and which both ends make (LaneTimeout and LaneClosed
            leave the pair closed), and until a send is posted.
    """

    def __init__(self, group: Any, me: int, runtime: Runtime, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._runtime = runtime
        self._device = device
        self._timeout_s = timeout_s
        self._stream = runtime.own_stream()
        self._posted: list[tuple[Any, torch.Tensor]] = []
        self._ending = threading.Lock()
        self._is_ended = False
        self._is_late = False
        try:
            self._connect(me)
        except (LaneClosed, LaneTimeout):
            self.close()  # nobody else has it
            raise

    def send(self, tensor: torch.Tensor) -> None:
        """Copy to the device, and post. Posting the first one waits for the other end."""
        with self._limited(self._timeout_s), self._stream:
            staged = tensor.to(self._device)
            self._posted.append((self._group.send([staged], TARGET, 0), staged))

    def receive_into(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Receive on the device, and copy from there."""
        with self._limited(timeout_s), self._stream:
            staged = torch.empty_like(tensor, device=self._device)
            self._group.recv([staged], SOURCE, 0).wait()
            self._runtime.wait_for_stream()
            arrived = staged.cpu()  # not under the lock, which the end of a wait must get
            with self._ending:
                if not self._is_ended:
                    tensor.copy_(arrived)

    def drain(self, timeout_s: float) -> None:
        """Wait for everything posted."""
        try:
            with self._limited(timeout_s), self._stream:
                for work, _ in self._posted:
                    work.wait()
                self._runtime.wait_for_stream()
        finally:
            self._posted.clear()

    def close(self) -> None:
        """End the group, and with it every wait."""
        with self._ending:
            if self._is_ended:
                return
            self._is_ended = True
        with contextlib.suppress(RuntimeError):  # it was broken before
            self._runtime.abort(self._group)

    def _connect(self, me: int) -> None:
        first = torch.zeros(1, dtype=torch.uint8)
        if me == SOURCE:
            self.send(first)
            self.drain(self._timeout_s)
        else:
            self.receive_into(first, self._timeout_s)

    def _expire(self) -> None:
        self._is_late = True
        self.close()

    @contextlib.contextmanager
    def _limited(self, timeout_s: float) -> Iterator[None]:
        """The pair ends when the block takes longer."""
        timer = threading.Timer(timeout_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            with self._translated(timeout_s):
                yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _translated(self, timeout_s: float) -> Iterator[None]:
        """Whatever comes out of a group that was ended, an error or nothing at all, is no tensor. It is asked nothing more:
        some build a new connection then, for which nobody is there, and which no timer would end.
        """
        text = "the lane is closed"
        if self._is_ended:
            raise self._judged(text, timeout_s)
        try:
            yield
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise self._judged(text, timeout_s) from error
        if self._is_ended:
            raise self._judged(text, timeout_s)

    def _judged(self, text: str, timeout_s: float) -> LaneClosed | LaneTimeout:
        return LaneTimeout(f"nothing moved within {timeout_s:g} s") if self._is_late else LaneClosed(text)
