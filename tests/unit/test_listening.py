"""parallel/listening.py: what listens where it was told of is found, and hears nobody after it has served."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longcat_pd.parallel import listening
from longcat_pd.parallel.listening import address_of, deafen, store_server

REACHED_S = 0.3  # on this machine a connection that is taken is there at once


@pytest.fixture
def serving() -> Iterator[list[socket.socket]]:
    """Sockets that a test opens."""
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def listen(host: str = "127.0.0.1") -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.bind((host, 0))
    found.listen(8)
    found.settimeout(5.0)
    return found


def word(listener: socket.socket) -> bytes:
    """As gloo tells it: among other things."""
    return b"\x02\0\0\0name" + address_of(listener.fileno()) + bytes(100)


def reaches(listener: socket.socket) -> bool:
    with socket.socket(listener.family) as caller:
        caller.settimeout(REACHED_S)
        try:
            caller.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


def test_who_has_served_hears_nobody_new_and_those_it_has_taken_go_on(serving: list[socket.socket]) -> None:
    listeners = [listen() for _ in range(4)]
    serving += listeners
    calling = socket.create_connection(listeners[1].getsockname(), timeout=5.0)
    taken, _ = listeners[1].accept()
    serving += [calling, taken]
    deafen([word(listeners[1]), word(listeners[3])], "a test")
    assert [reaches(each) for each in listeners] == [True, False, True, False]
    for number in range(100):  # the filter is the listener's alone
        calling.sendall(bytes([number]) * 1000)
        assert len(taken.recv(1000, socket.MSG_WAITALL)) == 1000
        taken.sendall(b"back")
        assert calling.recv(4, socket.MSG_WAITALL) == b"back"


def test_an_address_is_as_the_system_writes_it(serving: list[socket.socket]) -> None:
    listener = listen()
    serving.append(listener)
    port = listener.getsockname()[1]
    assert address_of(listener.fileno()) == struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + b"\x7f\0\0\x01"


def test_addresses_of_the_longer_kind(serving: list[socket.socket]) -> None:
    try:
        listeners = [listen("::1") for _ in range(2)]
    except OSError:
        pytest.skip("this machine has none")
    serving += listeners
    port = listeners[0].getsockname()[1]
    told = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + bytes(15) + b"\x01" + bytes(4)
    deafen([told], "a test")
    assert [reaches(each) for each in listeners] == [False, True]


def test_connected_sockets_and_others_are_no_listeners(serving: list[socket.socket], tmp_path: Path) -> None:
    listener = listen()
    ours, theirs = socket.socketpair()
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "s"))
    local.listen(1)
    calling = socket.create_connection(listener.getsockname(), timeout=5.0)
    taken, _ = listener.accept()  # has the listener's address
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    serving += [listener, ours, theirs, local, calling, taken, datagrams]
    found = [each.getsockname() for each in listening._listening()]
    assert found.count(listener.getsockname()) == 1
    assert not {calling.getsockname(), datagrams.getsockname()} & set(found)


def test_to_look_leaves_locks_of_files_alone(tmp_path: Path, serving: list[socket.socket]) -> None:
    """Whoever closes a copy of a file gives up the process's locks on it."""
    with (tmp_path / "locked").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        listener = listen()
        serving.append(listener)
        deafen([word(listener)], "a test")
        inode = f":{(tmp_path / 'locked').stat().st_ino} "
        assert any(inode in lock for lock in Path("/proc/locks").read_text().splitlines())


def test_groups_that_are_made_beside_each_other_find_their_own(serving: list[socket.socket]) -> None:
    listeners, others = [listen() for _ in range(8)], [listen() for _ in range(8)]
    serving += listeners + others
    threads = [threading.Thread(target=deafen, args=([word(each)], "a test")) for each in listeners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert [reaches(each) for each in listeners + others] == [False] * 8 + [True] * 8


def test_a_store_is_found_by_its_file(serving: list[socket.socket]) -> None:
    told = [store_server("127.0.0.1", 0) for _ in range(2)]
    serving += [socket.socket(fileno=each["master_listen_fd"]) for each in told]
    deafen([address_of(told[0]["master_listen_fd"])], "a test")
    assert [reaches(each) for each in serving] == [False, True]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_is_not_found_is_said(
    is_hidden: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serving: list[socket.socket]
) -> None:
    gone, there = listen(), listen()
    serving.append(there)
    words = [word(gone), word(there)]
    gone.close()
    if is_hidden:
        monkeypatch.setattr(listening, "_FILES", Path("/nowhere"))
    deafen(words, "groups of rank 3")
    printed = "".join(capsys.readouterr())
    assert "listener_stays_open" in printed and "groups of rank 3" in printed
    assert ("2 of them" if is_hidden else "1 of them") in printed
    assert reaches(there) == is_hidden


def test_a_filter_that_is_refused_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serving: list[socket.socket]
) -> None:
    monkeypatch.setattr(listening, "_SO_ATTACH_FILTER", 9999)
    listener = listen()
    serving.append(listener)
    deafen([word(listener)], "a lane")
    assert "listener_stays_open" in "".join(capsys.readouterr())
