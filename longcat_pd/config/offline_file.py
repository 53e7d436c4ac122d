"""The sections of an offline YAML as frozen records. Data only: what they mean is ``offline.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_DATASET = "default"


@dataclass(frozen=True, kw_only=True)
class CustomParams:
    """Settings of this family alone. Without ``enable_mla_prolog`` the front of an attention is computed piece by piece.

    The other switches and the core shares are of NPU (``offline.py`` lists them); the shares count with the overlap only.
    """

    ngram_embed_tp_size: int = 0  # rows of the n-gram tables; 0: as embed_tp_size
    enable_mla_prolog: bool = False
    enable_moe_stream_overlap: bool = False
    enable_prefetch: bool = False
    enable_limit_core_num: bool = True
    moe_aic_num: int = 8
    moe_aiv_num: int = 16
    main_aic_num: int = 16
    main_aiv_num: int = 32


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Which checkpoint, and how a step is executed. ``output_path``: where compiled steps are kept, if they are."""

    model_name: Literal["longcat_flash", "longcat_flash_lite"]
    model_path: str
    output_path: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    exe_mode: Literal["eager", "ge_graph", "npugraph_ex", "inductor"] = "eager"
    with_ckpt: bool = True
    enable_cache_compile: bool = False
    enable_profiler: bool = False
    next_n: int = 0
    custom_params: CustomParams = field(default_factory=CustomParams)


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """What is asked. ``dataset``: "default", or a file of JSON lines with ``context`` and ``input``."""

    dataset: str = DEFAULT_DATASET
    input_truncated_len: int = 256


@dataclass(frozen=True, kw_only=True)
class ParallelPart:
    """Sizes; what is left out follows from ``world_size``. Of two spellings of one size either will do."""

    world_size: int = 1
    attn_tp_size: int = 1
    attn_dp_size: int = 0  # world_size / attn_tp_size
    dp_size: int = 0
    kvp_size: int = 1
    cp_size: int = 1
    dense_tp_size: int = 1
    o_proj_tp_size: int = 0  # as attn_tp_size, whose split it is
    moe_tp_size: int = 1
    moe_ep_size: int = 0  # world_size / moe_tp_size
    ep_size: int = 0
    embed_tp_size: int = 1
    lmhead_tp_size: int = 1
    moe_dispatch: Literal["gather", "all_to_all", "two_level", "fused"] = "gather"
    node_size: int = 0


@dataclass(frozen=True, kw_only=True)
class SchedulerPart:
    """How much at once. ``batch_size`` counts sequences of all groups, ``max_prefill_tokens`` tokens of one chunk."""

    batch_size: int = 1
    max_new_tokens: int = 32
    max_prefill_tokens: int = 0  # the prompts of a group, whole
    block_size: int = 128


@dataclass(frozen=True, kw_only=True)
class OfflineFile:
    """One YAML of the dialect, and the two keys that it has from us: ``device``, and for NPU ``soc``."""

    model_config: ModelPart
    data_config: DataPart = field(default_factory=DataPart)
    parallel_config: ParallelPart = field(default_factory=ParallelPart)
    scheduler_config: SchedulerPart = field(default_factory=SchedulerPart)
    device: Literal["cpu", "cuda", "npu"] = "npu"
    soc: Literal["A2", "A3"] = "A2"
