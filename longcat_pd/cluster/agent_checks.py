"""What stands against a start on one machine, this one: ports, files to source, configuration, weights, memory, logs."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from longcat_pd.cluster.jobs import Job
from longcat_pd.cluster.record import RunFolder, write_private
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import BALANCER, nodes_of
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.preflight import free_memory_bytes, port_findings, total_memory_findings


def findings(job: Job, folder: RunFolder) -> Iterator[str]:
    """One line for each. Writes the configuration for the services to read."""
    try:
        write_private(folder.config, job.text)
    except OSError as error:
        yield f"{folder.config}: cannot be written: {error.strerror}"
        return
    yield from port_findings(job.ports)
    for file in job.setup_files:
        if not os.access(file, os.R_OK):
            yield f"hosts.setup_files: {file} is not there or cannot be read"
    yield from _log_findings(job, folder)
    yield from folder_findings(job.logs)
    try:
        cluster = load(folder.config)
    except ConfigError as error:
        yield from error.message.splitlines()
        return
    if set(nodes_of(cluster)) - set(job.nodes):
        yield from address_findings(job.nodes)
    if any(service.kind != BALANCER for service in job.services):
        yield from _weights_findings(cluster)
        yield from _memory_findings(cluster, job)


def folder_findings(logs: str) -> Iterator[str]:
    """Makes the folder of logs, and says what stands against writing there."""
    try:
        Path(logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"log_dir={logs}: cannot be made: {error.strerror}"
        return
    if not os.access(logs, os.W_OK | os.X_OK):
        yield f"log_dir={logs}: nothing can be written there"


def _log_findings(job: Job, folder: RunFolder) -> Iterator[str]:
    """Logs of another cluster that runs here would be moved away under it."""
    mine = {str(Path(job.logs) / f"{service.name}.log") for service in job.services}
    for other in folder.others():
        for log in sorted(mine & {process.log for process in other.alive}):
            yield f"log_dir={job.logs}: {log} is being written by {other.config}, which runs here; give one of them another"


def address_findings(nodes: Sequence[str]) -> Iterator[str]:
    """Names of this machine that mean the machine itself to it, as /etc/hosts often has them, and another one to others."""
    for node in nodes:
        try:
            addresses = {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(node, None)}
        except OSError:  # services will say so
            continue
        if node not in addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses):
            told = ", ".join(sorted(addresses))
            yield f"nodes: {node} is {told} here, which no other machine reaches; mend /etc/hosts, or name its address"


def _weights_findings(cluster: ClusterConfig) -> Iterator[str]:
    path = Path(cluster.model.path)
    whole = ("model.safetensors.index.json", "model.safetensors")
    if cluster.model.weights == "checkpoint" and not any((path / name).is_file() for name in whole):
        yield f"model.path={path}: has neither {whole[0]} nor {whole[1]}"


def _memory_findings(cluster: ClusterConfig, job: Job) -> Iterator[str]:
    """What the ranks on this machine take of its own memory, beside that of devices."""
    meant = {service.key for service in job.services}
    specs = [
        instance_spec(cluster, instance.name)
        for role, pool in pools(cluster)
        for place, instance in enumerate(pool.instances)
        if f"{role}.instances[{place}]" in meant
    ]
    yield from total_memory_findings(specs, available_bytes=free_memory_bytes(), nodes=job.nodes)
