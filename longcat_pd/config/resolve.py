"""Reads the cluster YAML, lays overrides over it, fills every "auto" and refuses what cannot work, all findings at once.

The one reader of configuration, and the one place where a default depends on another key. Touches no network, no device
and no weights; of the checkpoint it reads ``config.json`` alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from longcat_pd.config.checks import RANGES, blocks_needed, check_blocks, check_model, check_shape, num_shards, pools
from longcat_pd.config.layout_checks import num_nodes
from longcat_pd.config.model import ModelConfig, attentions_of
from longcat_pd.config.node_checks import environment
from longcat_pd.config.reader import Findings, Reader, lay_over
from longcat_pd.config.schema import (
    ClusterConfig,
    EngineConfig,
    InstanceConfig,
    InstanceSpec,
    ModelSection,
    ParallelConfig,
    PeerAddress,
    PoolConfig,
    Role,
)
from longcat_pd.config.services import check_service_names
from longcat_pd.errors import ConfigError

_COMPILE_CACHE = Path("~/.cache/longcat_pd/compiled")
CPU_CACHE_BYTES = 1 << 28  # cache of one CPU rank unless num_blocks says otherwise: ranks share the machine

# Of JSON: strings, numbers with a point, and as ``power`` those without one that have an exponent: strings to YAML.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+\.\d+(?:e[-+]\d+)?|(?P<power>-?\d+e[-+]\d+)')
_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")  # to YAML, unless spelt out

_PATH_KEYS = (
    ("model", "path"),
    ("load_balancer", "api_key_file"),
    ("load_balancer", "admin_key_file"),
    ("cluster_key_file",),
    ("log_dir",),
    ("record", "dir"),
    ("hosts", "identity_file"),
    ("hosts", "known_hosts_file"),
    *((role, "engine", "compile_cache") for role in ("prefill", "decode", "standalone")),
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The resolved configuration of a cluster.

    Args:
        path: the YAML. Relative paths in it start at its own folder.
        overrides: ``key.path=value``, laid over the file before validation; list places are numbers, values are YAML.
            Relative paths in them start at the current folder.

    Raises:
        ConfigError: one line for each finding, each with the path of the key.
    """
    return _resolve(*_read(path, overrides))


def unresolved(path: str | Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """A cluster as far as it can be told without its checkpoint, which may be on other machines alone.

    Checks all that can be checked so. What is "auto" and follows from the checkpoint is not filled. Raises ConfigError.
    """
    config, found = _read(path, overrides)
    found.raise_if_any()
    return config


def check_tree(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for what ``unresolved`` would refuse in a file that holds this mapping."""
    found = Findings()
    _records(tree, found)
    found.raise_if_any()


def as_json(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The same configuration as a file of its own, to be read on another machine: overrides laid over, paths absolute.

    JSON, and spelt so that it is YAML too. Raises ConfigError.
    """
    found = Findings()
    tree = _tree(path, overrides, found)
    found.raise_if_any()
    text = json.dumps(tree, indent=1, ensure_ascii=False, default=str, skipkeys=True)
    text = _TOKEN.sub(lambda found: found[0].replace("e", ".0e") if found["power"] else found[0], text)
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def standalone(model_path: str, overrides: Sequence[str], *, host: str, port: int) -> InstanceSpec:
    """One engine for both phases, without a file; arguments and errors as ``standalone_cluster``."""
    return instance_spec(standalone_cluster(model_path, overrides, host=host, port=port), "standalone")


def standalone_cluster(model_path: str, overrides: Sequence[str], *, host: str, port: int) -> ClusterConfig:
    """A cluster of one engine for both phases, and its face, without a file.

    ``overrides`` are as in a cluster YAML (``model.dtype=float32``, ``standalone.engine.max_num_seqs=4``); ``engine.…`` and
    ``parallel.…`` are short for ``standalone.engine.…`` and ``standalone.parallel.…``. ``host`` and ``port`` are those of
    the face too. Raises ConfigError.
    """
    instance = {"name": "standalone", "http_port": port, "nodes": [host]}
    tree: dict[str, Any] = {"model": {"path": str(Path(model_path).absolute())}, "standalone": {"instances": [instance]}}
    shorts = ("engine.", "parallel.")
    full = [f"standalone.{item}" if item.startswith(shorts) else item for item in overrides]
    found = Findings()
    config = _records(_with_overrides(tree, full, found), found)
    cluster = _resolve(config, found)
    return dataclasses.replace(cluster, load_balancer=dataclasses.replace(cluster.load_balancer, host=host, port=port))


def instance_spec(cluster: ClusterConfig, name: str) -> InstanceSpec:
    """What the instance ``name`` is told. Its peers are the instances of the other role. Raises ConfigError."""
    known = {instance.name: (role, pool, instance) for role, pool in pools(cluster) for instance in pool.instances}
    if name not in known:
        raise ConfigError(f"instance={name}: not in the configuration; known: {', '.join(known)}", param="instance")
    role, pool, instance = known[name]
    spec = InstanceSpec(
        name=name,
        role=role,
        host=instance.host,
        http_port=instance.http_port,
        device=cluster.device,
        model=cluster.model,
        parallel=pool.parallel,
        engine=pool.engine,
        transfer=cluster.transfer,
        npu=cluster.npu,
        nodes=instance.nodes,
        device_memory_gib=cluster.device_memory_gib,
        cores_per_device=cluster.hosts.cores_per_device,
        ranks_before=tuple(_ranks_before(cluster, instance, node) for node in instance.nodes),
        env=environment(cluster, pool, instance),
        peers=tuple(_peer(other, inst) for other, _, inst in known.values() if other != role),
        cluster_key_file=cluster.cluster_key_file,
        faults=cluster.faults,
        record=None if role == "prefill" else cluster.record,
        tracing=cluster.tracing,
    )
    return dataclasses.replace(spec, config_digest=_digest(spec))


def _ranks_before(cluster: ClusterConfig, instance: InstanceConfig, node: str) -> int:
    """Ranks on a node that belong to instances which come before this one."""
    placed = [
        (other, pool.parallel.world_size // len(other.nodes)) for _, pool in pools(cluster) for other in pool.instances
    ]
    before = placed[: [other.name for other, _ in placed].index(instance.name)]
    return sum(count for other, count in before if node in other.nodes)


def _peer(role: Role, instance: InstanceConfig) -> PeerAddress:
    return PeerAddress(name=instance.name, role=role, host=instance.host, http_port=instance.http_port)


def _digest(spec: InstanceSpec) -> str:
    """Equal for equal settings, whichever instance of a pool has them; the balancer computes it from its own file.

    What an instance records and traces is its own affair: it may be started again with other settings of that alone.
    """
    placeless = dataclasses.replace(spec, name="", host="", http_port=0, nodes=(), ranks_before=(), env={})
    anyone = dataclasses.replace(placeless, record=None, tracing=None)
    text = json.dumps(dataclasses.asdict(anyone), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def complete(config: ClusterConfig, found: Findings) -> ClusterConfig:
    """A configuration that was not read here, checked and resolved like one that was. Raises ConfigError."""
    config = _with_node_of_balancer(config)
    _check(config, found)
    return _resolve(config, found)


def read_tree(path: str | Path, *, sections: str) -> dict[str, Any]:
    """The mapping that a YAML file holds. ``sections``: what it is told that should be there. Raises ConfigError."""
    file = Path(path)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", param=str(file)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: is not YAML: {' '.join(str(error).split())}", param=str(file)) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping with the sections {sections}", param=str(file))
    return tree


def lay_overrides(tree: dict[str, Any], overrides: Sequence[str], found: Findings) -> None:
    """Lay ``key.path=value`` over a tree, in place; values are YAML."""
    for item in overrides:
        key, equals, text = item.partition("=")
        if not key or not equals:
            found.add(item, f"--set {item}: must be key.path=value")
            continue
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):  # the latter: the 13th month, or a number of thousands of digits
            found.add(key, f"--set {item}: the value is not YAML")
            continue
        complaint = lay_over(tree, key.split("."), value)
        if complaint:
            found.add(key, f"--set {item}: {complaint}")


def anchor_paths(tree: dict[str, Any], keys: Sequence[tuple[str, ...]], folder: Path) -> None:
    """Anchor the relative paths at ``keys`` of a tree at ``folder``, in place. Raises ConfigError for what is no path."""
    for *sections, key in keys:
        here: Any = tree
        for section in sections:
            here = here.get(section) if isinstance(here, dict) else None
        if isinstance(here, dict) and isinstance(here.get(key), str) and here[key]:
            try:
                here[key] = _absolute(folder / Path(here[key]).expanduser())
            except (ValueError, RuntimeError) as error:  # a null character, or the home of nobody
                name = ".".join((*sections, key))
                raise ConfigError(f"{name}={here[key]!r}: is no path: {error}", param=name) from error


def _absolute(path: Path) -> str:
    """Without "..". Links are kept, which lead elsewhere on another machine, but for those that a ".." stands behind."""
    if "\0" in str(path):
        raise ValueError("it holds a null character")
    if ".." in path.parts:
        after = len(path.parts) - path.parts[::-1].index("..")
        path = Path(*path.parts[:after]).resolve().joinpath(*path.parts[after:])
    return os.path.normpath(path.absolute())


def _read(path: str | Path, overrides: Sequence[str]) -> tuple[ClusterConfig, Findings]:
    found = Findings()
    return _records(_tree(path, overrides, found), found), found


def _tree(path: str | Path, overrides: Sequence[str], found: Findings) -> dict[str, Any]:
    """The file with overrides laid over it and its paths anchored."""
    tree = read_tree(path, sections="model, prefill, decode, …")
    anchor_paths(tree, _PATH_KEYS, Path(path).absolute().parent)
    return _with_overrides(tree, overrides, found)


def _with_overrides(tree: dict[str, Any], overrides: Sequence[str], found: Findings) -> dict[str, Any]:
    lay_overrides(tree, overrides, found)
    anchor_paths(tree, _PATH_KEYS, Path.cwd())
    return tree


def _records(tree: Mapping[str, Any], found: Findings) -> ClusterConfig:
    config = _with_node_of_balancer(Reader(found, RANGES).record(ClusterConfig, tree))
    _check(config, found)
    return config


def _check(config: ClusterConfig, found: Findings) -> None:
    check_shape(config, found)
    check_service_names(config, found)


def _resolve(config: ClusterConfig, found: Findings) -> ClusterConfig:
    model = _checkpoint(config, found)
    if model is not None:
        config = dataclasses.replace(config, model=_resolved_section(config.model, model))
        for role, pool in pools(config):
            parallel = _with_sizes(pool.parallel, config.devices_per_node)
            parallel = _with_stages(role, parallel, model=model, found=found)
            pool = dataclasses.replace(pool, parallel=parallel)
            engine = _resolved_engine(pool, config, model=model)
            config = _with_pool(config, role, dataclasses.replace(pool, engine=engine))
        check_model(config, model, found=found)
        for role, pool in pools(config):
            check_blocks(role, pool, found=found)
    found.raise_if_any()
    return config


def _with_node_of_balancer(config: ClusterConfig) -> ClusterConfig:
    """As in the published deployment the last node, which is one of the prefill pool."""
    instances = config.prefill.instances if config.prefill is not None else ()
    if config.load_balancer.node or not instances or not instances[-1].nodes:
        return config
    balancer = dataclasses.replace(config.load_balancer, node=instances[-1].nodes[-1])
    return dataclasses.replace(config, load_balancer=balancer)


def _checkpoint(config: ClusterConfig, found: Findings) -> ModelConfig | None:
    if found.is_bad("model.path") or found.is_bad("model"):
        return None
    try:
        return ModelConfig.load(Path(config.model.path))
    except ConfigError as error:
        found.add("model.path", f"model.path={config.model.path}: {error.message}")
        return None


def _resolved_section(section: ModelSection, model: ModelConfig) -> ModelSection:
    name = section.served_name or Path(section.path).name
    dtype = section.dtype if section.dtype != "auto" else model.torch_dtype
    return dataclasses.replace(section, served_name=name, dtype=dtype)


def _with_pool(config: ClusterConfig, role: Role, pool: PoolConfig) -> ClusterConfig:
    if role == "prefill":
        return dataclasses.replace(config, prefill=pool)
    if role == "decode":
        return dataclasses.replace(config, decode=pool)
    return dataclasses.replace(config, standalone=pool)


def _with_sizes(parallel: ParallelConfig, devices_per_node: int) -> ParallelConfig:
    """Sizes that follow from others."""
    tables = parallel.ngram_embed_tp_size or parallel.embed_tp_size
    return dataclasses.replace(parallel, ngram_embed_tp_size=tables, node_size=num_nodes(parallel, devices_per_node))


def _with_stages(role: Role, parallel: ParallelConfig, *, model: ModelConfig, found: Findings) -> ParallelConfig:
    if parallel.pp_size > model.num_layers:
        key = f"{role}.parallel.pp_size"
        found.cross([key], f"{key}={parallel.pp_size}: more stages than the checkpoint's {model.num_layers} layers")
    stages = parallel.layers_per_stage or even_stages(model.num_layers, min(parallel.pp_size, model.num_layers))
    return dataclasses.replace(parallel, layers_per_stage=stages)


def _resolved_engine(pool: PoolConfig, config: ClusterConfig, *, model: ModelConfig) -> EngineConfig:
    """Blocks for all sequences of a group, of full length, within CPU_CACHE_BYTES a rank, at least for one."""
    engine = dataclasses.replace(pool.engine, max_model_len=pool.engine.max_model_len or model.max_position_embeddings)
    slots = engine.max_num_seqs // pool.parallel.dp_size
    if engine.exe_mode != "eager":
        sizes = engine.buckets or (1, slots)
        engine = dataclasses.replace(engine, buckets=tuple(sorted(set(sizes))))
    if engine.num_blocks:
        return engine
    whole = blocks_needed(engine.max_model_len, engine, num_shards=num_shards(pool.parallel))
    bytes_per_value = 4 if config.model.dtype == "float32" else 2
    token_bytes = bytes_per_value * cache_values(
        model, max(pool.parallel.layers_per_stage), has_draft=engine.num_draft_tokens > 0
    )
    affordable = CPU_CACHE_BYTES // (token_bytes * engine.block_size)
    return dataclasses.replace(engine, num_blocks=1 + max(whole, min(whole * slots, affordable)))


def compile_cache(engine: EngineConfig) -> Path:
    """Where compiled steps are kept: by default in the home of whoever runs the rank, so no part of the resolved settings.

    Raises:
        ConfigError: no folder is named and this user has no home.
    """
    if engine.compile_cache:
        return Path(engine.compile_cache)
    try:
        return _COMPILE_CACHE.expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "engine.compile_cache: must be set where a user has no home", param="engine.compile_cache"
        ) from error


def cache_values(model: ModelConfig, num_layers: int, *, has_draft: bool = False) -> int:
    """Cached numbers of one token in so many layers, and in the draft layer."""
    attentions = [*range(2 * num_layers), *(attentions_of(model, model.num_layers) if has_draft else ())]
    return sum(sum(model.cached_widths(attention).values()) for attention in attentions)


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as even as can be, larger stages first."""
    small, more = divmod(num_layers, num_stages)
    return tuple(small + (stage < more) for stage in range(num_stages))
