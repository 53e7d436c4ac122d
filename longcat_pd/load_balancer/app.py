"""The balancer's routes.

Owns which route answers what, and to whom. Knows neither engine nor tokenizer; imports no torch, directly or indirectly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from longcat_pd.load_balancer.admin_routes import admin_routes
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.generation import Generation, forward
from longcat_pd.load_balancer.information_routes import information_routes, open_routes
from longcat_pd.load_balancer.status_page import status_routes
from longcat_pd.server.envelope import dress
from longcat_pd.server.errors import json_response
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(face: Face) -> FastAPI:
    """The balancer as an ASGI app. Polling the instances and ending in order is ``__main__``'s."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    gets: dict[str, Endpoint] = {**open_routes(face), **information_routes(face), **status_routes(face)}
    posts: dict[str, Endpoint] = {**_client_posts(face), **admin_routes(face)}
    for method, routes in (("GET", gets), ("POST", posts)):
        for path, endpoint in routes.items():
            app.add_route(path, endpoint, methods=[method])  # GET answers HEAD as well
    metrics = face.means.metrics
    metrics.refresh_with(lambda: _refresh(face))
    dress(app, metrics.http, paths=(*gets, *posts), is_worker=False)
    return app


def _refresh(face: Face) -> None:
    face.means.metrics.ready.set(face.overview.readiness()["ready"])
    face.means.metrics.draining.set(face.gate.is_draining)


def _client_posts(face: Face) -> dict[str, Endpoint]:
    async def generate(_: Request) -> Response:
        return Generation(face)

    async def through_prefill(request: Request) -> Response:
        face.check_client(request)
        return await forward(face, request)

    async def flush_cache(request: Request) -> Response:
        face.check_client(request)
        await face.overview.flush_cache()
        return json_response({"success": True})

    return {
        CHAT_ROUTE: generate,
        COMPLETIONS_ROUTE: generate,
        "/tokenize": through_prefill,
        "/detokenize": through_prefill,
        "/flush_cache": flush_cache,
    }
