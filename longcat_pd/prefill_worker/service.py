"""The prefill role: compute a prompt, send its cache to the decode instance that granted room, hand over the first token.

Knows the engine's verbs and the offering side of a hand-over; no HTTP and no ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from longcat_pd.config.schema import InstanceSpec, Role
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import Delta, Event, Life, Request, SamplingParams, TokenOutput, TransferRef
from longcat_pd.engine.sequence import Sequence
from longcat_pd.errors import WorkerUnavailable
from longcat_pd.kv_transfer.messages import Commit, Hello, Offer
from longcat_pd.kv_transfer.offering import Offering, OutgoingTransfer
from longcat_pd.metrics import TransferMetrics
from longcat_pd.server.service import Readiness, layout_info
from longcat_pd.wire import pack


class PrefillService:
    """``Service`` of a prefill instance.

    Args:
        hello: what this instance says of itself; names its incarnation.
        now: the clock of deadlines.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        hello: Hello,
        *,
        engine: Engine,
        offering: Offering,
        now: Callable[[], float],
        metrics: TransferMetrics,
    ) -> None:
        self.name = spec.name
        self.role: Role = spec.role
        self.model = spec.model
        self.engine_config = spec.engine
        self._spec = spec
        self._hello = hello
        self._engine = engine
        self._offering = offering
        self._now = now
        self._metrics = metrics

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Reserve, offer, prefill with its layers on their lanes, commit, wait for the acknowledgement."""
        assert request.transfer is not None, "the face asks for the transfer headers"
        async with self._engine.reserve(request, len(request.prompt_token_ids)) as seq:
            self._engine.stamp(seq, Event.OFFERED)
            offer, peer = self._offer(request, request.transfer), request.transfer.peer
            async with self._offering.offer(
                offer, peer=peer, deadline=request.deadline, is_patient=request.is_patient
            ) as transfer:
                self._engine.stamp(seq, Event.GRANTED)
                request.on_room()
                first = await transfer.during(self._prefill(seq, transfer))
                early = self._sent_early(transfer.id)
                transfer.commit(_commit(transfer.id, first, seq))
                await transfer.during(self._sent(transfer, early, request.life))
                await transfer.acknowledged()
                self._engine.stamp(seq, Event.COMMITTED)
            yield Delta(())

    async def adopt(
        self, transfer: TransferRef, deadline: float, sampling: SamplingParams, *, is_patient: bool = False
    ) -> Request:
        """Not of this role."""
        raise WorkerUnavailable(f"{self.name} is a prefill instance; it cannot take the decode leg of {transfer.id}")

    def readiness(self) -> Readiness:
        """From what is known already."""
        return Readiness.of(self._engine.health(), self._spec, self._hello.incarnation, peers=self._offering.states())

    async def accounting(self) -> dict[str, Any]:
        """Fresh figures of all ranks."""
        account = await self._engine.accounting(transfers=self._offering.num_open)
        return {"role": self.role, "instance": self.name, "incarnation": self._hello.incarnation, **account}

    def flush_cache(self) -> None:
        """Prefixes, and the mean of accepted drafts."""
        self._engine.prefixes.flush()
        self._engine.acceptance.restart()

    def info(self) -> dict[str, Any]:
        """Layout and memory for /server_info."""
        return {**layout_info(self._spec, self._engine.ready), "internal_states": [{}]}

    def glance(self) -> dict[str, Any]:
        """Without asking a rank."""
        return self._engine.glance.facts(transfers=self._offering.num_open)

    def computed_by(self, peer: str | None) -> tuple[Hello, ...]:
        """This one; of an answer, it computes a part only."""
        return (self._hello,)

    def now(self) -> float:
        """The clock of deadlines."""
        return self._now()

    def _offer(self, request: Request, transfer: TransferRef) -> Offer:
        return Offer(
            transfer_id=transfer.id,
            request_id=request.request_id,
            incarnation=self._hello.incarnation,
            token_ids=pack(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            grammar=request.sampling.grammar,
            num_said=request.sampling.num_said,
            seed=request.sampling.seed,
            deadline_ms=int(1000 * (request.deadline - self._now())),
        )

    async def _prefill(self, seq: Sequence, transfer: OutgoingTransfer) -> TokenOutput:
        """The first token, unless a rank gives its part of the hand-over up before."""
        prefill = asyncio.ensure_future(self._engine.prefill(seq, transfer.push))
        closed = asyncio.ensure_future(self._engine.transfer_closed(transfer.id))
        try:
            await asyncio.wait({prefill, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not prefill.done():
                transfer.check(closed.result())
            return await prefill
        finally:
            prefill.cancel()
            closed.cancel()
            await asyncio.gather(prefill, closed, return_exceptions=True)

    def _sent_early(self, transfer_id: str) -> set[int]:
        """The ranks of earlier stages that have sent all of theirs before the last stage's last layer was done.

        Of a rank of the last stage that cannot be said: it counts by itself, and its report may be quicker than the token.
        """
        parallel = self._spec.parallel
        last_stage = (parallel.pp_size - 1) * parallel.cp_size
        return {r.rank for r in self._engine.reported(transfer_id) if r.ok and r.rank < last_stage}

    async def _sent(self, transfer: OutgoingTransfer, early: set[int], life: Life) -> None:
        """Wait until all ranks have sent everything; each of them ends by itself when nothing moves."""
        reports = await self._engine.transfer_closed(transfer.id)
        transfer.check(reports)
        life.moved_bytes = sum(r.num_bytes for r in reports)
        life.early_bytes = sum(r.num_bytes if r.rank in early else r.bytes_before_last_layer for r in reports)
        self._metrics.transfer_bytes_total.inc(life.moved_bytes)
        self._metrics.transfer_early_bytes_total.inc(life.early_bytes)


def _commit(transfer_id: str, first: TokenOutput, seq: Sequence) -> Commit:
    return Commit(
        transfer_id=transfer_id,
        token_id=first.token_id,
        logprob=first.logprob,
        top=first.top,
        draft_state=seq.draft_state,
        num_cached_tokens=seq.request.life.num_cached_tokens or 0,
    )
