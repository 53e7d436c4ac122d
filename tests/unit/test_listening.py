"""parallel/listening.py: what began to listen is found, and hears nobody after it has served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.parallel import listening
from longcat_pd.parallel.listening import Listeners, store_server

REACHED_S = 0.3  # on this machine a connection that is taken is there at once


@pytest.fixture
def serving() -> Iterator[list[socket.socket]]:
    """Sockets that a test opens."""
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def listen() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen(8)
    found.settimeout(5.0)
    return found


def reaches(listener: socket.socket) -> bool:
    with socket.socket() as caller:
        caller.settimeout(REACHED_S)
        try:
            caller.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


def test_who_has_served_hears_nobody_new_and_those_it_has_taken_go_on(serving: list[socket.socket]) -> None:
    older, listeners = listen(), Listeners()
    listeners.begin()
    newer = listen()
    listeners.note()
    later = listen()
    serving += [older, newer, later]
    calling = socket.create_connection(newer.getsockname(), timeout=5.0)
    taken, _ = newer.accept()
    serving += [calling, taken]
    listeners.deafen("a test")
    assert [reaches(each) for each in (older, newer, later)] == [True, False, True]
    for number in range(100):  # the filter is the listener's alone
        calling.sendall(bytes([number]) * 1000)
        assert len(taken.recv(1000, socket.MSG_WAITALL)) == 1000
        taken.sendall(b"back")
        assert calling.recv(4, socket.MSG_WAITALL) == b"back"


def test_connected_sockets_and_others_are_no_listeners(serving: list[socket.socket]) -> None:
    listeners = Listeners()
    listener = listen()
    listeners.begin()
    ours, theirs = socket.socketpair()
    calling = socket.create_connection(listener.getsockname(), timeout=5.0)
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    serving += [listener, ours, theirs, calling, datagrams]
    assert listening._listening() == listeners._before
    listeners.note()


def test_groups_that_are_made_beside_each_other_find_their_own(serving: list[socket.socket]) -> None:
    found: dict[int, tuple[socket.socket, Listeners]] = {}

    def make(number: int) -> None:
        listeners = Listeners()
        listeners.begin()
        found[number] = listen(), listeners
        listeners.note()

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    serving += [listener for listener, _ in found.values()]
    for number in range(0, 8, 2):
        found[number][1].deafen("a test")
    assert [reaches(found[number][0]) for number in range(8)] == [False, True] * 4


def test_a_store_is_nobody_elses(serving: list[socket.socket]) -> None:
    """It waits until who looks has looked."""
    listeners, told = Listeners(), []
    listeners.begin()
    serve = threading.Thread(target=lambda: told.append(store_server("127.0.0.1", 0)))
    serve.start()
    serve.join(0.2)
    listeners.note()
    serve.join(10.0)
    serving.append(socket.socket(fileno=told[0]["master_listen_fd"]))
    listeners.deafen("a test")
    assert reaches(serving[0])


def test_a_number_that_is_another_files_by_now_is_left_alone(serving: list[socket.socket]) -> None:
    listeners = Listeners()
    listeners.begin()
    gone = listen()
    listeners.note()
    number = gone.fileno()
    gone.close()
    other = listen()
    serving.append(other)
    assert other.fileno() == number
    listeners.deafen("a test")
    assert reaches(other)


def test_what_cannot_be_done_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(listening, "_FILES", Path("/nowhere"))
    listeners = Listeners()
    listeners.begin()
    with listen():
        listeners.note()
        listeners.deafen("groups of rank 3")
    printed = capsys.readouterr()
    assert "listener_stays_open" in printed.out + printed.err
    assert "groups of rank 3" in printed.out + printed.err


def test_a_filter_that_is_refused_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serving: list[socket.socket]
) -> None:
    monkeypatch.setattr(listening, "_SO_ATTACH_FILTER", 9999)
    listeners = Listeners()
    listeners.begin()
    serving.append(listen())
    listeners.note()
    listeners.deafen("a lane")
    printed = capsys.readouterr()
    assert "listener_stays_open" in printed.out + printed.err
