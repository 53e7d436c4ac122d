"""Routes that do work: generation, tokenisation, the end-to-end proof.

Owns which of them an instance has, by its role.
"""

from __future__ import annotations

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.metrics import HttpMetrics
from longcat_pd.server.about_routes import RouteTable
from longcat_pd.server.face import Face
from longcat_pd.server.legs import generation_routes
from longcat_pd.server.probe import Probe, probe_route
from longcat_pd.server.seen import seen_routes
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor
from longcat_pd.server.tokenization import Tokenization, text_routes


def work_table(
    face: Face, service: Service, text: TextProcessor, *, front: LoadBalancerConfig, metrics: HttpMetrics
) -> RouteTable:
    """Generation everywhere, for clients or for a balancer's legs; the rest where clients or the balancer ask for it."""
    posts = generation_routes(face, service.role, front=front, metrics=metrics)
    if service.role != "decode":
        posts |= text_routes(Tokenization(service, text, face.encoded), front)
    if service.role != "standalone":
        return RouteTable(gets=seen_routes(face, service), posts=posts)
    # the probe's own face is outside of gate and metrics
    probe = Probe(Face(service, text), last_token=face.last_token, now=service.now, name=service.name)
    return RouteTable(open_gets=probe_route(probe), posts=posts)
