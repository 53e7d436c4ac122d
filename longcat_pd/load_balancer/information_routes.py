"""What the balancer tells of the model and of the cluster, and to whom; the answers are ``overview.py``'s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from longcat_pd.errors import NotFound
from longcat_pd.load_balancer.face import Face
from longcat_pd.metrics import CONTENT_TYPE
from longcat_pd.server.errors import json_response
from longcat_pd.server.openapi import PATH, document
from longcat_pd.server.sse import while_connected

Endpoint = Callable[[Request], Awaitable[Response]]


def information_routes(face: Face) -> dict[str, Endpoint]:
    """GET routes for clients, by path."""

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


def open_routes(face: Face) -> dict[str, Endpoint]:
    """GET routes for everybody, by path."""

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
