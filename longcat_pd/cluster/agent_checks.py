"""What stands against a start on one machine, this one: ports, files to source, configuration, weights, memory, logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from longcat_pd.cluster.jobs import Job
from longcat_pd.cluster.record import RunFolder
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import instance_spec, load
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import BALANCER
from longcat_pd.errors import ConfigError
from longcat_pd.sizing.preflight import free_memory_bytes, port_findings, total_memory_findings


def findings(job: Job, folder: RunFolder) -> Iterator[str]:
    """One line for each. Writes the configuration for the services to read."""
    folder.config.write_text(job.text, encoding="utf-8")
    yield from port_findings(job.ports)
    for file in job.setup_files:
        if not os.access(file, os.R_OK):
            yield f"hosts.setup_files: {file} is not there or cannot be read"
    try:
        cluster = load(folder.config)
    except ConfigError as error:
        yield from error.message.splitlines()
        return
    if any(service.kind != BALANCER for service in job.services):
        yield from _weights_findings(cluster)
        yield from _memory_findings(cluster, job)
    try:
        Path(job.logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"log_dir={job.logs}: cannot be made: {error.strerror}"


def _weights_findings(cluster: ClusterConfig) -> Iterator[str]:
    path = Path(cluster.model.path)
    whole = ("model.safetensors.index.json", "model.safetensors")
    if cluster.model.weights == "checkpoint" and not any((path / name).is_file() for name in whole):
        yield f"model.path={path}: has neither {whole[0]} nor {whole[1]}"


def _memory_findings(cluster: ClusterConfig, job: Job) -> Iterator[str]:
    """What the ranks on this machine take of its own memory, beside that of devices."""
    instances = [instance for _, pool in pools(cluster) for instance in pool.instances]
    specs = [instance_spec(cluster, instance.name) for instance in instances if set(instance.nodes) & set(job.nodes)]
    yield from total_memory_findings(specs, available_bytes=free_memory_bytes(), nodes=job.nodes)
