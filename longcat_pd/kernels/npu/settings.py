"""What can be chosen about the operators of an NPU. Filled from the configuration by whoever builds a rank's model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuSettings:
    """One rank's.

    Attributes:
        dtype: the model's; fp32 is no type of these operators on a device.
        is_overlapped: experts run on a stream of their own beside the dense path. They have ``cube_cores`` and
            ``vector_cores`` then, the dense path ``main_cube_cores`` and ``main_vector_cores``; 0 sets no limit.
        is_prolog_fused: one operator makes the front of an attention, where its limits allow.
        is_prefetched: weights are brought to the second-level cache before they are needed.
        dispatch_algorithm: ``comm_alg`` of the fused pair: "", "fullmesh", "hierarchy", "fullmesh_v1", "fullmesh_v2".
        is_series_a3: Atlas A3, not A2: other limits of the fused pair.
    """

    dtype: torch.dtype = torch.bfloat16
    is_overlapped: bool = False
    cube_cores: int = 12
    vector_cores: int = 24
    main_cube_cores: int = 12
    main_vector_cores: int = 24
    is_prolog_fused: bool = True
    is_prefetched: bool = False
    dispatch_algorithm: str = ""
    is_series_a3: bool = False
