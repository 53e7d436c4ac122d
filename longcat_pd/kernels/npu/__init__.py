"""The table of operators of an Ascend NPU: the reference table with entries that call ``torch.ops.npu``.

Whoever builds a rank's platform has imported torch_npu; nothing here does. What an operator refuses and its schema does not
say is checked here.
"""

from __future__ import annotations

from dataclasses import replace

from longcat_pd.kernels.npu import int8, ngram, norms, weights
from longcat_pd.kernels.npu.latent import with_attention
from longcat_pd.kernels.npu.mixture import with_experts
from longcat_pd.kernels.npu.operators import has, require
from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import table as reference

__all__ = ["NpuSettings", "table"]


def table(settings: NpuSettings, *, exe_mode: str) -> Ops:
    """The operators of one rank; ``exe_mode``: how the decode step is executed, which some entries have forms for.

    Raises:
        Unsupported: operators are missing that have no stand-in.
    """
    made = _with_rows(reference())
    return with_experts(with_attention(made, settings, exe_mode=exe_mode), settings)


def _with_rows(made: Ops) -> Ops:
    """Norms, and products of rows."""
    require(*norms.OPERATORS, *int8.OPERATORS, *weights.OPERATORS, purpose="every model")
    return replace(
        made,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        layer_norm=norms.layer_norm,
        swiglu=norms.swiglu,
        linear=weights.linear,
        linear_int8=int8.linear_int8,
        head_linear=weights.head_linear,
        store=weights.store,
        ngram_ids=ngram.ngram_ids_in_one if has(ngram.OPERATOR) else ngram.ngram_ids,
    )
