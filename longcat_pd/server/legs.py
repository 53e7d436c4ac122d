"""The two generation routes of a worker, for the legs of a balancer, and which instance has which.

Owns what a leg says beside its body. The rest is as for clients: ``generation.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from longcat_pd.config.schema import LoadBalancerConfig, Role
from longcat_pd.metrics import HttpMetrics
from longcat_pd.server.about_routes import Endpoint, Routes
from longcat_pd.server.face import Face
from longcat_pd.server.generation import Generation, request_id_of, traceparent_of
from longcat_pd.server.leg import FAILOVER, Leg, read_leg
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, Body
from longcat_pd.server.requests import Call
from longcat_pd.server.resume import can_go_on, need_one_choice, read_resume
from longcat_pd.server.told import metered, told


class Legs:
    """Answers a POST of a balancer.

    Args:
        generation: of this instance.
        face: of this instance.
        front: the balancer's address.
    """

    def __init__(self, generation: Generation, face: Face, front: LoadBalancerConfig) -> None:
        self._generation = generation
        self._face = face
        self._front = front

    async def decode(self, request: Request) -> Response:
        """A leg to a decode worker: the answer is the client's, or the events that it can be made of."""
        leg = self._read_leg(request)
        body, call = await self._read(request, leg)
        if leg.tells_ids:
            steps = self._face.chunks(body, call) if body.stream else self._face.answer_in_steps(body, call)
            return self._generation.stream(request, told(steps, has_ids=can_go_on(body)), call)
        if not body.stream:
            return await self._generation.whole(request, self._face.answer(body, call))
        return self._generation.stream(request, metered(self._face.chunks(body, call)), call)

    async def prefill(self, request: Request) -> Response:
        """A leg to a prefill worker: the answer says that the hand-over is done, also where the body asks for a stream."""
        body, call = await self._read(request, self._read_leg(request))
        return await self._generation.whole(request, self._face.prefilled(body, call))

    def _read_leg(self, request: Request) -> Leg:
        return read_leg(request.headers, front=f"http://{self._front.host}:{self._front.port}")

    async def _read(self, request: Request, leg: Leg) -> tuple[Body, Call]:
        call = self._face.call(request_id_of(request), leg.time_left_s, traceparent=traceparent_of(request))
        values: dict[str, Any] = await self._generation.read(request, leg.time_left_s)
        body = self._face.read(request.scope["path"], values)
        if leg.tells_ids:
            need_one_choice(body, FAILOVER)
        resume = read_resume(values, body) if leg.is_resumed else None
        return body, replace(call, transfer=leg.transfer, attempt=leg.attempt, resume=resume)


def generation_routes(face: Face, role: Role, *, front: LoadBalancerConfig, metrics: HttpMetrics) -> Routes:
    """The routes of an instance of this role: for clients, or for legs."""
    generation = Generation(face, front, metrics)
    legs = Legs(generation, face, front)
    endpoints: dict[Role, Endpoint] = {
        "standalone": generation.for_client,
        "prefill": legs.prefill,
        "decode": legs.decode,
    }
    return dict.fromkeys((CHAT_ROUTE, COMPLETIONS_ROUTE), endpoints[role])
