"""What pods of each device need beside others. A table of facts; none of it was tried on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class PodDevice:
    """``resource``: what the device plugin hands out, one for each device of a node; "" where there is none.

    ``on_host_network``: pods have the addresses and ports of their machines. ``groups``: of the device files.
    ``host_paths``: of the driver, read only. ``assigned``: variables that say which devices, which is the plugin's to say.
    """

    resource: str = ""
    on_host_network: bool = False
    groups: tuple[int, ...] = ()
    host_paths: tuple[str, ...] = ()
    assigned: frozenset[str] = frozenset()


POD_DEVICES: Mapping[str, PodDevice] = MappingProxyType(
    {
        "cpu": PodDevice(),
        "cuda": PodDevice(resource="nvidia.com/gpu", assigned=frozenset({"CUDA_VISIBLE_DEVICES"})),
        "npu": PodDevice(
            resource="huawei.com/Ascend910",
            on_host_network=True,  # HCCL exchanges addresses of interfaces, and cards of several machines must reach them
            groups=(1000,),  # HwHiAiUser, as the driver's installer makes it
            host_paths=("/usr/local/Ascend/driver", "/etc/ascend_install.info", "/etc/hccn.conf"),
            assigned=frozenset({"ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"}),
        ),
    }
)
