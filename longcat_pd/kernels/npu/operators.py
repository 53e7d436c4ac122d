"""Which operators this process has. Capabilities go by presence, never by a version: releases of one number differ.

A capability that needs more than the stock operators has a stock composition beside it, and whoever makes the table of
operators chooses once, by ``has``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from longcat_pd.kernels.refusal import Unsupported

NEWEST = "torch_npu 2.6.0.post5, 2.7.1.post11, 2.8.0.post5, or 2.9.0 and later"
_SINCE = {  # where nothing stands, every release since 2.4.0 has it
    "npu_mla_prolog_v3": NEWEST,
    "npu_lightning_indexer": NEWEST,
    "npu_quant_lightning_indexer": NEWEST,
    "npu_sparse_flash_attention": NEWEST,
    "npu_kv_quant_sparse_flash_attention": NEWEST,
    "npu_grouped_matmul_swiglu_quant_v2": NEWEST,
    "npu_fused_infer_attention_score_v2": "torch_npu 2.6.0.post3 and later",
    "npu_kv_rmsnorm_rope_cache_v2": "torch_npu 2.6.0.post3 and later",
    "npu_attention_update": "torch_npu 2.6.0.post3 and later",
    "npu_moe_distribute_dispatch_v2": "torch_npu 2.6.0.post3 and later (of 2.6.0 itself it knows no copy experts)",
    "npu_moe_distribute_combine_v2": "torch_npu 2.6.0.post3 and later (of 2.6.0 itself it knows no copy experts)",
    "npu_transpose_batchmatmul": "torch_npu 2.6.0 and later",
}
_PACKAGES = {
    "compute_n_gram_ids": "an operator package that adds it to the namespace npu",
}


def has(name: str) -> bool:
    """Whether ``torch.ops`` has the operator: of the namespace npu, or of another one as ``namespace::name``."""
    namespace, _, operator = name.rpartition("::")
    return hasattr(getattr(torch.ops, namespace or "npu"), operator)


def found(name: str) -> Callable[..., Any] | None:
    """The operator itself, or None."""
    namespace, _, operator = name.rpartition("::")
    packet: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace or "npu"), operator) if has(name) else None
    return packet


def converts(name: str) -> bool:
    """Whether torchair knows what becomes of it in a graph.

    It loads what it knows when it first needs it, which is too late for a table. Releases without that place have loaded
    all with themselves.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torchair")
        importlib.import_module("torchair._ge_concrete_graph.ge_converter.custom")
    packet: Any = found(name)
    return packet is not None and hasattr(packet.default, "_ge_converter")


def require(*names: str, purpose: str) -> None:
    """All of them have to be here.

    Raises:
        Unsupported: what is missing, for what it is needed, and who has it.
    """
    missing = [name for name in names if not has(name)]
    if missing:
        found = "; ".join(f"{name}: {_source(name)}" for name in missing)
        raise Unsupported(f"device=npu: {purpose} needs operators that are not here. {found}", param="device")


def _source(name: str) -> str:
    namespace, _, operator = name.rpartition("::")
    if namespace not in ("", "npu"):
        return f"an operator package with the namespace {namespace}"
    return _PACKAGES.get(operator) or _SINCE.get(operator, "every release of torch_npu since 2.4.0; is it imported?")
