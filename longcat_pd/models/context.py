"""ModelContext: everything that a module of the model may know when it is built. Nothing else reaches a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.kernels.ops import Ops
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """One pipeline stage on one rank.

    ``layers`` are the decoder layers of this stage; the first stage embeds, the last has final norm and head. ``cache``
    holds the entries of those layers, and with ``has_draft`` those of the draft layer behind them. ``kv_access`` says which
    keys an attention can see: all of them in this rank's cache (local), all after an exchange over ``cp`` (gathered), or
    this rank's share over ``kvp`` (partitioned). ``int8`` has the names, without ``.weight``, of the tensors that the
    checkpoint stores as int8 with a scale. ``moe_dispatch`` says how rows come to experts that other ranks have. ``host``:
    where the rows of the n-gram tables are kept and looked up, apart from ``device``; None: there too.
    """

    config: ModelConfig
    ops: Ops
    mesh: Mesh
    cache: KVCache
    layers: range
    is_first: bool
    is_last: bool
    kv_access: Literal["local", "gathered", "partitioned"]
    dtype: torch.dtype
    device: torch.device
    int8: frozenset[str] = frozenset()
    moe_dispatch: str = "gather"
    host: torch.device | None = None
    has_draft: bool = False  # last stage only
