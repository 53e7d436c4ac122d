"""Units of a cluster's services for systemd, one for each service of a machine.

A unit holds the same command and environment as every other way to start a service. Knows no Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from longcat_pd.config.checks import pools
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import Service, services
from longcat_pd.render.command import REFUSED, Launch, stop_limit_s

STATE = "longcat-pd"  # of /var/cache, made by systemd and given to the user: the home of a service
CUT = 3  # exit status of a drain that ended requests (docs/operations.md)
RESTART_S = 5

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``tree``: the folder that services run in; ``user``: who runs them; ``node``: whose services, "": the balancer."""

    launch: Launch
    tree: str
    user: str
    node: str = ""


def units(config: ClusterConfig, machine: Machine) -> Iterator[tuple[str, str]]:
    """File names and contents."""
    for service in services(config):
        if service.node == machine.node if machine.node else service.kind == "balancer":
            yield f"longcat-pd-{service.name}.service", _unit(config, machine, service=service)


def word(text: str) -> str:
    """One word of a command or one assignment, such that systemd reads it as ``text``; ``$`` is the command's affair."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return escaped if _PLAIN.fullmatch(text) else f'"{escaped}"'


def _unit(config: ClusterConfig, machine: Machine, *, service: Service) -> str:
    sections = {
        "Unit": [
            f"Description=longcat-pd {service.name}",
            "Wants=network-online.target",
            "After=network-online.target",
        ],
        "Service": [*_process(config, machine, service=service), *_rights(config, service)],
        "Install": ["WantedBy=multi-user.target"],
    }
    return "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())


def _process(config: ClusterConfig, machine: Machine, *, service: Service) -> Iterator[str]:
    command = " ".join(word(part).replace("$", "$$") for part in machine.launch.argv(service))
    yield "Type=exec"
    yield f"User={machine.user}"
    yield f"WorkingDirectory={machine.tree.replace('%', '%%')}"
    for key, value in {"HOME": f"/var/cache/{STATE}", **service.env}.items():
        yield f"Environment={word(f'{key}={value}')}"
    yield f"ExecStart={command}"
    yield f"Restart={_RESTART[service.kind]}"
    yield f"RestartSec={RESTART_S}"
    yield f"RestartPreventExitStatus={REFUSED}"
    yield f"SuccessExitStatus={CUT}"
    yield "KillSignal=SIGTERM"
    yield "KillMode=mixed"  # a driver ends its ranks itself
    yield f"TimeoutStopSec={stop_limit_s(config)}"
    yield "LimitNOFILE=1048576"


_RESTART = {"driver": "on-failure", "balancer": "on-failure", "ranks": "always"}  # ranks end with a driver that comes again


def _rights(config: ClusterConfig, service: Service) -> Iterator[str]:
    yield "NoNewPrivileges=yes"
    yield "ProtectSystem=strict"
    yield "ProtectHome=read-only"
    yield "PrivateTmp=yes"
    yield f"CacheDirectory={STATE}"
    for role, pool in pools(config):
        if service.key.startswith(f"{role}.") and pool.engine.compile_cache:
            yield f"ReadWritePaths={word(f'-{pool.engine.compile_cache}')}"
    if service.kind == "driver" and config.record is not None and not service.key.startswith("prefill."):
        yield f"ReadWritePaths={word(f'-{config.record.dir}')}"
    if service.kind == "balancer":
        yield "PrivateDevices=yes"
    yield "ProtectKernelTunables=yes"
    yield "ProtectKernelModules=yes"
    yield "ProtectControlGroups=yes"
    yield "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK"
    yield "RestrictSUIDSGID=yes"
    yield "LockPersonality=yes"
    yield "CapabilityBoundingSet="
    yield "UMask=0077"
