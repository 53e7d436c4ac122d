"""The decode role: make room for an offered prompt, wait for its cache and its first token, decode.

Knows the engine's verbs and the receiving side of a hand-over; no HTTP and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from longcat_pd.config.schema import InstanceSpec, Role
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import Delta, Event, Request, SamplingParams, TokenOutput, TransferRef
from longcat_pd.engine.sequence import Sequence
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_transfer.messages import Arrival, Commit, Grant, Hello
from longcat_pd.kv_transfer.offers import IncomingTransfer, Offers
from longcat_pd.metrics import TransferMetrics
from longcat_pd.server.service import Readiness, decode_state, layout_info
from longcat_pd.wire import pack, unpack


class DecodeService:
    """``Service`` of a decode instance.

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
        offers: Offers,
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
        self._offers = offers
        self._now = now
        self._metrics = metrics

    async def adopt(
        self, transfer: TransferRef, deadline: float, sampling: SamplingParams, *, is_patient: bool = False
    ) -> Request:
        """The request of an offer, with the sampling of this leg. Both go on behind the same ids of an answer."""
        said = sampling.num_said
        incoming = await self._offers.expect(
            transfer.id, peer=transfer.peer, deadline=deadline, num_said=said, is_patient=is_patient
        )
        offer = incoming.offer
        return Request(
            request_id=offer.request_id,
            prompt_token_ids=tuple(unpack(offer.token_ids)),
            sampling=replace(sampling, max_tokens=offer.max_tokens, seed=offer.seed, grammar=offer.grammar),
            deadline=deadline,
            transfer=transfer,
        )

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Reserve, grant, wait for the cache and the commit, acknowledge, decode."""
        assert request.transfer is not None, "a request of ``adopt``"
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens + self.engine_config.num_draft_tokens
        async with AsyncExitStack() as held:
            async with self._offers.take(request.transfer.id, peer=request.transfer.peer) as transfer:
                seq = await transfer.during(held.enter_async_context(self._engine.reserve(request, num_tokens)))
                self._engine.announce(seq, self._arrival(seq, transfer))
                transfer.grant(self._grant(seq, transfer))
                self._engine.stamp(seq, Event.GRANTED)
                request.on_room()
                commit = await self._arrived(seq, transfer)
                transfer.acknowledge()
            first = TokenOutput(commit.token_id, commit.logprob, commit.top)
            async with aclosing(self._engine.decode(seq, first, commit.draft_state)) as deltas:
                async for delta in deltas:
                    yield delta

    def readiness(self) -> Readiness:
        """From what is known already."""
        return Readiness.of(self._engine.health(), self._spec, self._hello.incarnation, peers=self._offers.states())

    async def accounting(self) -> dict[str, Any]:
        """Fresh figures of all ranks."""
        account = await self._engine.accounting(transfers=self._offers.num_open)
        return {"role": self.role, "instance": self.name, "incarnation": self._hello.incarnation, **account}

    def flush_cache(self) -> None:
        """Prefixes, and the mean of accepted drafts."""
        self._engine.prefixes.flush()
        self._engine.acceptance.restart()

    def info(self) -> dict[str, Any]:
        """Layout, memory and state for /server_info."""
        state = decode_state(self._spec, self._engine.acceptance.mean())
        return {**layout_info(self._spec, self._engine.ready), "internal_states": [state]}

    def glance(self) -> dict[str, Any]:
        """Without asking a rank."""
        return self._engine.glance.facts(transfers=self._offers.num_open)

    def computed_by(self, peer: str | None) -> tuple[Hello, ...]:
        """The prefill instance and this one."""
        theirs = (link.theirs for link in self._offers.links() if link.name == peer)
        return (*(hello for hello in theirs if hello is not None), self._hello)

    def now(self) -> float:
        """The clock of deadlines."""
        return self._now()

    def _arrival(self, seq: Sequence, transfer: IncomingTransfer) -> Arrival:
        theirs, prompt = transfer.theirs, seq.request.prompt_token_ids
        source = BlockSplit.for_prompt(theirs.cp_size, self.engine_config.block_size, prompt)
        return Arrival(
            transfer_id=transfer.id,
            group=seq.group,
            peer=transfer.peer,
            peer_incarnation=theirs.incarnation,
            source_cp_size=theirs.cp_size,
            source_layers=theirs.layers_per_stage,
            prompt_len=len(prompt),
            blocks=pack(seq.blocks),
            split_start=seq.split.start,
            source_split_start=source.start,
            generation=seq.generation,
            first_block=seq.num_shared,
            grammar=seq.request.sampling.grammar,
        )

    def _grant(self, seq: Sequence, transfer: IncomingTransfer) -> Grant:
        return Grant(
            transfer_id=transfer.id,
            incarnation=self._hello.incarnation,
            group=seq.group,
            blocks=pack(seq.blocks),
            split_start=seq.split.start,
            generation=seq.generation,
            first_block=seq.num_shared,
        )

    async def _arrived(self, seq: Sequence, transfer: IncomingTransfer) -> Commit:
        """The commit, once all ranks have everything. A prompt may take long: its deadline is the only limit.

        A sender that stops in the middle is seen by its own ranks or by the silence of its link, and is heard here as the
        end of the transfer.
        """
        reports = await transfer.within(math.inf, self._engine.transfer_closed(transfer.id), "cache")
        transfer.check(reports)
        seq.request.life.moved_bytes = sum(r.num_bytes for r in reports)
        self._metrics.transfer_bytes_total.inc(seq.request.life.moved_bytes)
        commit = await transfer.committed(self._offers.limits.commit_s)
        self._engine.stamp(seq, Event.COMMITTED)
        seq.request.life.num_cached_tokens = commit.num_cached_tokens
        return commit
