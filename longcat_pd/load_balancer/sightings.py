"""What the instances show of themselves, asked of all at once, and the snapshot that comes of it.

Keeps what each has said last, for the picture of one that is gone. Asks only when it is asked.
"""

from __future__ import annotations

import asyncio

from longcat_pd.errors import LongcatError
from longcat_pd.load_balancer.attempt import Means
from longcat_pd.load_balancer.pool import Instance
from longcat_pd.load_balancer.proxy import Proxy
from longcat_pd.load_balancer.status_facts import Heard, Sight
from longcat_pd.server.errors import to_json
from longcat_pd.server.gate import Gate

ANSWER_S = 1.0  # how long an instance may take
PATH = "/debug/seen"


class Sightings:
    """Makes snapshots of the cluster. ``model``: the name under which it is served."""

    def __init__(self, means: Means, gate: Gate, proxy: Proxy, *, model: str) -> None:
        self._means = means
        self._gate = gate
        self._proxy = proxy
        self._model = model
        self._heard: dict[str, Heard] = {}

    async def snapshot(self) -> bytes:
        """One snapshot as JSON; after ``ANSWER_S`` at most, without those who have not answered."""
        pool = self._means.pool
        await asyncio.gather(*(self._ask(instance) for instance in pool.instances.values()))
        sight = Sight(
            model=self._model,
            pool=pool,
            recent=self._proxy.recent,
            heard=self._heard,
            now=self._means.clock.now(),
            num_open=self._gate.num_open,
            is_draining=self._gate.is_draining,
        )
        return to_json(sight.snapshot())

    async def _ask(self, instance: Instance) -> None:
        clock = self._means.clock
        try:
            reply = await clock.within(ANSWER_S, self._means.workers.fetch(instance.target.url + PATH))
            answer = reply.json_object() if reply.status == 200 else None
        except (LongcatError, TimeoutError):
            return
        if answer is not None:
            self._heard[instance.name] = Heard(at=clock.now(), answer=answer)
