"""The thread of a rank that owns its output socket. Knows no plans and no model."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from longcat_pd import wire
from longcat_pd.clock import HEARTBEAT_S
from longcat_pd.config.keys import admission
from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.faulty_rank import FaultySocket
from longcat_pd.engine.plan import RANK_MESSAGES, Heartbeat, RankAccounts, RankMessage, RankProgress
from longcat_pd.faults import Switches
from longcat_pd.progress.steps import Paced, Step, Tell

_STATUS_UNHEARD = 1


class Outbox:
    """The thread that sends: outputs and events as they come, a heartbeat after a second without any.

    Steps compute on another thread, so a long one does not keep it from beating. Every message begins with the identity of
    the rank. ``switches``: of the faults that hold up what it says.

    Raises ConfigError for a key file that cannot be read.
    """

    def __init__(self, spec: RankSpec, switches: Switches | None = None) -> None:
        self._admission = admission(spec.instance.cluster_key_file)
        self._spec = spec
        self._switches = switches
        self._messages: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._accounts: Callable[[], RankAccounts] = lambda: RankAccounts(rank=spec.rank)
        self._step_id = 0
        self.tell: Tell = Paced(self._progress, time.monotonic)  # of the start; sends soon
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: RankMessage) -> None:
        """Sends soon. From any thread."""
        self._messages.put(message)

    def report_from(self, accounts: Callable[[], RankAccounts]) -> None:
        """Heartbeats carry these accounts from now on."""
        self._accounts = accounts

    def note_step(self, step_id: int) -> None:
        """The step in work; 0 when idle."""
        self._step_id = step_id

    def close(self) -> None:
        """Sends what was put so far and ends."""
        self._messages.put(None)
        if threading.current_thread() is not self._thread:  # which can be told to end by a defect of its own
            self._thread.join()

    def _progress(self, step: Step, done: int, total: int) -> None:
        self.put(RankProgress(rank=self._spec.rank, step=step, done=done, total=total))

    def _run(self) -> None:
        codec: wire.Codec[RankMessage] = wire.Codec(*RANK_MESSAGES)
        plain = wire.BlockingSocket("push", self._spec.output_endpoint, bind=False, admission=self._admission)
        socket = plain if self._switches is None else FaultySocket(plain, self._switches)
        while (message := self._next()) is not None:
            try:
                socket.send([self._spec.identity, *codec.encode(message)])
            except wire.Unsendable:  # thousands of messages wait: the driver reads no more
                os._exit(_STATUS_UNHEARD)
        socket.close()

    def _next(self) -> RankMessage | None:
        try:
            return self._messages.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            return Heartbeat(rank=self._spec.rank, step_id=self._step_id, accounts=self._accounts())
