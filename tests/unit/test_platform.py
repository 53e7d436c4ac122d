"""parallel/platform.py: which kinds of devices there are, and what an NPU's software is told, by a stand-in that notes it.

That ranks use it shows integration/test_rank_process.py. Nothing here has run on a device.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longcat_pd.config.schema import HcclOptions
from longcat_pd.errors import ConfigError
from longcat_pd.parallel.hccl import hccl_config
from longcat_pd.parallel.platform import platform_of

NPU = platform_of("npu").runtime


class Options:
    """As ``ProcessGroupHCCL.Options``: what is read from the property is a copy."""

    def __init__(self) -> None:
        self._config: dict[str, object] = {}

    @property
    def hccl_config(self) -> dict[str, object]:
        return dict(self._config)

    @hccl_config.setter
    def hccl_config(self, config: dict[str, object]) -> None:
        self._config = dict(config)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A torch_npu with two devices; every call of it."""
    noted: list[tuple[object, ...]] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *args: (noted.append((name, *args)), result)[1]

    stream = SimpleNamespace(synchronize=note("stream.synchronize"))
    api = SimpleNamespace(
        device_count=note("device_count", 2),
        set_device=note("set_device"),
        config=SimpleNamespace(allow_internal_format=False),
        mem_get_info=note("mem_get_info", (3, 64)),
        synchronize=note("synchronize"),
        current_stream=note("current_stream", stream),
        Stream=note("Stream", stream),
        stream=note("stream"),
    )
    package: Any = ModuleType("torch_npu")

    class Pair:
        def __init__(self, *args: object) -> None:
            noted.append(("ProcessGroupHCCL", *args))

        def abort_hccl_comm(self, reason: str) -> None:
            noted.append(("abort_hccl_comm", reason))

    Pair.Options = Options  # type: ignore[attr-defined]
    package._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=Pair))
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(torch, "npu", api, raising=False)
    return noted


def test_cpu_talks_over_gloo_with_one_thread_a_rank() -> None:
    platform = platform_of("cpu")
    assert (platform.collective_backend, platform.collectives, platform.threads) == ("gloo", "pairwise", 1)
    assert platform.device(3) == torch.device("cpu")
    assert platform.runtime.memory() is None
    assert platform.runtime.group_options(HcclOptions(buffer_mb=1)) is None


def test_an_unknown_kind_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no such platform") as caught:
        platform_of("abacus")
    assert caught.value.param == "device"


def test_npu_talk_over_hccl_by_its_own_collectives() -> None:
    platform = platform_of("npu")
    assert (platform.collective_backend, platform.collectives, platform.scheduling_policy) == ("hccl", "native", None)
    assert (platform.torch_device, platform.is_indexed) == ("npu", True)


def test_npu_without_its_package_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(
        ConfigError, match=r"torch_npu \(2\.6\.0\.post5, 2\.7\.1\.post11, 2\.8\.0\.post5, 2\.9\.0 or later\)"
    ) as e:
        NPU.prepare(0)
    assert e.value.param == "device"


def test_a_rank_takes_its_device_and_allows_formats_of_the_matrix_unit(calls: list[tuple[object, ...]]) -> None:
    NPU.prepare(1)
    assert ("set_device", 1) in calls
    assert vars(torch)["npu"].config.allow_internal_format is True
    calls.clear()
    NPU.prepare_thread(1)
    assert calls == [("set_device", 1)]


def test_a_rank_without_a_device_is_told_how_many_there_are(calls: list[tuple[object, ...]]) -> None:
    with pytest.raises(ConfigError, match="rank 2 of the node has no device, 2 are visible"):
        NPU.prepare(2)
    assert ("set_device", 2) not in calls


def test_memory_and_waiting(calls: list[tuple[object, ...]]) -> None:
    assert NPU.memory() == (3, 64)
    NPU.synchronise()
    NPU.own_stream()
    NPU.wait_for_stream()
    names = [call[0] for call in calls]
    assert names == ["mem_get_info", "synchronize", "Stream", "stream", "current_stream", "stream.synchronize"]


def test_options_of_a_group_are_one_dictionary_assigned_whole(calls: list[tuple[object, ...]]) -> None:
    told = NPU.group_options(HcclOptions(buffer_mb=400, expansion_mode="aiv"))
    assert told.hccl_config == {"hccl_buffer_size": 400, "hccl_op_expansion_mode": 3}


def test_a_pair_of_a_lane_is_never_ended_by_a_watchdog(calls: list[tuple[object, ...]]) -> None:
    pair = NPU.make_pair("store", 1)
    (name, store, place, size, options) = calls[-1]
    assert (name, store, place, size) == ("ProcessGroupHCCL", "store", 1, 2)
    assert isinstance(options, Options) and vars(options)["_timeout"] == timedelta(days=1)
    NPU.abort(pair)
    assert calls[-1] == ("abort_hccl_comm", "the lane ends")


def test_the_communicators_name_is_asked_of_the_groups_backend() -> None:
    asked: list[object] = []

    class Backend:
        def get_hccl_comm_name(self, rank: int) -> str:
            asked.append(rank)
            return "comm-7"

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            asked.append(device)
            return Backend()

    device = torch.device  # "npu" is no name of a device where torch_npu is not there
    try:
        torch.device = lambda name: f"device {name}"  # type: ignore[assignment, misc, return-value]
        assert NPU.communicator(Group(), 5) == "comm-7"
    finally:
        torch.device = device  # type: ignore[misc]
    assert asked == ["device npu", 5]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (HcclOptions(), {}),
        (HcclOptions(buffer_mb=200), {"hccl_buffer_size": 200}),
        (HcclOptions(buffer_name="ring"), {"hccl_buffer_name": "ring"}),
        (HcclOptions(expansion_mode="host_ts"), {"hccl_op_expansion_mode": 1}),
        (HcclOptions(expansion_mode="aicpu"), {"hccl_op_expansion_mode": 2}),
        (HcclOptions(expansion_mode="aiv"), {"hccl_op_expansion_mode": 3}),
        (HcclOptions(expansion_mode="aiv_only"), {"hccl_op_expansion_mode": 4}),
        (HcclOptions(algorithm="level0:ring"), {"hccl_algo": "level0:ring"}),
        (HcclOptions(exec_timeout_s=60), {"hccl_exec_timeout": 60}),
        (HcclOptions(traffic_class=0), {"qos_traffic_class": 0}),
        (HcclOptions(service_level=4), {"qos_service_level": 4}),
    ],
)
def test_options_in_the_words_of_hccl(options: HcclOptions, told: dict[str, int | str]) -> None:
    assert hccl_config(options) == told
