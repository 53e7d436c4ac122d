"""The rank side of a hand-over as the step loop sees it: two small interfaces, and what both sides share.

``push.py`` and ``arrival.py`` implement them. All calls come from the rank's step thread and return at once; the work
happens on lane threads. Results come back as ``TransferClosed`` through the callback that the implementation was given,
exactly one per transfer and rank, also for a rank that has nothing to send or to receive, and also after a cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from longcat_pd.config.schema import TransferConfig
from longcat_pd.kv_transfer.messages import Arrival, Push, TransferClosed
from longcat_pd.kv_transfer.transport import Caller

Report = Callable[[TransferClosed], None]
DigestMode = Literal["off", "sample", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneOptions:
    """How lanes behave. ``timeout_s``: longest time without progress of a message; ``connect_timeout_s``: to stand."""

    digest: DigestMode = "off"
    timeout_s: float = 60.0
    connect_timeout_s: float = 10.0

    @classmethod
    def of(cls, config: TransferConfig) -> LaneOptions:
        """As configured."""
        return cls(digest=config.digest, timeout_s=config.timeout_s, connect_timeout_s=config.connect_timeout_s)


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """For the accounts.

    Receives waiting for bytes, sends not yet handed to the wire, blocks of arrivals that no sequence has adopted (without
    those that they share), and which blocks of sequences that have left their slot a lane may still read.
    """

    posted: int = 0
    unsent: int = 0
    reserved_blocks: int = 0
    quarantined: frozenset[int] = frozenset()


class PushSide(Protocol):
    """Prefill rank: sends finished layers of granted sequences."""

    def begin(self, push: Push, *, prompt_len: int, blocks: bytes, split_start: int) -> None:
        """A sequence with a grant was admitted. ``blocks``, ``split_start``: its own blocks as in ``Admit``."""
        ...

    def push_layer(self, transfer_id: str, layer: int, first_block: int, end_block: int, *, is_last_chunk: bool) -> None:
        """Layer ``layer`` (number in the model) of block numbers first_block ... end_block - 1 is written and final.

        With the first chunk also those that were there before it; what the decode side has already is not sent. Called once
        for each layer of this stage and chunk, in order, right after the layer was computed. The last layer of this stage
        with ``is_last_chunk`` ends the transfer.
        """
        ...

    def retire(self, transfer_id: str) -> None:
        """The sequence has left its slot: its blocks are in quarantine until the transfer closes. Ignored if it has."""
        ...

    def cancel(self, transfer_id: str) -> None:
        """Give up what is not sent yet. Unknown or finished transfers are ignored."""
        ...

    def counts(self) -> LaneCounts:
        """For the accounts."""
        ...

    def open_through(self, wrap: Callable[[Caller], Caller]) -> None:
        """Lanes are opened by what ``wrap`` makes of who opens them. Before the first one."""
        ...

    def close(self) -> None:
        """End all lanes."""
        ...


class ArrivalSide(Protocol):
    """Decode rank: receives into reserved blocks."""

    def announce(self, arrival: Arrival) -> None:
        """These blocks will be filled; start to receive."""
        ...

    def drop(self, transfer_id: str) -> None:
        """Nothing may be written into the blocks of this transfer from the return of this call on."""
        ...

    def adopt(self, transfer_id: str) -> None:
        """The sequence takes a slot: its blocks are live now and no longer counted as reserved here."""
        ...

    def counts(self) -> LaneCounts:
        """For the accounts."""
        ...

    def close(self) -> None:
        """End all lanes."""
        ...
