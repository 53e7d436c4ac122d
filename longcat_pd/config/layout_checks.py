"""The rules of a layout: which sizes go together, with the device, with the way of computing, and with the checkpoint.

Every rule adds findings and changes nothing. Knows neither ports nor pools beside each other (``checks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.reader import Findings
from longcat_pd.config.schema import ClusterConfig, ParallelConfig, PoolConfig, Role

SUPPORTED_DEVICES = ("cpu", "npu")  # those with a row in the tables of operators and platforms, which need torch to be read
FUSED_DEVICES: tuple[str, ...] = ("npu",)  # of these, those whose table has the fused pair

_FOREIGN: Mapping[Role, tuple[str, ...]] = {
    "prefill": ("dp_size", "kvp_size", "attn_tp_size"),
    "decode": ("pp_size", "cp_size"),
    "standalone": ("pp_size", "cp_size"),
}
_PART_SIZES = ("dense_tp_size", "moe_tp_size", "ep_size", "embed_tp_size", "lmhead_tp_size", "ngram_embed_tp_size")


class _Divisor(NamedTuple):
    """A size, and what it must divide."""

    name: str
    whole: int
    meaning: str


def num_nodes(parallel: ParallelConfig, devices_per_node: int) -> int:
    """Nodes that the ranks of one ``ep`` group lie on; 1 unless experts are reached in two levels."""
    if parallel.moe_dispatch != "two_level":
        return parallel.node_size or 1
    return parallel.node_size or -(-parallel.ep_size // devices_per_node)


def check_layout(role: Role, pool: PoolConfig, config: ClusterConfig, *, found: Findings) -> None:
    """Everything that can be said of a pool's sizes without the checkpoint."""
    _check_tiling(role, pool.parallel, found=found)
    _check_parts(role, pool.parallel, found=found)
    _check_dispatch(role, pool, config, found=found)
    _check_tables(role, pool, found=found)


def check_layout_fits(role: Role, parallel: ParallelConfig, model: ModelConfig, *, found: Findings) -> None:
    """What the checkpoint demands of the sizes. ``parallel`` is resolved."""
    path = f"{role}.parallel"
    stages, key = parallel.layers_per_stage, f"{path}.layers_per_stage"
    if sum(stages) != model.num_layers:
        found.cross([key], f"{key}={list(stages)}: sums to {sum(stages)}, the checkpoint has {model.num_layers} layers")
    sizes: dict[str, int] = vars(parallel)
    for name, whole, meaning in _divisors(model):
        if whole % sizes[name]:
            found.cross([f"{path}.{name}"], f"{path}.{name}={sizes[name]}: does not divide the checkpoint's {meaning}")
    if parallel.moe_tp_size > 1 and _has_int8_experts(model):
        key = f"{path}.moe_tp_size"
        text = "must be 1 for int8 experts, whose rows are quantised over their whole inner width; use ep_size"
        found.cross([key], f"{key}={parallel.moe_tp_size}: {text}")
    if model.over_embedding is None and parallel.ngram_tables != "device":
        key = f"{path}.ngram_tables"
        text = "has no effect, the checkpoint has no n-gram tables; leave it out"
        found.cross([key], f"{key}={parallel.ngram_tables}: {text}")
    tables, key = parallel.ngram_embed_tp_size, f"{path}.ngram_embed_tp_size"
    if model.over_embedding is None and tables not in (1, parallel.embed_tp_size):
        found.cross([key], f"{key}={tables}: has no effect, the checkpoint has no n-gram tables; leave it out")
    if model.over_embedding is not None:
        num_rows = sum(model.over_embedding.table_sizes)
        each = -(-num_rows // tables)
        if (tables - 1) * each >= num_rows:
            text = f"{num_rows} rows of n-gram tables in runs of {each} are for {-(-num_rows // each)} ranks"
            found.cross([key, f"{path}.embed_tp_size"], f"{key}={tables}: the checkpoint's {text}")


def _check_tiling(role: Role, parallel: ParallelConfig, *, found: Findings) -> None:
    """Axes that a role has, and how its ranks share attention."""
    path, sizes = f"{role}.parallel", vars(parallel)
    for name in _FOREIGN[role]:
        if sizes[name] != 1:
            found.cross([f"{path}.{name}"], f"{path}.{name}={sizes[name]}: must be 1 in a {role} pool")
    is_whole_cache = role == "standalone" and parallel.kvp_size == 1  # on every rank of a group
    if role != "prefill" and not is_whole_cache and parallel.attn_tp_size != parallel.kvp_size:
        paths = [f"{path}.attn_tp_size", f"{path}.kvp_size"]
        advice = "set both to the same value" + (", or kvp_size to 1" if role == "standalone" else "")
        text = f"{paths[0]}={parallel.attn_tp_size}: differs from {paths[1]}={parallel.kvp_size}; {advice}"
        found.cross(paths, text)
    stages, key = parallel.layers_per_stage, f"{path}.layers_per_stage"
    if stages and len(stages) != parallel.pp_size:
        found.cross([key, f"{path}.pp_size"], f"{key}={list(stages)}: {len(stages)} stages, pp_size is {parallel.pp_size}")


def _check_parts(role: Role, parallel: ParallelConfig, *, found: Findings) -> None:
    """Groups of the other parts are runs of neighbours in a stage, and whole groups of attention or whole parts of one."""
    path, stage, group = f"{role}.parallel", parallel.stage_size, parallel.attn_tp_size
    tiles = ("cp_size",) if role == "prefill" else ("dp_size", "kvp_size", "attn_tp_size")
    for name in _PART_SIZES:
        size: int = vars(parallel)[name] or 1
        keys = [f"{path}.{name}", *(f"{path}.{tile}" for tile in tiles)]
        if stage % size:
            whole = f"the {stage} ranks of a pipeline stage" if role == "prefill" else f"the {stage} ranks of the instance"
            found.cross(keys, f"{keys[0]}={size}: does not divide {whole}")
        elif size % group and group % size:
            text = f"neither divides attn_tp_size={group} nor is a multiple of it"
            found.cross(keys, f"{keys[0]}={size}: {text}")
    if parallel.ep_size > 1 and parallel.moe_tp_size > 1:
        keys = [f"{path}.ep_size", f"{path}.moe_tp_size"]
        text = f"{keys[0]}={parallel.ep_size} and {keys[1]}={parallel.moe_tp_size}: only one of them may be above 1"
        found.cross(keys, text)


def _check_dispatch(role: Role, pool: PoolConfig, config: ClusterConfig, *, found: Findings) -> None:
    """How rows reach experts: what the device can do, what can be compiled, and the nodes of two levels."""
    parallel, path = pool.parallel, f"{role}.parallel"
    dispatch, key = parallel.moe_dispatch, f"{path}.moe_dispatch"
    if dispatch == "fused" and config.device not in FUSED_DEVICES:
        text = f"the operators of device={config.device} lack the fused dispatch and combine; use gather"
        found.cross([key, "device"], f"{key}=fused: {text}")
    mode = f"{role}.engine.exe_mode"
    if pool.engine.exe_mode != "eager" and parallel.ep_size > 1 and dispatch in ("all_to_all", "two_level"):
        text = f"exchanges counts, so {mode}={pool.engine.exe_mode} has no shape to compile; use gather"
        found.cross([key, f"{path}.ep_size", mode], f"{key}={dispatch}: {text}")
    nodes = num_nodes(parallel, config.devices_per_node)
    keys = [f"{path}.node_size", f"{path}.ep_size", key]
    if nodes > 1 and dispatch != "two_level":
        found.cross(keys, f"{keys[0]}={nodes}: has no effect with moe_dispatch={dispatch}; it is for two_level")
        return
    devices, is_derived = config.devices_per_node, not parallel.node_size and dispatch == "two_level"
    local, rest = divmod(parallel.ep_size, nodes)
    source = f" (of devices_per_node={devices})" if is_derived else ""
    if rest:
        found.cross(keys, f"{keys[0]}={nodes}{source}: does not divide {keys[1]}={parallel.ep_size}")
    elif is_derived and parallel.world_size > devices and devices % local:
        text = f"is {local} ranks of {keys[1]}={parallel.ep_size} on each node, which do not divide devices_per_node"
        found.cross([*keys, "devices_per_node"], f"{keys[0]}={nodes}{source}: {text}; set it")


def _check_tables(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    """A graph stays on the device. Prompts are never computed by one."""
    mode, tables = pool.engine.exe_mode, pool.parallel.ngram_tables
    if role != "prefill" and tables == "host" and mode != "eager":
        keys = [f"{role}.parallel.ngram_tables", f"{role}.engine.exe_mode"]
        found.cross(
            keys, f"{keys[0]}=host: rows are looked up outside of graphs, and {keys[1]}={mode}; use device, or eager"
        )


def _divisors(model: ModelConfig) -> Iterator[_Divisor]:
    """What each size cuts into equal parts, in the words of a message."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    yield _Divisor("attn_tp_size", heads, f"{heads} attention heads")
    if model.quantization is not None:
        yield _Divisor("attn_tp_size", hidden, f"hidden_size {hidden}, as int8 weights want")
        yield _Divisor("dense_tp_size", hidden, f"hidden_size {hidden}, as int8 weights want")
    yield _Divisor("dense_tp_size", model.ffn_hidden_size, f"ffn_hidden_size {model.ffn_hidden_size}")
    width = model.expert_ffn_hidden_size
    yield _Divisor("moe_tp_size", width, f"expert_ffn_hidden_size {width}")
    yield _Divisor("ep_size", model.n_routed_experts, f"{model.n_routed_experts} routed experts")
    for name in ("embed_tp_size", "lmhead_tp_size"):
        yield _Divisor(name, model.vocab_size, f"vocab_size {model.vocab_size}")


def _has_int8_experts(model: ModelConfig) -> bool:
    """All experts of a layer are alike, so the first of each tells."""
    quantization = model.quantization
    return quantization is not None and any(
        quantization.covers(f"model.layers.{layer}.mlp.experts.0.{part}_proj")
        for layer in range(model.num_layers)
        for part in ("gate", "up", "down")
    )
