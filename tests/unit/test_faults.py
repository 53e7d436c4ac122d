"""Fault switches: which there are, what they take, and when they strike."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from longcat_pd.faults import RECORDS, SWITCHES, Fault, FaultOrder, FaultRefused, Switches, read_fault, spin, stand_still
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.wire import Codec

VALUES = {"seconds": 2.5, "record": "Grant", "after": 2, "times": 3, "layer": 1, "rank": 1}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_takes_what_it_needs_and_may_be_given(name: str) -> None:
    switch = SWITCHES[name]
    least = {key: VALUES[key] for key in switch.needs}
    assert read_fault({"name": name, **least}) == Fault(name=name, **least)  # type: ignore[arg-type]
    most = {key: VALUES[key] for key in (*switch.needs, *switch.takes)}
    assert read_fault({"name": name, **most}).told() == {"name": name, **most}
    for key in VALUES.keys() - most.keys() - ({"rank"} if switch.where != "control" else set()):
        with pytest.raises(FaultRefused, match=f"{key}: {name} takes only"):
            read_fault({"name": name, **most, key: VALUES[key]})
    for key in switch.needs:
        with pytest.raises(FaultRefused, match=f"{name} needs {key}"):
            read_fault({"name": name, **{k: v for k, v in most.items() if k != key}})


@pytest.mark.parametrize(
    "told, said",
    [
        ({}, "name = None is no switch; known: slow_step, "),
        ({"name": ["spin"]}, "is no switch"),
        ({"name": "slow_step", "seconds": 0}, "seconds = 0: must be above 0"),
        ({"name": "slow_step", "seconds": -1}, "seconds = -1 is not a number from 0 to 86400"),
        ({"name": "slow_step", "seconds": float("nan")}, "seconds = nan is not a number"),
        ({"name": "slow_step", "seconds": True}, "seconds = True is not a number"),
        ({"name": "spin", "after": 1.5}, "after = 1.5 is not a number from 0"),
        ({"name": "spin", "rank": "1"}, "rank = '1' is not a number"),
        ({"name": "drop_record", "record": "Hallo"}, "record = 'Hallo' is not one of Hello, Beat, "),
        ({"name": "drop_record", "record": {}}, "record = {} is not one of"),
        ({"name": "lane_alter", "layer": None}, "layer = None is not a number"),
        (
            {"name": "slow_step", "after": -1, "layer": 3},
            "needs seconds\nlayer: slow_step takes .*\nafter = -1 is not",
        ),
    ],
)
def test_what_is_wrong_is_told_all_at_once(told: dict[str, Any], said: str) -> None:
    with pytest.raises(FaultRefused, match=said):
        read_fault(told)


def test_records_are_those_of_the_control_sockets() -> None:
    assert {tag.decode() for tag in CONTROL._decoders} == set(RECORDS)


def test_an_order_travels() -> None:
    codec: Codec[FaultOrder] = Codec(FaultOrder)
    for order in (FaultOrder(fault=Fault(name="spin", rank=1, after=2)), FaultOrder(clear="spin"), FaultOrder()):
        assert codec.decode(codec.encode(order)) == order


def test_an_occasion_counts_once() -> None:
    struck: list[Fault] = []
    switches, fault = Switches(struck.append), Fault(name="slow_step", seconds=1.0, after=2, times=2)
    switches.obey(FaultOrder(fault=fault))
    assert [switches.strike("slow_step") for _ in range(6)] == [None, None, fault, fault, None, None]
    assert struck == [fault, fault] and switches.listed() == ()
    switches.set(Fault(name="slow_step", seconds=1.0, times=0))
    assert all(switches.strike("slow_step") for _ in range(50))
    assert switches.strike("spin") is None


def test_a_fault_fits_its_layer_and_its_record() -> None:
    switches = Switches()
    switches.set(Fault(name="lane_alter", layer=1))
    assert switches.strike("lane_alter", layer=0) is None and switches.strike("lane_alter", layer=1) is not None
    switches.set(Fault(name="lane_alter"))
    assert switches.strike("lane_alter", layer=7) is not None
    switches.set(Fault(name="drop_record", record="Grant", after=1))
    assert [switches.strike("drop_record", record=name) for name in ("Offer", "Grant", "Offer")] == [None, None, None]
    assert switches.strike("drop_record", record="Grant") is not None


def test_what_is_cleared_strikes_no_more() -> None:
    switches = Switches()
    for name in ("spin", "endless_step"):
        switches.set(Fault(name=name))
    switches.obey(FaultOrder(clear="spin"))
    assert [fault.name for fault in switches.listed()] == ["endless_step"]
    assert switches.strike("spin") is None
    switches.obey(FaultOrder())
    assert switches.listed() == () and switches.strike("endless_step") is None


def test_a_switch_that_stays_ends_by_its_time_by_clearing_or_by_another_reason() -> None:
    switches, began = Switches(), time.monotonic()
    assert switches.wait_while("lane_stall", 60.0), "it is not on"
    switches.set(Fault(name="lane_stall", seconds=0.2))
    assert switches.is_on("lane_stall") and switches.listed()
    assert switches.wait_while("lane_stall", 60.0) and time.monotonic() - began >= 0.2
    assert not switches.is_on("lane_stall") and switches.listed() == ()
    switches.set(Fault(name="lane_stall"))
    assert not switches.wait_while("lane_stall", 0.05), "the limit was over first"
    for end in (switches.clear, switches.notify):
        switches.set(Fault(name="lane_stall"))
        is_closed = threading.Event()
        waiting = threading.Thread(
            target=switches.wait_while, args=("lane_stall", 60.0), kwargs={"until": is_closed.is_set}
        )
        waiting.start()
        is_closed.set() if end == switches.notify else None
        end()
        waiting.join(30.0)
        assert not waiting.is_alive()


def test_time_passes() -> None:
    for wait in (stand_still, spin):
        began = time.monotonic()
        wait(0.1)
        assert time.monotonic() - began >= 0.1
