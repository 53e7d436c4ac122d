"""The standalone role: both phases in one engine. Knows the engine's verbs; no HTTP and no ranks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NoReturn

from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec, Role
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import Delta, Request, SamplingParams, TransferRef
from longcat_pd.errors import WorkerUnavailable
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.server.service import Readiness, decode_state, layout_info


class StandaloneService:
    """``Service`` of an engine without peers, and the ``Instance`` that a process starts and ends."""

    def __init__(self, spec: InstanceSpec, engine: Engine, *, hello: Hello, clock: Clock) -> None:
        self.name = spec.name
        self.role: Role = spec.role
        self.model = spec.model
        self.engine_config = spec.engine
        self._spec = spec
        self._engine = engine
        self._hello = hello
        self._clock = clock

    async def start(self) -> None:
        """Bring the ranks up. Raises ConfigError, RankLost, EngineFault."""
        await self._engine.start()

    async def failed(self) -> NoReturn:
        """Wait until it cannot go on; raises the reason."""
        await self._engine.failed()

    async def close(self) -> None:
        """End the ranks; open requests end with an error."""
        await self._engine.close()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Prefill, then decode, in one reservation."""
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens + self.engine_config.num_draft_tokens
        async with self._engine.reserve(request, num_tokens) as seq:
            request.on_room()
            first = await self._engine.prefill(seq)
            async with aclosing(self._engine.decode(seq, first)) as deltas:
                async for delta in deltas:
                    yield delta

    async def adopt(
        self, transfer: TransferRef, deadline: float, sampling: SamplingParams, *, is_patient: bool = False
    ) -> Request:
        """Not of this role."""
        raise WorkerUnavailable(f"{self.name} has no peers; it cannot take the leg of transfer {transfer.id}")

    def readiness(self) -> Readiness:
        """From what is known already."""
        return Readiness.of(self._engine.health(), self._spec, self._hello.incarnation, peers={})

    async def accounting(self) -> dict[str, Any]:
        """Fresh figures of all ranks."""
        account = await self._engine.accounting()
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
        return self._engine.glance.facts(transfers=0)

    def computed_by(self, peer: str | None) -> tuple[Hello, ...]:
        """This one alone."""
        return (self._hello,)

    def now(self) -> float:
        """The clock of deadlines."""
        return self._clock.now()
