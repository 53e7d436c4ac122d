"""Routes that tell of an instance, or put it out of use and back.

Owns paths and statuses; the answers are ``about.py``'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from longcat_pd import log
from longcat_pd.errors import InvalidRequest, NotFound
from longcat_pd.metrics import CONTENT_TYPE, Metrics
from longcat_pd.server.about import About
from longcat_pd.server.admin import named_instance
from longcat_pd.server.errors import json_response
from longcat_pd.server.gate import Gate
from longcat_pd.server.openapi import PATH, document
from longcat_pd.server.sampling_defaults import SamplingDefaults
from longcat_pd.server.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]
Routes = dict[str, Endpoint]


@dataclass(frozen=True, kw_only=True)
class RouteTable:
    """Endpoints by path, and who may use them: GET for everybody, GET and POST for clients, POST for the operator."""

    open_gets: Routes = field(default_factory=dict)
    gets: Routes = field(default_factory=dict)
    posts: Routes = field(default_factory=dict)
    admin_posts: Routes = field(default_factory=dict)


def about_table(
    service: Service,
    gate: Gate,
    *,
    defaults: SamplingDefaults,
    metrics: Metrics,
    has_keys: bool,
    has_admin_keys: bool,
) -> RouteTable:
    """What every instance tells; the model and the API are told of by the server that clients talk to."""
    about = About(service, gate, defaults)
    metrics.refresh_with(lambda: about.refresh(metrics))
    opens, gets = _open_routes(about, metrics), _information_routes(about)
    if service.role == "standalone":
        gets |= _model_routes(about)
        opens |= _document_route(document(has_keys=has_keys, has_admin_keys=has_admin_keys))
    return RouteTable(
        open_gets=opens, gets=gets, posts=_flush_routes(service), admin_posts=_admin_routes(service.name, gate)
    )


def _open_routes(about: About, metrics: Metrics) -> Routes:
    async def health(_: Request) -> Response:
        is_alive = about.is_alive()
        return json_response({"status": "ok" if is_alive else "lost"}, status=200 if is_alive else 503)

    async def ready(_: Request) -> Response:
        answer = about.readiness()
        return json_response(answer, status=200 if answer["ready"] else 503)

    async def render(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return {"/health": health, "/ready": ready, "/metrics": render}


def _document_route(described: dict[str, Any]) -> Routes:
    async def describe(_: Request) -> Response:
        return json_response(described)

    return {PATH: describe}


def _information_routes(about: About) -> Routes:
    async def server_info(_: Request) -> Response:
        return json_response(about.server_info())

    async def model_info(_: Request) -> Response:
        return json_response(about.model_info())

    async def accounting(_: Request) -> Response:
        return json_response(await about.accounting())

    return {"/server_info": server_info, "/model_info": model_info, "/debug/accounting": accounting}


def _model_routes(about: About) -> Routes:
    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [about.model()]})

    async def model(request: Request) -> Response:
        entry, wanted = about.model(), request.path_params["model_id"]
        if wanted != entry["id"]:
            raise NotFound(f"the model {wanted!r} is not served here; {entry['id']!r} is", code="model_not_found")
        return json_response(entry)

    return {"/v1/models": models, "/v1/models/{model_id:path}": model}


def _flush_routes(service: Service) -> Routes:
    async def flush_cache(_: Request) -> Response:
        service.flush_cache()
        return json_response({"success": True})

    return {"/flush_cache": flush_cache}


def _admin_routes(name: str, gate: Gate) -> Routes:
    async def check(request: Request) -> None:
        wanted = await named_instance(request)
        if wanted not in (None, name):
            raise InvalidRequest(f"instance = {wanted!r} is not {name}", param="instance")

    async def drain(request: Request) -> Response:
        await check(request)
        gate.drain()
        log.logger().info("drain_started", open=gate.num_open)
        return json_response({"draining": True, "open": gate.num_open}, status=202)

    async def undrain(request: Request) -> Response:
        await check(request)
        gate.undrain()
        log.logger().info("undrained", open=gate.num_open)
        return json_response({"draining": gate.is_draining, "open": gate.num_open}, status=202)

    return {"/admin/drain": drain, "/admin/undrain": undrain}
