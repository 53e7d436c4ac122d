"""The entries of latent attention in the table of an NPU: which forms of them this process has."""

from __future__ import annotations

from dataclasses import replace

from longcat_pd.kernels.npu import attention, indexer, prolog, rotation
from longcat_pd.kernels.npu.operators import converts, found, has, require
from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.ops import Ops

_MOST_ELEMENTS = 1 << 62  # calls are cut inside of operators: those of this table make less than tiles are told


def with_attention(made: Ops, settings: NpuSettings, *, exe_mode: str) -> Ops:
    """The front of an attention, its keys, and the attention itself. Patched operators take the place of compositions."""
    require(*attention.OPERATORS, *prolog.OPERATORS, *rotation.OPERATORS, purpose="latent attention")
    sparse = found("custom::npu_sparse_flash_attention")
    merges = has("npu_attention_update") and (exe_mode != "ge_graph" or converts("npu_attention_update"))
    return replace(
        made,
        prepare_rotation=rotation.prepare_rotation,
        rotation=rotation.rotation,
        rope=rotation.rope,
        prepare_prolog=prolog.preparing_prolog(is_fused=settings.is_prolog_fused),
        mla_prolog=prolog.mla_prolog,
        mla_store=prolog.mla_store,
        select_positions=indexer.select_positions,
        index_candidates=indexer.index_candidates_with(found("custom::npu_lightning_indexer")),
        paged_attention=attention.paged_attention_with(attention.twin() if exe_mode == "ge_graph" else None),
        sparse_attention=attention.sparse_attention if sparse is None else attention.sparse_attention_of(sparse),
        merge_partials=attention.merge_partials_with(updates=merges),
        tile_elements=_MOST_ELEMENTS,
    )
