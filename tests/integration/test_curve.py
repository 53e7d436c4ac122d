"""Who may connect to a socket of the cluster: those with its key, both ways; others are told of, and harm nobody."""

from __future__ import annotations

import asyncio
import codecs
import io
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from longcat_pd import log
from longcat_pd.config.keys import admission
from longcat_pd.curve import Admission, Seal
from longcat_pd.errors import ConfigError
from longcat_pd.wire import AsyncSocket, BlockingSocket, Unsendable
from tests.peers import OPEN
from tests.ports import free_base

LIMIT_S = 10.0
REFUSED_S = 1.0  # in which somebody who is let in has long been heard


@dataclass
class Told:
    """What a socket has told of those that it refused."""

    reasons: Counter[str] = field(default_factory=Counter)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, _endpoint: str, reason: str) -> None:
        self.reasons[reason] += 1
        self.news.set()

    async def until(self, words: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not any(words in reason for reason in self.reasons):
                self.news.clear()
                await self.news.wait()


def sealed(key: str | None, told: Told | None = None) -> Admission:
    return Admission(seal=None if key is None else Seal.of(key.encode()), tell=told or Told())


@contextmanager
def bound(place: Admission, port: int | str = "*") -> Iterator[AsyncSocket]:
    router = AsyncSocket("router", f"tcp://127.0.0.1:{port}", bind=True, admission=place)
    try:
        yield router
    finally:
        router.close()


@contextmanager
def dialled(endpoint: str, place: Admission, name: bytes = b"p0") -> Iterator[AsyncSocket]:
    dealer = AsyncSocket("dealer", endpoint, bind=False, admission=place, identity=name)
    try:
        yield dealer
    finally:
        dealer.close()


async def exchange(router: AsyncSocket, dealer: AsyncSocket, name: bytes = b"p0") -> None:
    """Both ways, once."""
    hearing = asyncio.ensure_future(router.recv())
    answered = asyncio.ensure_future(dealer.recv())
    dealer.send([b"hello"])
    assert await asyncio.wait_for(hearing, LIMIT_S) == [name, b"hello"]
    router.send([name, b"and you"])
    assert await asyncio.wait_for(answered, LIMIT_S) == [b"and you"]


async def hears_nothing(router: AsyncSocket, dealer: AsyncSocket) -> None:
    heard, answered = asyncio.ensure_future(router.recv()), asyncio.ensure_future(dealer.recv())
    for _ in range(10):
        with suppress(Unsendable):  # ZeroMQ has given the connection up
            dealer.send([b"hello"])
        await asyncio.sleep(REFUSED_S / 10)
    assert not heard.done() and not answered.done()
    for task in (heard, answered):
        task.cancel()
    await asyncio.gather(heard, answered, return_exceptions=True)


async def test_who_has_the_key_is_let_in_and_what_it_says_is_encrypted() -> None:
    with bound(sealed("cluster")) as router, dialled(router.endpoint, sealed("cluster")) as dealer:
        await exchange(router, dealer)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("cluster", "other", "another cluster key"),
        ("cluster", None, "the other has none"),
        (None, "cluster", "the other has none"),
    ],
)
async def test_another_key_or_one_on_one_side_alone_is_refused_and_told(
    ours: str | None, theirs: str | None, words: str
) -> None:
    told = said = Told()  # who hears of it first hangs up on the other
    with bound(sealed(ours, told)) as router:
        with dialled(router.endpoint, sealed(theirs, said)) as stranger:
            await hears_nothing(router, stranger)
            hearing = asyncio.ensure_future(router.recv())
            await told.until(words)
            with dialled(router.endpoint, sealed(ours), b"p1") as peer:  # beside it
                peer.send([b"hello"])
                assert await asyncio.wait_for(hearing, LIMIT_S) == [b"p1", b"hello"]
        with dialled(router.endpoint, sealed(ours), b"p2") as peer:  # after it
            await exchange(router, peer, b"p2")


async def test_the_public_half_alone_lets_nobody_in() -> None:
    """CURVE takes in every client that knows the key of the server; the door asks for its own too."""
    told, ours, own = Told(), Seal.of(b"cluster"), Seal.of(b"own")
    with bound(Admission(seal=ours, tell=told)) as router:

        class Borrowed(Seal):
            def put_on(self, socket: object, *, listens: bool) -> None:
                own.put_on(socket, listens=listens)  # type: ignore[arg-type]
                socket.curve_serverkey = ours.public  # type: ignore[attr-defined]

        borrowed = Admission(seal=Borrowed(public=ours.public, secret=own.secret), tell=Told())
        with dialled(router.endpoint, borrowed) as stranger:
            await hears_nothing(router, stranger)
            await told.until("it does not have the key pair of this cluster")
        with dialled(router.endpoint, sealed("cluster")) as peer:
            await exchange(router, peer)


@pytest.mark.parametrize("first", ["other", None])
async def test_a_peer_that_dialled_the_wrong_process_finds_the_right_one_in_its_place(first: str | None) -> None:
    port = free_base()
    with dialled(f"tcp://127.0.0.1:{port}", sealed("cluster", said := Told())) as dealer:
        with bound(sealed(first), port) as wrong:
            await hears_nothing(wrong, dealer)
            await said.until("")
        with bound(sealed("cluster"), port) as router:
            hearing = asyncio.ensure_future(router.recv())
            answered = asyncio.ensure_future(dealer.recv())
            async with asyncio.timeout(LIMIT_S):
                while not hearing.done():  # as a driver greets, until it is heard
                    with suppress(Unsendable):
                        dealer.send([b"hello"])
                    await asyncio.sleep(0.05)
            router.send([b"p0", b"and you"])
            assert await asyncio.wait_for(answered, LIMIT_S) == [b"and you"]


async def test_bytes_that_are_no_protocol_are_refused() -> None:
    """With a key. Without one some of them are taken for an old form of the protocol, and then for records."""
    told = Told()
    with bound(sealed("cluster", told)) as router, dialled(router.endpoint, sealed("cluster")) as peer:
        await exchange(router, peer)
        host, port = "127.0.0.1", int(router.endpoint.rpartition(":")[2])
        hearing = asyncio.ensure_future(router.recv())
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            b"\xff" + bytes(8) + b"\x7f\x03\x00NULL",
            b"",
            b"\0" * 100,
        ):
            with socket.create_connection((host, port)) as raw:
                raw.sendall(garbage)
            await asyncio.sleep(0.05)
        assert not hearing.done()
        await told.until("")
        peer.send([b"still here"])
        assert await asyncio.wait_for(hearing, LIMIT_S) == [b"p0", b"still here"]


async def test_a_rank_s_socket_needs_the_key_too() -> None:
    with bound(sealed("cluster")) as router:
        for key, name in ((None, b"0"), ("other", b"1"), ("cluster", b"2")):
            rank = BlockingSocket("dealer", router.endpoint, bind=False, admission=sealed(key), identity=name, linger_s=0.0)
            rank.send([b"called"])
            if key == "cluster":
                assert await asyncio.wait_for(router.recv(), LIMIT_S) == [b"2", b"called"]
            else:
                hearing = asyncio.ensure_future(router.recv())
                assert not (await asyncio.wait({hearing}, timeout=REFUSED_S))[0]
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
            rank.close()


def test_refusals_are_logged_seldom_however_many_there_are() -> None:
    written = io.StringIO()
    log.set_up(stream=written)
    place = admission(None)
    for _ in range(1000):
        place.tell("tcp://127.0.0.1:1", "it has another cluster key")
    log.set_up()
    lines = written.getvalue().splitlines()
    assert len(lines) == 10 and 'reason="it has another cluster key" count=1' in lines[0] and "count=512" in lines[-1]
    assert all("warning peer_refused at=tcp://127.0.0.1:1" in line for line in lines)


def test_the_key_is_that_of_the_first_line_and_nobody_sees_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\n first-key \r\nsecond\n")
    seal = admission(str(file)).seal
    assert seal == Seal.of(b"first-key") != Seal.of(b"second")
    assert seal is not None and seal.secret.decode() not in repr(seal) and b"first" not in seal.public
    assert replace(seal, secret=b"x").public == seal.public
    file.write_bytes(codecs.BOM_UTF8 + b"first-key\r\n")  # as an editor on another system leaves it
    assert admission(str(file)).seal == seal
    assert OPEN.seal is None


UNSENDABLE = [
    ("old\nschlüssel\n".encode(), "key 2 of 2 is not printable ASCII"),
    *((f"old\n{key}\n".encode(), "key 2 of 2 holds a control character") for key in ("a\0b", "a\x7f")),
]


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"\n \n", "holds no key"), *UNSENDABLE])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        admission(str(file))


@pytest.mark.parametrize("size", [200, 1 << 20])
async def test_what_a_seal_costs(size: int) -> None:
    """Printed, not judged: there and back again, unchanged."""
    rounds = 200 if size < 1000 else 20
    for key in (None, "cluster"):
        with bound(sealed(key)) as router, dialled(router.endpoint, sealed(key)) as dealer:
            await exchange(router, dealer)
            began = time.perf_counter()
            for _ in range(rounds):
                dealer.send([b"tag", bytes(size)])
                router.send(await router.recv())
                assert await dealer.recv() == [b"tag", bytes(size)]
            took = (time.perf_counter() - began) / rounds
            print(f"{size} bytes, {'sealed' if key else 'open'}: {took * 1e6:.0f} us there and back")
