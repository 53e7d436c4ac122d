"""The options of an HCCL process group, as the dictionary that it is told. Knows neither torch nor groups.

HCCL takes unknown keys silently and looks at types when it builds the communicator, so what is told is made here, from
settings that were checked, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

from longcat_pd.config.schema import HcclOptions

_EXPANSION_MODES: Mapping[str, int] = {"default": 0, "host_ts": 1, "aicpu": 2, "aiv": 3, "aiv_only": 4}


def hccl_config(options: HcclOptions) -> dict[str, int | str]:
    """Keys and values in HCCL's words; empty where everything is left to it."""
    told: dict[str, int | str] = {}
    if options.buffer_mb is not None:
        told["hccl_buffer_size"] = options.buffer_mb
    if options.buffer_name:
        told["hccl_buffer_name"] = options.buffer_name
    if options.expansion_mode != "default":
        told["hccl_op_expansion_mode"] = _EXPANSION_MODES[options.expansion_mode]
    if options.algorithm:
        told["hccl_algo"] = options.algorithm
    if options.exec_timeout_s is not None:
        told["hccl_exec_timeout"] = options.exec_timeout_s
    if options.traffic_class is not None:
        told["qos_traffic_class"] = options.traffic_class
    if options.service_level is not None:
        told["qos_service_level"] = options.service_level
    return told
