"""What differs between kinds of devices for a rank process: one record for each kind. Knows no models and no layouts."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from longcat_pd.config.schema import HcclOptions, RankSpec
from longcat_pd.errors import ConfigError
from longcat_pd.parallel.cores import bind_to_cores
from longcat_pd.parallel.hccl import hccl_config

_NPU_RELEASES = "2.6.0.post5, 2.7.1.post11, 2.8.0.post5, 2.9.0 or later"
_PAIR_LIMIT = timedelta(days=1)
_TORCH: Any = torch  # whose own types do not know what torch_npu adds


class Runtime(Protocol):
    """The software of a kind of device. ``prepare`` comes first, on the thread that computes."""

    def prepare(self, index: int) -> None:
        """This process works on device ``index`` of those that it sees.

        Raises:
            ConfigError: there is none, or no software for it.
        """
        ...

    def prepare_thread(self, index: int) -> None:
        """So does this thread, which another one started."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """Bytes of the device that are free, and all; None where ranks share the machine's."""
        ...

    def synchronise(self) -> None:
        """Waits for everything that was started on the device. Errors of operators come up here (RuntimeError)."""
        ...

    def own_stream(self) -> AbstractContextManager[Any]:
        """What is started inside does not wait for what the rank computes."""
        ...

    def wait_for_stream(self) -> None:
        """Waits for what was started on the stream of this thread, inside ``own_stream``."""
        ...

    def group_options(self, options: HcclOptions) -> Any:
        """What ``new_group`` is told of a group; None: nothing."""
        ...

    def communicator(self, group: Any, rank: int) -> str:
        """The name by which operators find the group. Builds its communicator. ``rank``: this one's place in it."""
        ...

    def make_pair(self, store: Any, place: int) -> Any:
        """A group of two ranks for messages, apart from all others. None: hosts reach each other as well as devices do.

        Nothing on it ends by itself; who waits for it ends it (``abort``). ``store``: where both ends meet.
        """
        ...

    def abort(self, group: Any) -> None:
        """Ends a group of ``make_pair``, and every wait for it; from any thread. RuntimeError: it was broken before."""
        ...


class HostRuntime:
    """Ranks are processes of the machine's processor."""

    def prepare(self, index: int) -> None:
        """Nothing is to be chosen."""

    def prepare_thread(self, index: int) -> None:
        """Nothing is to be chosen."""

    def memory(self) -> tuple[int, int] | None:
        """Shared by all."""
        return None

    def synchronise(self) -> None:
        """Everything is done when it returns."""

    def own_stream(self) -> AbstractContextManager[Any]:
        """There are none."""
        return nullcontext()

    def wait_for_stream(self) -> None:
        """There are none."""

    def group_options(self, options: HcclOptions) -> Any:
        """gloo has none."""
        return None

    def communicator(self, group: Any, rank: int) -> str:
        """The group's own name, by which torch finds it."""
        return str(group.group_name)

    def make_pair(self, store: Any, place: int) -> Any:
        """See Runtime."""
        return None

    def abort(self, group: Any) -> None:
        """There are none."""


class NpuRuntime:
    """Ascend. Needs CANN and torch_npu, which replaces parts of torch when it is imported: in rank processes only.

    Whether the installed release has the operators is seen when the table of operators is made.
    """

    def prepare(self, index: int) -> None:
        """See Runtime. Which cards are seen at all says ASCEND_RT_VISIBLE_DEVICES."""
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            text = f"device=npu: needs the package torch_npu ({_NPU_RELEASES}) and CANN, whose set_env.sh was sourced"
            raise ConfigError(f"{text}; importing it failed: {error}", param="device") from error
        count = self._api.device_count()
        if index >= count:
            raise ConfigError(f"device=npu: rank {index} of the node has no device, {count} are visible", param="device")
        self._api.set_device(index)
        self._api.config.allow_internal_format = True  # else a cast to the format of the matrix unit does nothing

    def prepare_thread(self, index: int) -> None:
        """See Runtime."""
        self._api.set_device(index)

    def memory(self) -> tuple[int, int] | None:
        """See Runtime."""
        free, total = self._api.mem_get_info()
        return int(free), int(total)

    def synchronise(self) -> None:
        """See Runtime."""
        self._api.synchronize()

    def own_stream(self) -> AbstractContextManager[Any]:
        """See Runtime."""
        stream: AbstractContextManager[Any] = self._api.stream(self._api.Stream())
        return stream

    def wait_for_stream(self) -> None:
        """See Runtime."""
        self._api.current_stream().synchronize()

    def group_options(self, options: HcclOptions) -> Any:
        """See Runtime."""
        told = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL.Options()
        told.hccl_config = hccl_config(options)  # whole: the property gives away copies, in which a change is lost
        return told

    def communicator(self, group: Any, rank: int) -> str:
        """See Runtime."""
        return str(group._get_backend(torch.device("npu")).get_hccl_comm_name(rank))

    def make_pair(self, store: Any, place: int) -> Any:
        """See Runtime."""
        kind = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL
        options = kind.Options()
        options._timeout = _PAIR_LIMIT  # after which a watchdog of torch_npu would end the process
        return kind(store, place, 2, options)

    def abort(self, group: Any) -> None:
        """See Runtime."""
        group.abort_hccl_comm("the lane ends")

    @property
    def _api(self) -> Any:
        """There once torch_npu is imported."""
        return _TORCH.npu


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device.

    Attributes:
        kind: name in the configuration.
        torch_device: name of the torch device.
        is_indexed: whether ranks of a node have devices of their own.
        collective_backend: backend of torch.distributed.
        is_joined_at_once: whether all pairs of a group are connected when it has been made, and nobody calls later.
        collectives: how collectives are carried out (``collectives.COLLECTIVES``).
        runtime: the device's software.
        scheduling_policy: policy of ``os.sched_setscheduler`` for rank processes; None leaves the default. On CPU it is
            SCHED_BATCH: gloo's spinning IO thread otherwise starves the thread that holds its lock for a scheduler tick,
            which makes small collectives of ranks that outnumber the cores 2.5 to 5 times slower.
        threads: torch threads of a rank; None leaves torch's choice.
        join_limit_s: until all ranks of an instance, which are started together, have come to the rendezvous.
        collective_limit_s: how long a rank waits for the others at least, before a collective is given up: graphs are tried
            once before serving, and ranks compile them for minutes, not all equally long. While serving the driver judges.
    """

    kind: str
    torch_device: str
    is_indexed: bool
    collective_backend: str
    collectives: str
    runtime: Runtime
    is_joined_at_once: bool = False
    scheduling_policy: int | None = None
    threads: int | None = None
    join_limit_s: float = 20.0
    collective_limit_s: float = 0.0

    def device(self, index: int) -> torch.device:
        """Of the rank at place ``index`` of its node."""
        return torch.device(self.torch_device, index) if self.is_indexed else torch.device(self.torch_device)

    def prepare_rank(self) -> None:
        """First act of a rank process; threads that start later inherit it. Needs no privilege."""
        if self.scheduling_policy is not None:
            os.sched_setscheduler(0, self.scheduling_policy, os.sched_param(0))
        if self.threads is not None:
            torch.set_num_threads(self.threads)


_PLATFORMS = {
    "cpu": Platform(
        kind="cpu",
        torch_device="cpu",
        is_indexed=False,
        collective_backend="gloo",
        collectives="pairwise",
        runtime=HostRuntime(),
        is_joined_at_once=True,
        scheduling_policy=os.SCHED_BATCH,
        threads=1,
    ),
    "npu": Platform(
        kind="npu",
        torch_device="npu",
        is_indexed=True,
        collective_backend="hccl",
        collectives="native",
        runtime=NpuRuntime(),
        join_limit_s=300.0,  # CANN and torch_npu are read first, by all ranks of a node at once
        collective_limit_s=1800.0,
    ),
}


def platform_of(device: str) -> Platform:
    """The record of a device kind. Raises ConfigError for a kind without one."""
    if device not in _PLATFORMS:
        raise ConfigError(f"device {device}: no such platform, one of {', '.join(_PLATFORMS)}", param="device")
    return _PLATFORMS[device]


def take_place(spec: RankSpec) -> None:
    """Give this process the cores and the device of its rank. On the thread that computes. Raises ConfigError."""
    bind_to_cores(spec)  # before the software of the device, whose threads inherit it
    platform_of(spec.instance.device).runtime.prepare(spec.local_rank)
