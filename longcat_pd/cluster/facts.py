"""What a machine is asked about itself, and what it answers: the records of ``node/doctor.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Request:
    """``ports``: (host, port, purpose); ``run``: the folder of its run record; ``folders``: whose free room is told.

    ``model``: the folder of the checkpoint, "" where no rank runs; ``only_config``: its weights are not read.
    ``num_devices``: NPU that the tools are asked about. ``key_file``: of the cluster, "" where it has none; ``label``: what
    the digest of its key is keyed with, another one each time.
    """

    node: str
    path: str
    run: str
    ports: tuple[tuple[str, int, str], ...]
    folders: tuple[str, ...]
    model: str
    only_config: bool
    num_devices: int
    key_file: str
    label: str


@dataclass(frozen=True, kw_only=True)
class TakenPort:
    """A port that cannot be had. ``pid`` 0: who has it cannot be seen; ``is_ours``: ``start`` of this cluster began it."""

    port: int
    purpose: str
    pid: int
    by: str
    is_ours: bool


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A checkpoint as it lies there. ``digest``: of its configuration and of the headers of its shards."""

    problems: tuple[str, ...]
    num_shards: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    """The key of the cluster as it lies there. ``digest``: of the first key, which it does not tell; "" with a problem.

    ``mode``: the bits of its permissions.
    """

    problem: str
    mode: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What ``npu-smi info -m`` and ``npu-smi info`` said, and ``hccn_tool`` of each device."""

    mapping: str = ""
    table: str = ""
    links: tuple[str, ...] = ()
    health: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The answer. Limits: -1 is none. ``is_killed_at_logout``: what a session began, with it."""

    release: str
    ports: tuple[TakenPort, ...]
    interface: str
    mtu: int
    free_bytes: dict[str, int]
    memory_bytes: int
    free_memory_bytes: int
    cores: int
    weights: Weights | None
    key: KeyFile | None
    limits: dict[str, int]
    is_killed_at_logout: bool
    devices: Devices
    toolkit: str
