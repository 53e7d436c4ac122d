"""kv_transfer/device_pair.py with a scripted group: order of calls, what is read back, deadlines, ends by other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from longcat_pd.kv_transfer.device_pair import SOURCE, TARGET, DevicePair, carriers_of
from longcat_pd.kv_transfer.frames import Header, encode_header
from longcat_pd.kv_transfer.process_group import HOST_BYTES, GlooLane
from longcat_pd.kv_transfer.transport import LaneClosed, LaneTimeout
from longcat_pd.parallel.platform import HostRuntime, platform_of

CPU = torch.device("cpu")
LARGE = torch.arange(HOST_BYTES // 8 + 1)


class Script:
    """What was called, in order. ``is_stuck``: waits last until the group is aborted, and so does posting a send if it
    ``is_waiting``. ``incoming``: what receives are given."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.is_stuck = False
        self.is_waiting = False
        self.is_broken = False
        self.aborted = threading.Event()
        self.incoming = [torch.zeros(1, dtype=torch.uint8)]


class Work:
    def __init__(self, script: Script, name: str) -> None:
        self._script, self._name = script, name

    def wait(self, *limit: object) -> None:
        self._script.calls.append(("wait", self._name))
        if self._script.is_broken:
            raise RuntimeError("the link is down\nwith a trace")


class Group:
    """``name`` tells its calls from another's."""

    def __init__(self, script: Script, name: str = "device") -> None:
        self._script, self._name = script, name

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self._script.calls.append((f"{self._name}.send", tensors[0].numel(), to))
        if self._script.is_waiting:
            assert self._script.aborted.wait(60.0), "nobody ended it"
        return Work(self._script, self._name)

    def recv(self, tensors: list[torch.Tensor], frm: int, tag: int) -> Work:
        self._script.calls.append((f"{self._name}.recv", tensors[0].numel(), frm))
        if self._script.incoming:
            tensors[0].copy_(self._script.incoming.pop(0))
        return Work(self._script, self._name)


class ScriptedRuntime(HostRuntime):
    def __init__(self, script: Script) -> None:
        self._script = script

    def prepare_thread(self, index: int) -> None:
        self._script.calls.append(("prepare_thread", index))

    def make_pair(self, store: Any, place: int) -> Any:
        self._script.calls.append(("make_pair", place))
        return Group(self._script)

    def own_stream(self) -> AbstractContextManager[Any]:
        script = self._script

        class Stream:
            def __enter__(self) -> None:
                script.calls.append(("enter",))

            def __exit__(self, *error: object) -> None:
                script.calls.append(("leave",))

        return Stream()

    def wait_for_stream(self) -> None:
        self._script.calls.append(("wait_for_stream",))
        if self._script.is_stuck:
            assert self._script.aborted.wait(60.0), "nobody ended it"

    def abort(self, group: Any) -> None:
        self._script.calls.append(("abort",))
        self._script.aborted.set()


@pytest.fixture
def script() -> Script:
    return Script()


def pair(script: Script, me: int, timeout_s: float = 5.0) -> DevicePair:
    made = DevicePair(Group(script), me, ScriptedRuntime(script), CPU, timeout_s)
    script.calls.clear()
    return made


def test_a_pair_is_built_with_its_connection_on_the_thread_of_its_lane(script: Script) -> None:
    for me, name in ((SOURCE, "device.send"), (TARGET, "device.recv")):
        script.calls.clear()
        platform = replace(platform_of("cpu"), runtime=ScriptedRuntime(script))
        assert carriers_of(platform, 3)(object(), me, 1.0) is not None
        assert script.calls[:2] == [("prepare_thread", 3), ("make_pair", me)]
        assert (name, 1, 1 - me) in script.calls
        assert script.calls[-2:] == [("wait_for_stream",), ("leave",)]


def test_hosts_need_no_carrier() -> None:
    assert carriers_of(platform_of("cpu"), 0)(object(), SOURCE, 1.0) is None


def test_a_header_goes_from_host_to_host_before_its_body_and_both_are_drained(script: Script) -> None:
    lane = GlooLane(Group(script, "host"), SOURCE, pair(script, SOURCE))
    lane.send([encode_header(Header(7, is_end=False)), LARGE])
    lane.drain(5.0)
    assert [call for call in script.calls if call[0] not in ("enter", "leave")] == [
        ("host.send", 8, TARGET),
        ("device.send", LARGE.numel(), TARGET),
        ("wait", "host"),
        ("wait", "device"),
        ("wait_for_stream",),
    ]
    place = script.calls.index(("device.send", LARGE.numel(), TARGET))
    assert (script.calls[place - 1], script.calls[place + 1]) == (("enter",), ("leave",)), "not on the stream of the rank"


def test_a_receive_is_posted_on_the_device_only_for_a_body(script: Script) -> None:
    lane = GlooLane(Group(script, "host"), TARGET, pair(script, TARGET))
    head = encode_header(Header(7, is_end=False, num_items=1, body_bytes=LARGE.nbytes))
    script.incoming = [head, LARGE]
    got, body = torch.empty_like(head), torch.empty_like(LARGE)
    lane.receive_into(got, None)  # however long it takes
    assert [call[0] for call in script.calls] == ["host.recv", "wait"]
    lane.receive_into(body, 5.0)
    assert torch.equal(got, head)
    assert torch.equal(body, LARGE)
    assert script.calls[-4:] == [
        ("device.recv", LARGE.numel(), SOURCE),
        ("wait", "device"),
        ("wait_for_stream",),
        ("leave",),
    ]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize("me", [SOURCE, TARGET])
def test_what_takes_too_long_ends_the_pair(script: Script, me: int) -> None:
    made = pair(script, me)
    script.is_stuck, script.incoming = True, [LARGE]
    tensor = torch.zeros_like(LARGE)
    with within(20.0), pytest.raises(LaneTimeout, match=r"nothing moved within 0\.05 s"):
        if me == SOURCE:
            made.send(LARGE)
            made.drain(0.05)
        else:
            made.receive_into(tensor, 0.05)
    assert script.calls.count(("abort",)) == 1
    assert not tensor.any(), "what a group leaves behind that was ended is no tensor"
    with pytest.raises(LaneTimeout):
        made.send(LARGE)


def test_a_close_ends_a_wait_of_the_lanes_thread(script: Script) -> None:
    made = pair(script, TARGET)
    script.is_stuck, script.incoming = True, [LARGE]
    closer = threading.Timer(0.05, made.close)
    closer.start()
    with within(20.0), pytest.raises(LaneClosed, match="the lane is closed"):
        made.receive_into(torch.zeros_like(LARGE), 30.0)
    closer.join()
    made.close()
    assert script.calls.count(("abort",)) == 1
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(20.0)
        assert not timer.is_alive(), "the deadline goes on"


@pytest.mark.parametrize("me", [SOURCE, TARGET])
def test_a_pair_that_was_ended_asks_its_group_nothing_more(script: Script, me: int) -> None:
    made = pair(script, me)
    made.close()
    script.calls.clear()
    for call in (lambda: made.send(LARGE), lambda: made.drain(5.0), lambda: made.receive_into(LARGE.clone(), 5.0)):
        with pytest.raises(LaneClosed, match="the lane is closed"):
            call()
    assert not script.calls


def test_a_link_that_breaks_is_a_closed_lane(script: Script) -> None:
    made = pair(script, SOURCE)
    made.send(LARGE)
    script.is_broken = True
    with pytest.raises(LaneClosed, match=r"^the link is down$"):
        made.drain(5.0)
    assert not script.aborted.is_set(), "its owner closes it"


def test_a_peer_that_never_comes_is_a_time_out(script: Script) -> None:
    script.is_stuck = True
    with within(20.0), pytest.raises(LaneTimeout):
        DevicePair(Group(script), TARGET, ScriptedRuntime(script), CPU, 0.05)


def test_a_send_that_waits_for_its_peer_is_a_time_out(script: Script) -> None:
    script.is_waiting = True
    with within(20.0), pytest.raises(LaneTimeout, match=r"nothing moved within 0\.05 s"):
        DevicePair(Group(script), SOURCE, ScriptedRuntime(script), CPU, 0.05)


@pytest.mark.parametrize("me", [SOURCE, TARGET])
def test_a_pair_that_cannot_be_built_leaves_nothing(script: Script, me: int) -> None:
    script.is_broken = True
    with pytest.raises(LaneClosed, match=r"^the link is down$"):
        DevicePair(Group(script), me, ScriptedRuntime(script), CPU, 5.0)
    assert script.calls.count(("abort",)) == 1


def test_closing_a_lane_ends_its_carrier(script: Script) -> None:
    GlooLane(Group(script, "host"), SOURCE, pair(script, SOURCE)).close()
    assert script.calls[0] == ("abort",)
