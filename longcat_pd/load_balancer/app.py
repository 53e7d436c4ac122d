"""The balancer's routes.

Owns which route answers what, and to whom. Knows neither engine nor tokenizer; imports no torch, directly or indirectly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from longcat_pd.errors import NotFound
from longcat_pd.load_balancer.admin_routes import admin_routes
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.generation import Generation, forward
from longcat_pd.metrics import CONTENT_TYPE
from longcat_pd.server.envelope import dress
from longcat_pd.server.errors import json_response
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE
from longcat_pd.server.openapi import PATH, document
from longcat_pd.server.sse import while_connected

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(face: Face) -> FastAPI:
    """The balancer as an ASGI app. Polling the instances and ending in order is ``__main__``'s."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    gets: dict[str, Endpoint] = {**_open_routes(face), **_client_gets(face)}
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


def _open_routes(face: Face) -> dict[str, Endpoint]:
    async def health(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        answer = face.overview.readiness()
        return json_response(answer, status=200 if answer["ready"] else 503)

    async def health_generate(request: Request) -> Response:
        return json_response(await while_connected(request.receive, face.probe.prove()))

    async def metrics(_: Request) -> Response:
        return Response(face.means.metrics.render(), media_type=CONTENT_TYPE)

    described = document(has_keys=face.keys.client is not None, has_admin_keys=face.keys.admin is not None)

    async def describe(_: Request) -> Response:
        return json_response(described)

    return {"/health": health, "/ready": ready, "/health_generate": health_generate, "/metrics": metrics, PATH: describe}


def _client_gets(face: Face) -> dict[str, Endpoint]:
    async def models(request: Request) -> Response:
        face.check_client(request)
        return json_response({"object": "list", "data": [face.overview.models()]})

    async def model(request: Request) -> Response:
        face.check_client(request)
        entry, wanted = face.overview.models(), request.path_params["model_id"]
        if wanted != entry["id"]:
            raise NotFound(f"the model {wanted!r} is not served here; {entry['id']!r} is", code="model_not_found")
        return json_response(entry)

    async def server_info(request: Request) -> Response:
        face.check_client(request)
        return json_response(await face.overview.server_info())

    async def model_info(request: Request) -> Response:
        face.check_client(request)
        return json_response(face.overview.model_info())

    async def accounting(request: Request) -> Response:
        face.check_client(request)
        return json_response(await face.overview.accounting())

    return {
        "/v1/models": models,
        "/v1/models/{model_id:path}": model,
        "/server_info": server_info,
        "/model_info": model_info,
        "/debug/accounting": accounting,
    }


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
