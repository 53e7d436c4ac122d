"""What plans mean for a rank's lanes: announcements, grants, and layers that are ready to leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.plan import Admit, StepPlan
from longcat_pd.engine.slots import Span
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.messages import DraftState, Push, TransferClosed
from longcat_pd.kv_transfer.sides import ArrivalSide, LaneCounts, PushSide

Lanes = tuple[PushSide | None, ArrivalSide | None]
MakeLanes = Callable[[RankSpec, KVCache, Callable[[TransferClosed], None]], Lanes]


def no_lanes(_spec: RankSpec, _cache: KVCache, _on_closed: Callable[[TransferClosed], None]) -> Lanes:
    """A rank whose cache never leaves it."""
    return None, None


def packed(final: torch.Tensor) -> DraftState:
    """The hidden state [1, hidden] that the first drafts start from, for the wire."""
    data = final.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return DraftState(hidden=data, dtype=str(final.dtype).removeprefix("torch."))


def unpacked(state: DraftState, like: torch.Tensor) -> torch.Tensor:
    """Inverse of ``packed``, on the device and in the data type of ``like``."""
    sent_as = {"float32": torch.float32, "bfloat16": torch.bfloat16}[state.dtype]
    return torch.frombuffer(bytearray(state.hidden), dtype=sent_as).view(1, -1).to(like.device, like.dtype)


class Handover:
    """The lanes of one rank as its runner uses them.

    Args:
        push: where finished layers of granted sequences go (prefill side).
        arrival: what fills reserved blocks (decode side).
    """

    def __init__(self, push: PushSide | None, arrival: ArrivalSide | None) -> None:
        self._push = push
        self._arrival = arrival
        self._pushed: dict[str, int] = {}  # by transfer: blocks that its chunks so far end with

    def apply(self, plan: StepPlan) -> None:
        """Drops, cancels and announces, before anything of the plan is admitted."""
        if self._arrival is not None:
            for transfer_id in plan.drop:
                self._arrival.drop(transfer_id)
            for arrival in plan.arrivals:
                self._arrival.announce(arrival)
        if self._push is not None:
            for transfer_id in plan.cancel_push:
                self._push.cancel(transfer_id)

    def retire(self, push: Push) -> None:
        """A sequence with a grant has left its slot."""
        assert self._push is not None, "a push at a rank without lanes"
        self._push.retire(push.transfer_id)
        del self._pushed[push.transfer_id]

    def admit(self, admit: Admit) -> None:
        """A sequence took a slot: with blocks that arrived, or with a grant for its own."""
        if admit.arrival is not None:
            assert self._arrival is not None, "an arrival at a rank without lanes"
            self._arrival.adopt(admit.arrival)
        if admit.push is not None:
            assert self._push is not None, "a push at a rank without lanes"
            self._pushed[admit.push.transfer_id] = 0
            self._push.begin(admit.push, prompt_len=admit.prompt_len, blocks=admit.blocks, split_start=admit.split_start)

    def layer_hook(self, spans: Sequence[Span]) -> Callable[[int], None] | None:
        """What to call when a layer of this step is computed; None when nobody waits for it.

        A first chunk takes along the blocks before it, which were there when the sequence came.
        """
        side = self._push
        granted = [(span, span.state.push.transfer_id) for span in spans if span.state.push is not None]
        if side is None or not granted:
            return None
        ready = [(transfer_id, self._pushed[transfer_id], span) for span, transfer_id in granted]
        self._pushed.update({transfer_id: span.num_blocks for span, transfer_id in granted})

        def on_layer(layer: int) -> None:
            for transfer_id, first_block, span in ready:
                side.push_layer(transfer_id, layer, first_block, span.num_blocks, is_last_chunk=span.wants_token)

        return on_layer

    def counts(self) -> LaneCounts:
        """Both sides together. May be called from any thread."""
        sides = [side.counts() for side in (self._push, self._arrival) if side is not None]
        return LaneCounts(
            posted=sum(side.posted for side in sides),
            unsent=sum(side.unsent for side in sides),
            reserved_blocks=sum(side.reserved_blocks for side in sides),
            quarantined=frozenset().union(*(side.quarantined for side in sides)),
        )

    def close(self) -> None:
        """Ends all lanes."""
        for side in (self._push, self._arrival):
            if side is not None:
                side.close()
