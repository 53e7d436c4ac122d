"""The HTTP face of an instance: its routes, by role.

Owns which route exists where and who may use it. Knows the instance as a ``Service`` only. Generation without HTTP is
``face.py``.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from fastapi import FastAPI, Request, Response

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.metrics import Metrics
from longcat_pd.server.about_routes import Endpoint, Routes, about_table
from longcat_pd.server.checked_face import checked_face
from longcat_pd.server.envelope import dress
from longcat_pd.server.gate import Gate
from longcat_pd.server.intake import KeyRing
from longcat_pd.server.service import NOTHING, Kept, Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.work_routes import work_table

MOST_BODY_BYTES = 1 << 30  # of a leg


def worker_front(balancer: LoadBalancerConfig, cluster_key_file: str | None) -> LoadBalancerConfig:
    """The settings of a worker's face: the balancer has checked sizes and numbers; one key opens all that is guarded.

    A body is bounded here too, above what any balancer lets through: its own settings may be newer than ours.
    """
    return replace(
        balancer,
        api_key_file=cluster_key_file,
        admin_key_file=cluster_key_file,
        max_body_bytes=max(balancer.max_body_bytes, MOST_BODY_BYTES),
        max_inflight=sys.maxsize,
        keepalive_comment_s=0.0,
    )


def create_app(
    service: Service,
    text: TextProcessor,
    metrics: Metrics,
    *,
    gate: Gate,
    front: LoadBalancerConfig,
    faults: Routes | None = None,
    kept: Kept = NOTHING,
) -> FastAPI:
    """The face of an instance as an ASGI app; starting and ending the instance is the caller's.

    Args:
        service: the instance; its role says which routes there are.
        text: of its checkpoint.
        metrics: of this process.
        gate: ``Gate(front.max_inflight)``; the caller drains and cuts it at the end of the process.
        front: limits and key files; of a worker ``worker_front``. A key file without a key is a ConfigError.
        faults: POST routes by which the instance is told to fail; guarded by the operator's key, or by none without one.
        kept: what is kept of each request.
    """
    face = checked_face(service, text, gate=gate, metrics=metrics.requests, kept=kept)
    about = about_table(
        service,
        gate,
        defaults=face.defaults,
        metrics=metrics,
        has_keys=front.api_key_file is not None,
        has_admin_keys=front.admin_key_file is not None,
    )
    work = work_table(face, service, text, front=front, metrics=metrics.http)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    client_keys = KeyRing.load(front.api_key_file) if front.api_key_file else None
    admin_keys = KeyRing.load(front.admin_key_file) if front.admin_key_file else None
    opens, gets = {**about.open_gets, **work.open_gets}, {**about.gets, **work.gets}
    posts = {**about.posts, **work.posts}
    admin = {} if admin_keys is None else about.admin_posts
    for routes, method, keys in (
        (opens, "GET", None),
        (gets, "GET", client_keys),
        (posts, "POST", client_keys),
        (admin, "POST", admin_keys),
        (faults or {}, "POST", admin_keys),
    ):
        _add(app, routes, method, keys)
    dress(app, metrics.http, paths=(*opens, *gets, *posts, *admin, *(faults or {})), is_worker=service.role != "standalone")
    return app


def _add(app: FastAPI, routes: Routes, method: str, keys: KeyRing | None) -> None:
    for path, endpoint in routes.items():
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint if keys is None else _guarded(endpoint, keys), methods=methods)


def _guarded(endpoint: Endpoint, keys: KeyRing) -> Endpoint:
    async def checked(request: Request) -> Response:
        keys.check(request)
        return await endpoint(request)

    return checked
