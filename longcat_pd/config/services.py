"""Which processes a cluster consists of: on which machine each runs, by which command, in which environment.

The one list behind ``run_pd.sh``, the manifests that are rendered and the plan. Pure; ``config`` is resolved, or at least
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from longcat_pd.config.checks import PortUse, pools, port_uses
from longcat_pd.config.node_checks import environment
from longcat_pd.config.reader import Findings
from longcat_pd.config.schema import ClusterConfig, InstanceConfig, PoolConfig, Role, http_url

BALANCER = "balancer"

START_S = 300.0  # until everything is ready, if nothing has to be compiled
COMPILE_S = 300.0  # more for each graph, which a start on a full machine may not be denied: half a minute on an idle core
GRAPHS = 6  # that a compiled step has at most, where buckets are not told


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process that is started, and whatever it starts.

    ``name``: unique in the cluster: an instance's name for its driver, with ``.1`` … for its ranks on further nodes.
    ``arguments``: behind the interpreter, before ``--config`` and ``--set``. ``url``: where it says whether it is ready; ""
    where it has no HTTP. ``key``: the setting that it comes from.
    """

    name: str
    kind: Literal["driver", "ranks", "balancer"]
    node: str
    arguments: tuple[str, ...]
    url: str
    key: str
    env: Mapping[str, str] = field(default_factory=dict)


def services(config: ClusterConfig) -> Iterator[Service]:
    """All of a cluster: decode instances, prefill instances, the balancer, as the published deployment lists its nodes.

    A standalone engine stands without a balancer.
    """
    for role, pool in sorted(pools(config), key=lambda item: item[0]):
        for place, instance in enumerate(pool.instances):
            yield from _of_instance(config, role, pool, instance=instance, key=f"{role}.instances[{place}]")
    balancer = config.load_balancer
    if config.prefill is None:  # a standalone engine has a face of its own
        return
    yield Service(
        name=BALANCER,
        kind="balancer",
        node=balancer.node,
        arguments=("-m", "longcat_pd.load_balancer"),
        url=balancer_url(config),
        key="load_balancer",
        env=environment(config, None, None),
    )


def check_service_names(config: ClusterConfig, found: Findings) -> None:
    """Each service is known by its name, as the one that is ended or whose log is read."""
    taken = {service.name: service.key for service in services(config) if service.kind == BALANCER}
    for role, pool in pools(config):
        for place, instance in enumerate(pool.instances):
            key = f"{role}.instances[{place}]"
            for service in _of_instance(config, role, pool, instance=instance, key=key):
                other = taken.setdefault(service.name, key)
                if other != key:
                    what = "" if service.name == instance.name else f"{service.name}, its ranks on a further node, is "
                    found.cross([f"{key}.name"], f"{key}.name={instance.name}: {what}already the name of {other}")
                    break


def balancer_url(config: ClusterConfig) -> str:
    """Where clients find the balancer: its node where it listens on every address of it."""
    balancer = config.load_balancer
    host = balancer.node if balancer.host in ("0.0.0.0", "::") else balancer.host
    return http_url(host, balancer.port)


def start_limit_s(config: ClusterConfig) -> float:
    """How long a start may take: a rank compiles its graphs one after the other before it is ready."""
    compiled = [pool for _, pool in pools(config) if pool.engine.exe_mode != "eager"]
    return START_S + COMPILE_S * max((pool.num_graphs or GRAPHS for pool in compiled), default=0)


def nodes_of(config: ClusterConfig) -> tuple[str, ...]:
    """Every machine once: those of decode instances, of prefill instances, the balancer's."""
    return tuple(dict.fromkeys(service.node for service in services(config)))


def ports_of_node(config: ClusterConfig, node: str) -> tuple[PortUse, ...]:
    """The ports that a machine must have free."""
    return tuple(use for use in port_uses(config) if use.node == node)


def _of_instance(
    config: ClusterConfig, role: Role, pool: PoolConfig, *, instance: InstanceConfig, key: str
) -> Iterator[Service]:
    env = environment(config, pool, instance)
    for place, node in enumerate(instance.nodes):
        further = ("--node-rank", str(place)) if place else ()
        yield Service(
            name=f"{instance.name}.{place}" if place else instance.name,
            kind="ranks" if place else "driver",
            node=node,
            arguments=("-m", f"longcat_pd.{role}_worker", "--instance", instance.name, *further),
            url="" if place else instance.url,
            key=key,
            env=env,
        )
