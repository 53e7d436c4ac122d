"""The offline YAML dialect (model_config, parallel_config, …) into the records of everything else.

Owns the dialect's keys, what they follow from, and how findings of the common rules are told in its words. The rules
themselves are ``checks.py``, files and resolving ``resolve.py``. Knows no weights and no prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.offline_file import (
    DEFAULT_DATASET,
    CustomParams,
    DataPart,
    ModelPart,
    OfflineFile,
    ParallelPart,
    SchedulerPart,
)
from longcat_pd.config.reader import Findings, Range, Reader
from longcat_pd.config.resolve import anchor_paths, complete, instance_spec, lay_overrides, read_tree
from longcat_pd.config.schema import (
    ClusterConfig,
    EngineConfig,
    InstanceConfig,
    InstanceSpec,
    ModelSection,
    NpuConfig,
    ParallelConfig,
    PoolConfig,
)
from longcat_pd.errors import ConfigError

SECTIONS = "model_config, data_config, parallel_config, scheduler_config"
PORT = 8081  # in the instance as it is read; whoever starts it looks for ports that are free

_FILES = (("model_config", "model_path"), ("model_config", "output_path"), ("data_config", "dataset"))
_COUNT, _SIZE = Range(1), Range(0)
_SHARES: Mapping[str, str] = {
    "moe_aic_num": "moe_cube_cores",
    "moe_aiv_num": "moe_vector_cores",
    "main_aic_num": "main_cube_cores",
    "main_aiv_num": "main_vector_cores",
}
_NPU_ONLY = ("enable_moe_stream_overlap", "enable_prefetch", "enable_limit_core_num", *_SHARES)


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """A file of the dialect, resolved: the engine, and what it is asked.

    ``idle``: settings (``key.path=value``) that are stated and say nothing to this device.
    """

    instance: InstanceSpec
    model_name: str
    data: DataPart
    batch_size: int
    max_new_tokens: int
    keeps_compiled: bool
    idle: tuple[str, ...]


_RANGES: Mapping[type, Mapping[str, Range]] = {
    CustomParams: {
        "ngram_embed_tp_size": _SIZE,
        **dict.fromkeys(_SHARES, _COUNT),
    },
    ModelPart: {"next_n": _SIZE},
    DataPart: {"input_truncated_len": Range(2)},
    ParallelPart: {
        **dict.fromkeys(("world_size", "attn_tp_size", "kvp_size", "cp_size", "dense_tp_size", "moe_tp_size"), _COUNT),
        **dict.fromkeys(("embed_tp_size", "lmhead_tp_size"), _COUNT),
        **dict.fromkeys(("attn_dp_size", "dp_size", "o_proj_tp_size", "moe_ep_size", "ep_size", "node_size"), _SIZE),
    },
    SchedulerPart: {
        **dict.fromkeys(("batch_size", "max_new_tokens", "block_size"), _COUNT),
        "max_prefill_tokens": _SIZE,
    },
}

# Key of the common records -> the key of the dialect that it is told as, and others that it follows from. In this order.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "standalone.parallel.ngram_embed_tp_size": ("model_config.custom_params.ngram_embed_tp_size",),
    "standalone.parallel.dp_size": (
        "parallel_config.attn_dp_size",
        "parallel_config.world_size",
        "parallel_config.dp_size",
    ),
    "standalone.parallel.ep_size": ("parallel_config.moe_ep_size", "parallel_config.world_size", "parallel_config.ep_size"),
    "standalone.parallel": ("parallel_config",),
    "standalone.engine.max_num_seqs": ("scheduler_config.batch_size",),
    "standalone.engine.max_num_batched_tokens": ("scheduler_config.max_prefill_tokens",),
    "standalone.engine.num_draft_tokens": ("model_config.next_n",),
    "standalone.engine.max_model_len": ("data_config.input_truncated_len", "scheduler_config.max_new_tokens"),
    "standalone.engine.exe_mode": ("model_config.exe_mode",),
    "standalone.engine.compile_cache": ("model_config.output_path",),
    "standalone.engine": ("scheduler_config",),
    "model.path": ("model_config.model_path",),
    "model.dtype": ("model_config.dtype",),
    "model.served_name": ("model_config.model_name",),
    "model.weights=random": ("model_config.with_ckpt=false",),
    "model.weights": ("model_config.with_ckpt",),
    "model": ("model_config",),
    "npu.is_moe_overlapped": ("model_config.custom_params.enable_moe_stream_overlap",),
    "npu.is_prefetched": ("model_config.custom_params.enable_prefetch",),
    **{f"npu.{ours}": (f"model_config.custom_params.{theirs}",) for theirs, ours in _SHARES.items()},
    "npu.soc": ("soc",),
}


class _OfflineFindings(Findings):
    """Findings of the common rules in the words of the dialect; its own rules name its own keys."""

    def add(self, path: str, text: str) -> None:
        super().add(_spellings(path)[0], in_dialect(text))

    def cross(self, paths: Sequence[str], text: str) -> None:
        super().cross([name for path in paths for name in _spellings(path)], in_dialect(text))

    def is_bad(self, path: str) -> bool:
        return any(super(_OfflineFindings, self).is_bad(name) for name in _spellings(path))


def _spellings(path: str) -> tuple[str, ...]:
    for ours, names in _KEYS.items():
        if path == ours or path.startswith(f"{ours}."):
            return tuple(name + path[len(ours) :] for name in names)
    return (path,)


def in_dialect(text: str) -> str:
    """A finding about the instance in the words of the dialect."""
    for ours, names in _KEYS.items():
        if "." in ours:
            text = text.replace(ours, names[0])
    return text


def load(path: str | Path, overrides: Sequence[str] = ()) -> OfflineRun:
    """What a file asks for.

    Args:
        path: the YAML. Relative paths in it start at its own folder.
        overrides: ``key.path=value``, laid over the file before validation; relative paths start at the current folder.

    Raises:
        ConfigError: one line for each finding, each with the path of the key.
    """
    found = _OfflineFindings()
    tree = read_tree(path, sections=SECTIONS)
    _anchor(tree, Path(path).absolute().parent)
    lay_overrides(tree, overrides, found)
    _anchor(tree, Path.cwd())
    read = Reader(found, _RANGES).record(OfflineFile, tree)
    parallel = _parallel(read, found)
    _check_model(read, found)
    _check_device(read, found)
    _check_data(read, found)
    cluster = complete(_cluster(read, parallel), found)
    return OfflineRun(
        instance=instance_spec(cluster, "offline"),
        model_name=read.model_config.model_name,
        data=read.data_config,
        batch_size=read.scheduler_config.batch_size,
        max_new_tokens=read.scheduler_config.max_new_tokens,
        keeps_compiled=read.model_config.enable_cache_compile,
        idle=tuple(_idle(tree, read)),
    )


def _anchor(tree: dict[str, object], folder: Path) -> None:
    data = tree.get("data_config")
    is_builtin = isinstance(data, dict) and data.get("dataset") == DEFAULT_DATASET
    anchor_paths(tree, _FILES[:2] if is_builtin else _FILES, folder)


def _idle(tree: dict[str, object], read: OfflineFile) -> Iterator[str]:
    """Settings of NPU that the file states, and does not switch off, for another device."""
    part, custom = tree.get("model_config"), read.model_config.custom_params
    stated = part.get("custom_params") if isinstance(part, dict) else None
    for name in _NPU_ONLY:
        value = vars(custom)[name]
        if read.device != "npu" and isinstance(stated, dict) and name in stated and value is not False:
            yield f"model_config.custom_params.{name}={str(value).lower()}"


def _parallel(read: OfflineFile, found: Findings) -> ParallelConfig:
    """The sizes as one instance has them; all 1 where one is wrong by itself or in a product, so nothing is said twice."""
    sizes, tables = read.parallel_config, read.model_config.custom_params.ngram_embed_tp_size
    dp = _either(sizes, ("attn_dp_size", "dp_size"), found) or sizes.world_size // sizes.attn_tp_size
    ep = _either(sizes, ("moe_ep_size", "ep_size"), found) or sizes.world_size // sizes.moe_tp_size
    _check_products(sizes, dp=dp, ep=ep, found=found)
    if sizes.o_proj_tp_size not in (0, sizes.attn_tp_size):
        keys = [f"parallel_config.{name}" for name in ("o_proj_tp_size", "attn_tp_size")]
        text = f"differs from {keys[1]}={sizes.attn_tp_size}, whose split it has; leave it out"
        found.cross(keys, f"{keys[0]}={sizes.o_proj_tp_size}: {text}")
    if any(found.is_bad(f"parallel_config.{name}") for name in vars(sizes)):
        return ParallelConfig()
    return ParallelConfig(
        dp_size=dp,
        cp_size=sizes.cp_size,
        kvp_size=sizes.kvp_size,
        attn_tp_size=sizes.attn_tp_size,
        dense_tp_size=sizes.dense_tp_size,
        moe_tp_size=sizes.moe_tp_size,
        ep_size=ep,
        embed_tp_size=sizes.embed_tp_size,
        lmhead_tp_size=sizes.lmhead_tp_size,
        ngram_embed_tp_size=tables,
        moe_dispatch=sizes.moe_dispatch,
        node_size=sizes.node_size,
    )


def _either(sizes: ParallelPart, names: tuple[str, str], found: Findings) -> int:
    """The size that has two spellings; 0 where neither is given."""
    first, second = (vars(sizes)[name] for name in names)
    if first and second and first != second:
        keys = [f"parallel_config.{name}" for name in names]
        _bad(found, keys, f"{keys[0]}={first}: differs from {keys[1]}={second}; both mean the same")
    return int(first or second)


def _check_products(sizes: ParallelPart, *, dp: int, ep: int, found: Findings) -> None:
    """What the attention is split over is the world; the experts' ranks divide it. A factor that was left out proves
    nothing, so then the other one is what is wrong."""
    world, section = sizes.world_size, "parallel_config"
    for name, given in (
        ("attn_tp_size", sizes.attn_dp_size or sizes.dp_size),
        ("moe_tp_size", sizes.moe_ep_size or sizes.ep_size),
    ):
        size: int = vars(sizes)[name]
        if not given and world % size:
            keys = [f"{section}.{name}", f"{section}.world_size"]
            _bad(found, keys, f"{keys[0]}={size}: does not divide world_size={world}")
    if sizes.attn_tp_size * dp != world:
        keys = [f"{section}.{name}" for name in ("world_size", "attn_tp_size", "attn_dp_size", "dp_size")]
        product = f"attn_tp_size {sizes.attn_tp_size} x attn_dp_size {dp} = {sizes.attn_tp_size * dp}"
        _bad(found, keys, f"{section}: {product}, but world_size={world}")
    experts = sizes.moe_tp_size * ep
    if not experts or world % experts:
        keys = [f"{section}.{name}" for name in ("moe_ep_size", "moe_tp_size", "ep_size", "world_size")]
        product = f"moe_tp_size {sizes.moe_tp_size} x moe_ep_size {ep} = {experts}"
        _bad(found, keys, f"{section}: {product} does not divide world_size={world}")


def _bad(found: Findings, keys: Sequence[str], text: str) -> None:
    """A disagreement after which the first key proves nothing any more; one of which a key is wrong already is dropped."""
    if not any(found.is_bad(key) for key in keys):
        found.add(keys[0], text)


def _check_model(read: OfflineFile, found: Findings) -> None:
    """That the checkpoint is what the name says, and long enough. One that cannot be read is told of by ``complete``."""
    part, key = read.model_config, "model_config.model_name"
    if found.is_bad("model_config.model_path"):
        return
    try:
        model = ModelConfig.load(part.model_path)
    except ConfigError:
        return
    has_tables = model.over_embedding is not None
    if has_tables != (part.model_name == "longcat_flash_lite"):
        there = "has n-gram tables" if has_tables else "has no n-gram tables"
        found.cross([key], f"{key}={part.model_name}: the checkpoint {part.model_path} {there}")
    length = read.data_config.input_truncated_len + read.scheduler_config.max_new_tokens
    if length > model.max_position_embeddings:
        keys = ["data_config.input_truncated_len", "scheduler_config.max_new_tokens"]
        text = f"with {keys[1]}={read.scheduler_config.max_new_tokens} that is {length} positions"
        text = f"{text}, the checkpoint has {model.max_position_embeddings}"
        found.cross(keys, f"{keys[0]}={read.data_config.input_truncated_len}: {text}")


def _check_device(read: OfflineFile, found: Findings) -> None:
    """What only another device has."""
    part, device = read.model_config, read.device
    for name in ("enable_moe_stream_overlap", "enable_prefetch"):
        if vars(part.custom_params)[name] and device != "npu":
            key = f"model_config.custom_params.{name}"
            found.cross([key, "device"], f"{key}=true: device={device} has nothing to switch on; leave it out")
    if part.enable_profiler:
        found.cross(["model_config.enable_profiler"], "model_config.enable_profiler=true: is not supported yet")


def _check_data(read: OfflineFile, found: Findings) -> None:
    dataset, key = read.data_config.dataset, "data_config.dataset"
    if dataset != DEFAULT_DATASET and not Path(dataset).is_file() and not found.is_bad(key):
        found.add(key, f"{key}={dataset}: no such file; a file of JSON lines with context and input, or {DEFAULT_DATASET}")


def _cluster(read: OfflineFile, parallel: ParallelConfig) -> ClusterConfig:
    """One engine with room for the whole batch at full length, and no more."""
    part, asked, batch = read.model_config, read.data_config, read.scheduler_config
    slots = max(batch.batch_size // parallel.dp_size, 1)
    length = asked.input_truncated_len + batch.max_new_tokens
    chunk = batch.max_prefill_tokens or -(-asked.input_truncated_len * slots // batch.block_size) * batch.block_size
    blocks = -(-(length + part.next_n) // batch.block_size)
    engine = EngineConfig(
        block_size=batch.block_size,
        max_model_len=length,
        max_num_seqs=batch.batch_size,
        max_num_batched_tokens=chunk,
        num_draft_tokens=part.next_n,
        exe_mode=part.exe_mode,
        buckets=() if part.exe_mode == "eager" else (slots,),
        compile_cache=part.output_path and str(Path(part.output_path) / "compile_cache"),
        num_blocks=1 + slots * -(-blocks // parallel.kvp_size),
        unfused=() if part.custom_params.enable_mla_prolog else ("prolog",),
        prefix_cache=False,  # a prompt that is asked twice is to be measured twice
    )
    instance = InstanceConfig(name="offline", http_port=PORT)
    weights: Literal["checkpoint", "random"] = "checkpoint" if part.with_ckpt else "random"
    return ClusterConfig(
        model=ModelSection(path=part.model_path, served_name=part.model_name, dtype=part.dtype, weights=weights),
        device=read.device,
        devices_per_node=parallel.world_size,
        standalone=PoolConfig(parallel=parallel, engine=engine, instances=(instance,)),
        npu={"npu": _npu(read)}.get(read.device, NpuConfig()),
    )


def _npu(read: OfflineFile) -> NpuConfig:
    custom = read.model_config.custom_params
    is_limited = custom.enable_limit_core_num
    return NpuConfig(
        soc=read.soc,
        is_moe_overlapped=custom.enable_moe_stream_overlap,
        moe_cube_cores=custom.moe_aic_num * is_limited,
        moe_vector_cores=custom.moe_aiv_num * is_limited,
        main_cube_cores=custom.main_aic_num * is_limited,
        main_vector_cores=custom.main_aiv_num * is_limited,
        is_prefetched=custom.enable_prefetch,
    )
