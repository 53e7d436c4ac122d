"""The rules of a configuration: bounds of single numbers, and what must agree between keys, pools, ports and checkpoint.

Every rule adds findings and changes nothing. Knows no file format and fills no default (``resolve.py``). The rules of one
pool's sizes are ``layout_checks.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from longcat_pd.config.layout_checks import SUPPORTED_DEVICES, check_layout, check_layout_fits
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.node_checks import check_hosts, check_nodes, is_loopback
from longcat_pd.config.npu_checks import NPU_RANGES, check_device, check_device_fits
from longcat_pd.config.reader import Findings, Range
from longcat_pd.config.schema import (
    ClusterConfig,
    EngineConfig,
    HostsConfig,
    InstanceConfig,
    InstanceSpec,
    LoadBalancerConfig,
    ModelSection,
    ParallelConfig,
    PoolConfig,
    RecordConfig,
    Role,
    TracingConfig,
    TransferConfig,
)

_COUNT = Range(1)
_SECONDS = Range(0, is_open_low=True)
_PORT = Range(1, 65535)
_MOST_DEVICES = 1024  # of a node: each has a port
MOST_BUNDLE_BYTES = 1 << 28  # of a recorded request; a million ids take 8 MiB
_MOST_DRAFTS = 64  # of a window: each is a round of its own, and with device=npu a graph

RANGES: Mapping[type, Mapping[str, Range]] = {
    ModelSection: {"default_max_tokens": _COUNT},
    ParallelConfig: {
        **dict.fromkeys(("pp_size", "cp_size", "dp_size", "kvp_size", "attn_tp_size", "layers_per_stage"), _COUNT),
        **dict.fromkeys(("dense_tp_size", "moe_tp_size", "ep_size", "embed_tp_size", "lmhead_tp_size"), _COUNT),
        "ngram_embed_tp_size": Range(0),
        "node_size": Range(0),
    },
    EngineConfig: {
        **dict.fromkeys(("block_size", "buckets", "max_num_seqs", "max_num_batched_tokens", "max_queued_requests"), _COUNT),
        "max_model_len": Range(0),
        "num_draft_tokens": Range(0, _MOST_DRAFTS),
        "num_blocks": Range(0),
        **dict.fromkeys(("queue_timeout_s", "step_timeout_s", "rank_lost_s"), _SECONDS),
        "drain_timeout_s": Range(0),
    },
    InstanceConfig: {"http_port": _PORT},
    TransferConfig: dict.fromkeys(("timeout_s", "connect_timeout_s", "pairing_timeout_s"), _SECONDS),
    LoadBalancerConfig: {
        "port": _PORT,
        "retry": Range(0),
        "max_inflight": _COUNT,
        "max_body_bytes": _COUNT,
        "request_timeout_s": _SECONDS,
        "keepalive_comment_s": Range(0),
    },
    HostsConfig: {
        "port": _PORT,
        "connect_timeout_s": _SECONDS,
        "keep_releases": _COUNT,
        "cores_per_device": Range(0),
    },
    ClusterConfig: {"devices_per_node": Range(1, _MOST_DEVICES), "device_memory_gib": Range(0)},
    RecordConfig: {"max_bytes": Range(1, MOST_BUNDLE_BYTES), "max_total_bytes": _COUNT},
    TracingConfig: {"sample": Range(0, 1)},
    **NPU_RANGES,
}

NODES_PORT = 6
INSTANCE_PORTS: Mapping[int, str] = {
    0: "HTTP",
    1: "control records",
    2: "plans",
    3: "outputs",
    4: "rendezvous of the instance",
    5: "rendezvous of the lanes",
    NODES_PORT: "ranks on further nodes",
}
DEVICE_PORTS = 10  # the first of the range that transports which listen take, one port for each device

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class PortUse(NamedTuple):
    """One port that a configuration claims. ``key``: the setting that it follows from; ``node``: the machine with it."""

    host: str
    port: int
    purpose: str
    key: str
    node: str = ""


def pools(config: ClusterConfig) -> Iterator[tuple[Role, PoolConfig]]:
    """The pools that the configuration has, prefill first."""
    if config.prefill is not None:
        yield "prefill", config.prefill
    if config.decode is not None:
        yield "decode", config.decode
    if config.standalone is not None:
        yield "standalone", config.standalone


def port_uses(config: ClusterConfig) -> Iterator[PortUse]:
    """All ports of a cluster."""
    balancer = config.load_balancer
    if config.prefill is not None:
        yield PortUse(balancer.host, balancer.port, "balancer", "load_balancer.port", balancer.node)
    for role, pool in pools(config):
        for place, instance in enumerate(pool.instances):
            key, first, name = f"{role}.instances[{place}].http_port", instance.http_port, instance.name
            for offset in _offsets(role, num_nodes=len(instance.nodes)):
                purpose = f"{name} {INSTANCE_PORTS[offset]}"
                yield PortUse(instance.host, first + offset, purpose, key, instance.host)
            for node in instance.nodes if config.device != "cpu" else ():  # where a transport may listen on them
                for number in range(DEVICE_PORTS, DEVICE_PORTS + config.devices_per_node):
                    yield PortUse(node, first + number, f"{name} device {number - DEVICE_PORTS}", key, node)


def ports_of(spec: InstanceSpec) -> Iterator[PortUse]:
    """The ports of one instance's driver, those of its devices apart."""
    for offset in _offsets(spec.role, num_nodes=len(spec.nodes)):
        host = spec.ranks_host if offset else spec.host
        yield PortUse(host, spec.http_port + offset, INSTANCE_PORTS[offset], f"{spec.name}.http_port", spec.host)


def _offsets(role: Role, *, num_nodes: int) -> Iterator[int]:
    """A standalone engine has no peers and no lanes, one on one node no others."""
    unused = {1, 5} if role == "standalone" else set()
    if num_nodes <= 1:
        unused.add(NODES_PORT)
    yield from (offset for offset in INSTANCE_PORTS if offset not in unused)


def check_shape(config: ClusterConfig, found: Findings) -> None:
    """Everything that can be said without the checkpoint."""
    _check_pools(config, found)
    _check_instances(config, found)
    _check_ports(config, found)
    for role, pool in pools(config):
        check_layout(role, pool, config, found=found)
        _check_engine(role, pool, found=found)
        _check_graphs(role, pool, found=found)
    _check_devices(config, found)
    check_device(config, dict(pools(config)), found=found)
    check_hosts(config, list(pools(config)), found=found)
    _check_pair(config, found)
    _check_faults(config, found)
    _check_tracing(config, found)


def check_model(config: ClusterConfig, model: ModelConfig, *, found: Findings) -> None:
    """What the checkpoint demands of the layouts and lengths. ``config`` is resolved."""
    _check_lengths(config, found)
    if config.model.weights == "random" and model.quantization is not None:
        found.cross(["model.weights"], "model.weights=random: random weights are floats, config.json announces int8")
    for role, pool in pools(config):
        _check_drafts(role, pool, model=model, found=found)
        check_layout_fits(role, pool.parallel, model, found=found)
    check_device_fits(config, dict(pools(config)), model, found=found)


def _check_drafts(role: Role, pool: PoolConfig, *, model: ModelConfig, found: Findings) -> None:
    """Only draft layers as the releases have them; whether the checkpoint has its tensors is seen when they are read."""
    draft, key = model.draft, f"{role}.engine.num_draft_tokens"
    if not pool.engine.num_draft_tokens or draft is None:
        return
    if draft.mtp_num_layers > 1 and not draft.mtp_replicate_modules:
        found.cross([key], f"{key}={pool.engine.num_draft_tokens}: mtp_replicate_modules=false is not supported")
    if model.over_embedding is not None and not draft.mtp_disable_over_tokenizer:
        found.cross([key], f"{key}={pool.engine.num_draft_tokens}: mtp_disable_over_tokenizer=false is not supported")


def blocks_needed(num_tokens: int, engine: EngineConfig, *, num_shards: int) -> int:
    """Most blocks of one cache shard that a sequence of so many tokens can take, with the drafts behind it."""
    blocks = -(-(num_tokens + engine.num_draft_tokens) // engine.block_size)
    return -(-blocks // num_shards)


def num_shards(parallel: ParallelConfig) -> int:
    """Ranks over which one sequence's blocks are spread."""
    return parallel.cp_size * parallel.kvp_size


def chunk_rows(engine: EngineConfig, parallel: ParallelConfig) -> int:
    """Most rows of one chunk that lie on one rank of ``cp``: a level share of its tokens, in whole blocks."""
    share = -(-engine.max_num_batched_tokens // parallel.cp_size)
    return -(-share // engine.block_size) * engine.block_size


def check_blocks(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    """The longest sequence must fit in the blocks of a shard. The pool is resolved; block 0 is never handed out."""
    engine = pool.engine
    needed = blocks_needed(engine.max_model_len, engine, num_shards=num_shards(pool.parallel))
    if engine.num_blocks - 1 < needed:
        paths = [f"{role}.engine.{name}" for name in ("num_blocks", "max_model_len", "block_size")]
        text = f"one sequence of max_model_len={engine.max_model_len} needs {needed} blocks a shard beside block 0"
        found.cross(paths, f"{paths[0]}={engine.num_blocks}: {text}")


def _check_pools(config: ClusterConfig, found: Findings) -> None:
    if config.standalone is None:
        for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
            if pool is None:
                found.cross([role], f"{role}: missing; a cluster has a prefill and a decode pool")
            elif not pool.instances:
                found.cross([f"{role}.instances"], f"{role}.instances: at least one instance is needed")
        if config.transfer.transport == "loopback":
            text = "transfer.transport=loopback: joins pools inside one process only; a cluster needs process_group"
            found.cross(["transfer.transport"], text)
    elif config.prefill is not None or config.decode is not None:
        found.cross(["standalone"], "standalone: stands alone; a cluster with prefill and decode pools has no such section")


def _check_instances(config: ClusterConfig, found: Findings) -> None:
    for role, pool in pools(config):
        for place, instance in enumerate(pool.instances):
            key = f"{role}.instances[{place}].name"
            if not _NAME.fullmatch(instance.name):
                found.cross(
                    [key], f"{key}={instance.name}: letters, digits, '_', '.' and '-' only, a letter or digit first"
                )
        check_nodes(role, pool, found=found)


def _check_ports(config: ClusterConfig, found: Findings) -> None:
    taken: dict[tuple[str, int], PortUse] = {}
    reported: set[tuple[str, str]] = set()
    if any(not instance.nodes for _, pool in pools(config) for instance in pool.instances):
        return
    for use in port_uses(config):
        if use.port > 65535 and (use.key, "") not in reported:
            reported.add((use.key, ""))
            found.cross([use.key], f"{use.key}: {use.purpose} would be port {use.port}; the last port is 65535")
        other = taken.setdefault((_same_host(use.node or use.host), use.port), use)
        if other is not use and (other.key, use.key) not in reported:
            reported.add((other.key, use.key))
            text = f"port {use.port} of {use.host} ({use.purpose}) is also taken by {other.key} ({other.purpose})"
            found.cross([use.key, other.key], f"{use.key}: {text}")


def _same_host(host: str) -> str:
    """Addresses that listen on this machine in one way or another count as one."""
    return "127.0.0.1" if host in ("localhost", "0.0.0.0", "::", "::1") else host


def _check_engine(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    engine, path = pool.engine, f"{role}.engine"
    chunk, block = f"{path}.max_num_batched_tokens", f"{path}.block_size"
    if role != "decode" and engine.max_num_batched_tokens % engine.block_size:
        text = f"must be a multiple of {block}={engine.block_size}: a chunk ends at a block border"
        found.cross([chunk, block], f"{chunk}={engine.max_num_batched_tokens}: {text}")
    if engine.max_num_seqs % pool.parallel.dp_size:
        key = f"{path}.max_num_seqs"
        text = f"{key}={engine.max_num_seqs}: must be a multiple of {role}.parallel.dp_size={pool.parallel.dp_size}"
        found.cross([key, f"{role}.parallel.dp_size"], text)


def _check_graphs(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    """Every batch must find a size that it fits in."""
    engine, path = pool.engine, f"{role}.engine"
    if engine.exe_mode == "eager":
        return
    if role == "prefill":
        key = f"{path}.exe_mode"
        found.cross([key], f"{key}={engine.exe_mode}: compiles decode steps; a prefill pool has none, leave it eager")
    slots = engine.max_num_seqs // pool.parallel.dp_size
    if engine.buckets and max(engine.buckets) != slots:
        keys = [f"{path}.buckets", f"{path}.max_num_seqs"]
        found.cross(keys, f"{keys[0]}={list(engine.buckets)}: the largest must be the {slots} slots of a group ({keys[1]})")


def _check_devices(config: ClusterConfig, found: Findings) -> None:
    if config.device not in SUPPORTED_DEVICES:
        known = ", ".join(SUPPORTED_DEVICES)
        found.cross(["device"], f"device={config.device}: is not supported yet; one of {known}")
        return
    for role, pool in pools(config):
        path, world = f"{role}.parallel", pool.parallel.world_size
        group = "kvp_size" if pool.parallel.kvp_size >= pool.parallel.attn_tp_size else "attn_tp_size"
        usual = ("pp_size", "cp_size") if role == "prefill" else ("dp_size", group)
        axes = [axis for axis in ("pp_size", "dp_size", "cp_size", group) if axis in usual or vars(pool.parallel)[axis] > 1]
        shape = " x ".join(f"{axis} {vars(pool.parallel)[axis]}" for axis in axes)
        for place, instance in enumerate(pool.instances):
            devices = len(instance.nodes) * config.devices_per_node
            if not instance.nodes:
                continue
            if world > devices or (config.device != "cpu" and world != devices):
                nodes = f"{role}.instances[{place}]"
                text = f"{nodes} has {len(instance.nodes)} nodes x devices_per_node {config.devices_per_node} = {devices}"
                keys = [f"{path}.{axis}" for axis in axes] + ["devices_per_node", f"{nodes}.nodes"]
                found.cross(keys, f"{path}: {shape} = {world}, but {text}")


def _check_faults(config: ClusterConfig, found: Findings) -> None:
    """A cluster that can be told to fail is for tests: on CPU, and out of the reach of strangers."""
    if not config.faults:
        return
    balancer = config.load_balancer
    if config.device != "cpu":
        text = f"faults=true: only for device cpu, not {config.device}: the others of a rank that leaves a collective wait"
        found.cross(["faults", "device"], f"{text} on their cards, which may then need a reset")
    hosts = {"load_balancer.host": balancer.host}  # of workers ``node_checks.py`` asks for a key in any case
    if config.standalone is not None:
        standing = enumerate(config.standalone.instances)
        hosts = {f"standalone.instances[{place}].nodes": node for place, each in standing for node in each.nodes}
    for key, host in hosts.items():
        if balancer.admin_key_file is None and not is_loopback(host):
            guard = "load_balancer.admin_key_file"
            found.cross(["faults", guard, key], f"faults=true: needs a {guard}, for {key}={host} is not loopback")


def _check_tracing(config: ClusterConfig, found: Findings) -> None:
    if config.tracing is None or found.is_bad("tracing.endpoint"):
        return
    key, endpoint = "tracing.endpoint", config.tracing.endpoint
    said = f"{key}={endpoint.rpartition('@')[2]}"  # what stands before may be a key
    try:
        url = urlsplit(endpoint)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # no address, or no port
        is_good = False
    if not is_good or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        found.add(key, f"{said}: must be http://HOST:PORT or https://HOST:PORT, perhaps with a path")
    elif "@" in endpoint or "?" in endpoint or "#" in endpoint:
        found.add(key, f"{said}: must hold no user, key, query or fragment; keys are told by OTEL_EXPORTER_OTLP_HEADERS")


def _check_pair(config: ClusterConfig, found: Findings) -> None:
    if config.prefill is not None and config.decode is not None:
        ours, theirs = config.prefill.engine.block_size, config.decode.engine.block_size
        keys = ["prefill.engine.block_size", "decode.engine.block_size"]
        if ours != theirs:
            found.cross(keys, f"block_size differs: {keys[0]}={ours}, {keys[1]}={theirs}")
        ours, theirs = config.prefill.engine.num_draft_tokens, config.decode.engine.num_draft_tokens
        keys = ["prefill.engine.num_draft_tokens", "decode.engine.num_draft_tokens"]
        if (ours > 0) != (theirs > 0):
            found.cross(keys, f"{keys[0]}={ours}, {keys[1]}={theirs}: both pools hold the draft layer's cache, or none")


def _check_lengths(config: ClusterConfig, found: Findings) -> None:
    if config.prefill is not None and config.decode is not None:
        ours, theirs = config.prefill.engine.max_model_len, config.decode.engine.max_model_len
        keys = ["prefill.engine.max_model_len", "decode.engine.max_model_len"]
        if theirs < ours:
            found.cross(keys, f"{keys[1]}={theirs}: must be at least {keys[0]}={ours}")
