"""What a recorded request is asked of again: one engine, or a prefill and a decode instance with a real hand-over.

Owns their life on this machine. No HTTP and no balancer: the request is handed to the services as it was recorded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from longcat_pd.clock import Clock
from longcat_pd.config.resolve import instance_spec
from longcat_pd.config.schema import ClusterConfig, InstanceSpec, Role
from longcat_pd.decode_worker import __main__ as decode
from longcat_pd.engine.request import Delta, Life, Request, TransferRef
from longcat_pd.prefill_worker import __main__ as prefill
from longcat_pd.server.parts import Parts, make_parts
from longcat_pd.server.peered import PeeredInstance
from longcat_pd.standalone.measured import over_processes
from longcat_pd.standalone.offline import offline


class Asked(Protocol):
    """Answers requests, one at a time."""

    async def start(self) -> None:
        """Bring the ranks up. Raises LongcatError."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The answer. Closing the generator ends it. Raises LongcatError."""
        ...

    async def close(self) -> None:
        """End the ranks."""
        ...


def one_engine(spec: InstanceSpec, clock: Clock) -> Asked:
    """Both phases in one: in this process, or over rank processes where it has several. Raises ConfigError."""
    return offline(spec) if spec.parallel.world_size == 1 else over_processes(spec, clock).service


class Pools:
    """The first instance of each pool. Raises ConfigError.

    Args:
        config: its instances are on this machine, on ports that are free.
    """

    def __init__(self, config: ClusterConfig, clock: Clock) -> None:
        self._prefill, taking = _instance(config, "prefill", prefill.build, clock=clock)
        self._decode, giving = _instance(config, "decode", decode.build, clock=clock)
        self._instances = (taking, giving)

    async def start(self) -> None:
        """See ``Asked``."""
        await asyncio.gather(*(instance.start() for instance in self._instances))

    async def close(self) -> None:
        """See ``Asked``."""
        await asyncio.gather(*(instance.close() for instance in self._instances))

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """See ``Asked``."""
        name = secrets.token_hex(16)
        here = replace(request, transfer=TransferRef(id=name, peer=self._decode.name), life=Life())
        offered = TransferRef(id=name, peer=self._prefill.name)
        handing_over = asyncio.ensure_future(self._hand_over(here))
        adopting = asyncio.ensure_future(self._decode.adopt(offered, request.deadline, request.sampling))
        try:
            await asyncio.wait({handing_over, adopting}, return_when=asyncio.FIRST_COMPLETED)
            if not adopting.done():
                handing_over.result()  # nothing will come of it: this is why
            async with aclosing(self._decode.generate(await adopting)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for leg in (handing_over, adopting):
                leg.cancel()
            await asyncio.gather(handing_over, adopting, return_exceptions=True)

    async def _hand_over(self, request: Request) -> None:
        async with aclosing(self._prefill.generate(request)) as deltas:
            async for _ in deltas:
                pass


def _instance(
    config: ClusterConfig, role: Role, build: Callable[[Parts], tuple[Any, Any]], *, clock: Clock
) -> tuple[Any, PeeredInstance]:
    """The service of the first instance of a pool, and what starts and ends it."""
    pool = config.prefill if role == "prefill" else config.decode
    assert pool is not None, "a topology has both pools"
    spec = instance_spec(config, pool.instances[0].name)
    parts = make_parts(spec, f"longcat_pd.{role}_worker.rank:main", clock)
    service, control = build(parts)
    return service, PeeredInstance(parts.engine, control, clock)
