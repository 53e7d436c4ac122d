"""The rules of a kind of device: which graphs it has, and what NPU ask of blocks, types, heads, cores and communicators.

Every rule adds findings and changes nothing. What a single operator cannot do is told by its wrapper (``kernels/npu``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from longcat_pd.config.layout_checks import SUPPORTED_DEVICES
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.reader import Findings, Range
from longcat_pd.config.schema import ClusterConfig, HcclConfig, HcclOptions, NpuConfig, PoolConfig, Role

GRAPHS: Mapping[str, tuple[str, ...]] = {"cpu": ("inductor",), "cuda": ("inductor",), "npu": ("ge_graph", "npugraph_ex")}
COMM_ALGS: Mapping[str, tuple[str, ...]] = {
    "A2": ("fullmesh", "hierarchy"),
    "A3": ("fullmesh_v1", "fullmesh_v2", "hierarchy"),
}
_CUBE_CORES, _VECTOR_CORES = 24, 48  # of the largest chip of both families
_BLOCK_STEP, _MAX_BLOCK = 16, 1024
_MAX_HEADS = 128
_MOST_TOLD = 2**31 - 1  # HCCL reads numbers of 32 bits, and complains when it builds the communicator

_BUFFERS: Mapping[str, int] = {"HCCL_BUFFSIZE": 1, "P2P_HCCL_BUFFSIZE": 0}  # in MB, and the least that can be said

NPU_RANGES: Mapping[type, Mapping[str, Range]] = {
    NpuConfig: {
        **dict.fromkeys(("moe_cube_cores", "main_cube_cores"), Range(0, _CUBE_CORES)),
        **dict.fromkeys(("moe_vector_cores", "main_vector_cores"), Range(0, _VECTOR_CORES)),
    },
    HcclOptions: {
        "buffer_mb": Range(1, _MOST_TOLD),
        "exec_timeout_s": Range(1, _MOST_TOLD),
        "traffic_class": Range(0, 255),
        "service_level": Range(0, 7),
    },
}


def check_device(config: ClusterConfig, pools: Mapping[Role, PoolConfig], *, found: Findings) -> None:
    """Everything that can be said without the checkpoint."""
    if config.device not in SUPPORTED_DEVICES:
        return
    for role, pool in pools.items():
        mode, key = pool.engine.exe_mode, f"{role}.engine.exe_mode"
        known = ("eager", *GRAPHS[config.device])
        if mode not in known:
            found.cross([key, "device"], f"{key}={mode}: device={config.device} has {', '.join(known)}")
    if config.device != "npu":
        for key, value in _changed(config.npu, NpuConfig(), "npu"):
            found.cross([key, "device"], f"{key}={value}: has no effect with device={config.device}; leave it out")
        return
    for role, pool in pools.items():
        _check_blocks(role, pool, found=found)
        if config.npu.is_moe_overlapped and pool.engine.exe_mode == "npugraph_ex":
            keys = ["npu.is_moe_overlapped", f"{role}.engine.exe_mode"]
            found.cross(keys, f"{keys[0]}=true: {keys[1]}=npugraph_ex captures one stream; use ge_graph or eager")
    _check_cores(config.npu, found=found)
    _check_communicators(config.npu, pools, found=found)
    _check_buffers("env", config.env, found=found)
    for role, pool in pools.items():
        _check_buffers(f"{role}.env", pool.env, found=found)
        for place, instance in enumerate(pool.instances):
            _check_buffers(f"{role}.instances[{place}].env", instance.env, found=found)


def check_device_fits(
    config: ClusterConfig, pools: Mapping[Role, PoolConfig], model: ModelConfig, *, found: Findings
) -> None:
    """What the device demands of the checkpoint. ``config`` is resolved."""
    if config.device != "npu":
        return
    if config.model.dtype != "bfloat16":
        text = "the operators of device=npu compute in 16 bits; use bfloat16"
        found.cross(["model.dtype", "device"], f"model.dtype={config.model.dtype}: {text}")
    for role, pool in pools.items():
        tp, key = pool.parallel.attn_tp_size, f"{role}.parallel.attn_tp_size"
        heads = model.num_attention_heads
        seen = heads if pool.parallel.kvp_size > 1 else heads // tp  # of all heads on every rank whose keys are a part
        if heads % tp == 0 and (seen > _MAX_HEADS or seen & (seen - 1)):
            text = f"attention on device=npu takes a power of two of heads, {_MAX_HEADS} at most; a rank has {seen}"
            found.cross([key, "device"], f"{key}={tp}: {text}")
        _check_captured(role, pool, model, found=found)


def _check_captured(role: Role, pool: PoolConfig, model: ModelConfig, *, found: Findings) -> None:
    """Dense attention takes lengths as lists, for which a captured stream would have to wait."""
    engine, key = pool.engine, f"{role}.engine.exe_mode"
    room = engine.max_model_len + engine.num_draft_tokens
    if engine.exe_mode == "npugraph_ex" and (model.indexer is None or room <= model.indexer.index_topk):
        topk = (
            "has no indexer" if model.indexer is None else f"picks among more than {model.indexer.index_topk} tokens only"
        )
        text = f"captures no dense attention, and this checkpoint {topk}; use ge_graph or eager"
        found.cross([key, f"{role}.engine.max_model_len"], f"{key}=npugraph_ex: {text}")


def _check_blocks(role: Role, pool: PoolConfig, *, found: Findings) -> None:
    engine = pool.engine
    key = f"{role}.engine.block_size"
    if engine.block_size % _BLOCK_STEP or engine.block_size > _MAX_BLOCK:
        text = f"must be a multiple of {_BLOCK_STEP}, {_MAX_BLOCK} at most, with device=npu; 128 is usual"
        found.cross([key, "device"], f"{key}={engine.block_size}: {text}")
    others = [part for part in engine.unfused if part != "prolog"]
    if others:
        key = f"{role}.engine.unfused"
        found.cross([key, "device"], f"{key}={others}: with device=npu only prolog has a slow twin")
    key = f"{role}.engine.num_blocks"
    if not engine.num_blocks:
        text = "must be given with device=npu, whose memory is not known here"
        found.cross([key, "device"], f"{key}: {text}")


def _check_cores(npu: NpuConfig, *, found: Findings) -> None:
    """Both sides at once have no more cores than there are."""
    for kind, whole in (("cube", _CUBE_CORES), ("vector", _VECTOR_CORES)):
        keys = [f"npu.{side}_{kind}_cores" for side in ("moe", "main")]
        moe, main = (vars(npu)[key.removeprefix("npu.")] for key in keys)
        if moe + main > whole:
            text = f"with {keys[1]}={main} that is {moe + main}, of {whole} {kind} cores"
            found.cross(keys, f"{keys[0]}={moe}: {text}")


def _check_communicators(npu: NpuConfig, pools: Mapping[Role, PoolConfig], *, found: Findings) -> None:
    key = "npu.comm_alg"
    if npu.comm_alg and npu.comm_alg not in COMM_ALGS[npu.soc]:
        known = ", ".join(COMM_ALGS[npu.soc])
        found.cross([key, "npu.soc"], f"{key}={npu.comm_alg}: npu.soc={npu.soc} has {known}")
    elif npu.comm_alg and all(pool.parallel.moe_dispatch != "fused" for pool in pools.values()):
        found.cross([key], f"{key}={npu.comm_alg}: has no effect without moe_dispatch=fused")
    for axis in dataclasses.fields(HcclConfig):
        options: HcclOptions = vars(npu.hccl)[axis.name]
        key = f"npu.hccl.{axis.name}.buffer_mb"
        if options.buffer_mb is not None and npu.soc == "A2":
            text = "npu.soc=A2 has one size for all groups; set HCCL_BUFFSIZE in env"
            found.cross([key, "npu.soc"], f"{key}={options.buffer_mb}: {text}")
        elif options != HcclOptions() and not any(_has_group(pool, axis.name) for pool in pools.values()):
            key = f"npu.hccl.{axis.name}"
            found.cross([key], f"{key}: has no effect, no pool has a group of this axis")


def _check_buffers(section: str, env: Mapping[str, str], *, found: Findings) -> None:
    """Sizes that the plan counts with, as the libraries read them."""
    for name, least in _BUFFERS.items():
        text = env.get(name, str(least))
        digits = len(str(_MOST_TOLD))
        if not (text.isascii() and text.isdecimal() and len(text) <= digits and least <= int(text) <= _MOST_TOLD):
            key = f"{section}.{name}"
            found.cross([key], f"{key}={text[:20]}: must be a whole number of MB, from {least} to {_MOST_TOLD}")


def _has_group(pool: PoolConfig, axis: str) -> bool:
    """Whether ranks talk along it."""
    parallel = pool.parallel
    if axis == "fused":
        return parallel.moe_dispatch == "fused" and parallel.ep_size > 1
    if axis in ("node", "local"):
        return parallel.moe_dispatch == "two_level" and parallel.ep_size > 1
    sizes = vars(parallel)
    of_tables = axis == "ngram_embed_tp" and not sizes["ngram_embed_tp_size"]  # then they are spread like words
    return bool(sizes["embed_tp_size" if of_tables else f"{axis}_size"] > 1)


def _changed(record: Any, usual: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The settings that are not as usual."""
    for name, value in vars(record).items():
        if dataclasses.is_dataclass(value):
            yield from _changed(value, vars(usual)[name], f"{path}.{name}")
        elif value != vars(usual)[name]:
            yield f"{path}.{name}", value
