"""The rules of machines: who runs where, how a machine is reached, and what two services on one of them must not share.

Every rule adds findings and changes nothing. Asks no machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from itertools import combinations

from longcat_pd.config.reader import Findings
from longcat_pd.config.schema import ClusterConfig, HostsConfig, InstanceConfig, PoolConfig, Role

_CARDS = "ASCEND_RT_VISIBLE_DEVICES"
_PORTS_OF_CARDS = "HCCL_IF_BASE_PORT"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_nodes(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    """Nodes of each instance, whose ranks they share evenly."""
    world = pool.parallel.world_size
    for place, instance in enumerate(pool.instances):
        key = f"{role}.instances[{place}].nodes"
        nodes = instance.nodes
        if not nodes:
            found.cross([key], f"{key}: at least one address is needed")
            continue
        twice = sorted({node for node in nodes if nodes.count(node) > 1})
        if twice:
            found.cross([key], f"{key}={list(nodes)}: {', '.join(twice)} is there twice")
        if len(nodes) > 1 and role == "standalone":
            found.cross([key], f"{key}={list(nodes)}: a standalone engine runs on one machine")
        if world % len(nodes):
            text = f"{len(nodes)} nodes cannot share the {world} ranks of {role}.parallel evenly"
            found.cross([key, f"{role}.parallel"], f"{key}: {text}")


def check_hosts(config: ClusterConfig, pools: list[tuple[Role, PoolConfig]], *, found: Findings) -> None:
    """How machines are reached, and what the services on one of them must not share."""
    _check_names(config, pools, found=found)
    _check_paths(config.hosts, found=found)
    _check_key(config, pools, found=found)
    _check_environments(config, pools, found=found)
    if config.device != "npu":
        return
    placed = [(f"{role}.instances[{n}]", pool, i) for role, pool in pools for n, i in enumerate(pool.instances)]
    for (key, pool, one), (other_key, other_pool, other) in combinations(placed, 2):
        for node in sorted(set(one.nodes) & set(other.nodes)):
            mine, theirs = environment(config, pool, one), environment(config, other_pool, other)
            alike = [name for name in (_CARDS, _PORTS_OF_CARDS) if mine.get(name) == theirs.get(name)]
            if alike:
                text = f"shares {node} with {other_key}; set {' and '.join(alike)} in the env of both, differently"
                found.cross([f"{key}.nodes", f"{other_key}.nodes"], f"{key}.env: {text}")


def is_loopback(host: str) -> bool:
    """Whether an address, which is no name but localhost, means each machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether each machine takes an address for itself: loopback, or that of all of its addresses."""
    try:
        return is_loopback(host) or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def environment(config: ClusterConfig, pool: PoolConfig | None, instance: InstanceConfig | None) -> dict[str, str]:
    """What a service is given; the balancer belongs to no pool."""
    return {
        **config.env,
        **(pool.env if pool is not None else {}),
        **(instance.env if instance is not None else {}),
    }


def _check_key(config: ClusterConfig, pools: list[tuple[Role, PoolConfig]], *, found: Findings) -> None:
    """Whoever reaches the ports of an instance could stop, drain and read it. A standalone engine has loopback ports, and
    one for clients.
    """
    if config.cluster_key_file is not None:
        return
    for role, pool in pools:
        for place, instance in enumerate(pool.instances if role != "standalone" else ()):
            reached = [node for node in instance.nodes if not is_loopback(node)]
            if reached:
                key = f"{role}.instances[{place}].nodes"
                text = f"is needed where others reach {key}={reached}; only loopback addresses go without"
                found.cross(["cluster_key_file", key], f"cluster_key_file: {text}")


def _check_names(config: ClusterConfig, pools: list[tuple[Role, PoolConfig]], *, found: Findings) -> None:
    """A name that cannot be spelt for the resolver, such as one with two dots in a row, is not even looked for."""
    given = [("load_balancer.host", config.load_balancer.host), ("load_balancer.node", config.load_balancer.node)]
    for role, pool in pools:
        for place, instance in enumerate(pool.instances):
            given += [(f"{role}.instances[{place}].nodes", node) for node in instance.nodes]
    for key, name in given:
        try:
            name.encode("idna")
        except UnicodeError:
            found.cross([key], f"{key}: {name!r} is neither an address nor a name that a machine can have")


def _check_environments(config: ClusterConfig, pools: list[tuple[Role, PoolConfig]], *, found: Findings) -> None:
    """Names as a shell has them: another could be an option of what sets it, or a part of it the value."""
    given = [("env", config.env)]
    for role, pool in pools:
        given.append((f"{role}.env", pool.env))
        given += [(f"{role}.instances[{place}].env", instance.env) for place, instance in enumerate(pool.instances)]
    for key, env in given:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                found.cross([key], f"{key}: {name!r}: letters, digits and '_' only, no digit first")
            if "\0" in value:
                place = f"character {value.index(chr(0)) + 1} of {len(value)}"  # not the value, which may be a secret
                found.cross([key], f"{key}.{name}: must hold no null character ({place})")


def _check_paths(hosts: HostsConfig, *, found: Findings) -> None:
    """Paths of other machines start at their root; a space or quote in one would end in a shell."""
    for key, path in _paths(hosts):
        root, *parts = path.removesuffix("/").split("/")
        if root or not parts or any(part in ("", ".", "..") for part in parts):
            text = "must be an absolute path without '.', '..' and empty parts, and not the root"
            found.cross([key], f"{key}={path}: {text}")
        elif not all(character.isalnum() or character in "/._+@=,-" for character in path):
            found.cross([key], f"{key}={path}: letters, digits and / . _ + @ = , - only")


def _paths(hosts: HostsConfig) -> Iterator[tuple[str, str]]:
    if hosts.path:
        yield "hosts.path", hosts.path
    if hosts.python:
        yield "hosts.python", hosts.python
    yield from ((f"hosts.setup_files[{place}]", file) for place, file in enumerate(hosts.setup_files))
