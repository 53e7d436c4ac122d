"""The parts of a running balancer, put together once, and who may use which of its routes.

Owns no behaviour of its own: the routes are ``app.py``'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.requests import HTTPConnection

from longcat_pd.config.keys import read_cluster_keys
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.load_balancer.attempt import Means
from longcat_pd.load_balancer.lookout import Lookout
from longcat_pd.load_balancer.overview import Overview, Probe, Served
from longcat_pd.load_balancer.proxy import Proxy
from longcat_pd.load_balancer.sightings import Sightings
from longcat_pd.server.gate import Gate
from longcat_pd.server.intake import KeyRing


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Who may do what. None: ``client`` routes are open, ``admin`` routes do not exist."""

    client: KeyRing | None = None
    admin: KeyRing | None = None

    @classmethod
    def load(cls, config: LoadBalancerConfig) -> Keys:
        """Read the files that are named. Raises ConfigError."""
        return cls(
            client=KeyRing.load(config.api_key_file) if config.api_key_file else None,
            admin=KeyRing.load(config.admin_key_file) if config.admin_key_file else None,
        )


@dataclass(frozen=True, kw_only=True)
class Face:
    """Everything that the routes use."""

    means: Means
    config: LoadBalancerConfig
    keys: Keys
    served: Served
    gate: Gate
    proxy: Proxy
    overview: Overview
    probe: Probe
    lookout: Lookout
    has_faults: bool = False  # its instances can be told to fail

    @classmethod
    def of(cls, means: Means, config: LoadBalancerConfig, *, keys: Keys, served: Served, has_faults: bool = False) -> Face:
        """Put the parts together."""
        gate, proxy = Gate(config.max_inflight), Proxy(means, config)
        return cls(
            means=means,
            config=config,
            keys=keys,
            served=served,
            gate=gate,
            proxy=proxy,
            overview=Overview(means, gate, served),
            probe=Probe(means, proxy),
            lookout=Lookout(Sightings(means, gate, proxy, model=served.name).snapshot, means.clock),
            has_faults=has_faults,
        )

    def check_client(self, request: HTTPConnection) -> None:
        """Raise AuthenticationFailed unless the request may use the client routes."""
        if self.keys.client is not None:
            self.keys.client.check(request)

    def check_admin(self, request: HTTPConnection) -> None:
        """Raise AuthenticationFailed unless the request may use the admin routes, which there are only with such keys."""
        assert self.keys.admin is not None
        self.keys.admin.check(request)

    def check_faults(self, request: HTTPConnection) -> None:
        """Raise AuthenticationFailed unless the request may make instances fail: as the operator, or as a client."""
        keys = self.keys.admin or self.keys.client
        if keys is not None:
            keys.check(request)


def first_key(path: str) -> str:
    """The key that the balancer shows to workers, which read the same file. Raises ConfigError."""
    return read_cluster_keys(path)[0]
