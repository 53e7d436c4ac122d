"""Whoever reaches the ports of a cluster without its key: garbage, greetings and calls of strangers on each, at work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from longcat_pd.config.resolve import load
from longcat_pd.curve import Admission, Seal
from longcat_pd.fault.signals import ranks_of
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Abort, Beat
from longcat_pd.wire import AsyncSocket, Unsendable, tcp
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, cluster_file, pools

PROMPT = list(range(3, 43))


FEW_FILES = 24  # that a rank may open more


def listening_ports(pid: int) -> set[int]:
    files = Path(f"/proc/{pid}/fd")
    inodes = set()
    for file in files.iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(file.readlink()))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            ports.add(int(fields[1].split(":")[1], 16))
    return ports


@contextlib.contextmanager
def few_files(pid: int) -> Iterator[None]:
    """It soon has none left, if it takes whoever comes."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + FEW_FILES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def as_gloo_says(pick: random.Random) -> Iterator[bytes]:
    """Who one is for the listener, then messages: too long, cut, of no kind, for no receiver; and nothing of that."""
    for pair in (*range(6), -1, 1 << 62):
        who = struct.pack("<q", pair)
        for kind in (0, 1, 2, 3, 77):
            yield who + struct.pack("<6Q", 48 + (1 << 20), kind, 0, 0, 1 << 20, 0) + bytes(5000)
        yield who
        yield who[:3]
        yield who + pick.randbytes(300)
    yield b""


async def call_beside(ports: set[int], pick: random.Random) -> set[int]:
    """The ports of this machine that took a connection. All are called at once, each often."""

    async def call(port: int, data: bytes) -> int | None:
        try:
            async with asyncio.timeout(2.0):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (TimeoutError, OSError):
            return None
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        left.append(writer)
        return port

    left: list[asyncio.StreamWriter] = []
    took = await asyncio.gather(*(call(port, data) for port in ports for data in as_gloo_says(pick)))
    await asyncio.sleep(0.5)  # nobody hangs up before they are all there
    for writer in left:
        writer.transport.abort()
    return {port for port in took if port is not None}


def garbage(address: tuple[str, int], pick: random.Random) -> None:
    for data in (b"GET / HTTP/1.0\r\n\r\n", pick.randbytes(3000), b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", b"\0" * 64):
        with socket.create_connection(address, timeout=5) as raw:
            raw.sendall(data)


async def pretend(endpoint: str, key: bytes | None, identity: bytes) -> None:
    """Speak in another's name."""
    place = Admission(seal=None if key is None else Seal.of(key), tell=lambda _endpoint, _reason: None)
    stranger = AsyncSocket("dealer", endpoint, bind=False, admission=place, identity=identity)
    hearing = asyncio.ensure_future(stranger.recv())
    try:
        for record in (Beat(name="p0", incarnation="x"), Abort(transfer_id="t", reason="r")):
            for _ in range(5):
                try:
                    stranger.send(CONTROL.encode(record))
                except Unsendable:
                    await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert not hearing.done(), "somebody has answered"
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        stranger.close()


def call_the_lanes(host: str, port: int, incarnation: str) -> None:
    """The store of the lanes knows no keys: calls that are none, and the end that listeners once believed."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.add("calls/0", 3)
    taken = store.add(f"calls/{incarnation}/0", 0)
    for number, text in enumerate(("-", "", "{}", '{"source": 1}', os.urandom(40).hex()), start=taken + 1):
        store.set(f"call/{incarnation}/0/{number}", text)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.key"
    file.write_text("the-key-of-this-cluster\n")
    return file


async def incarnations(topology: Topology) -> dict[str, str]:
    account = await topology.account()
    return {name: worker["incarnation"] for name, worker in account["instances"].items()}


async def test_strangers_on_every_port_disturb_nobody(tiny: MakeCheckpoint, tmp_path: Path, key_file: Path) -> None:
    config = load(
        cluster_file(tmp_path, tiny("2.0", with_tokenizer=True), cluster_key_file=str(key_file), prefill={"pp_size": 2})
    )
    pick = random.Random(1)
    async with pools(config) as topology:
        undisturbed = await topology.complete(PROMPT)
        alive = await incarnations(topology)
        answering = asyncio.ensure_future(topology.complete(PROMPT, max_tokens=60))
        for name, parts in topology.parts.items():
            host, first = parts.spec.host, parts.spec.http_port
            places = [first + offset for offset in ((1, 2, 3, 5) if name == "d0" else (2, 3))]
            for port in places:
                await asyncio.to_thread(garbage, (host, port), pick)
            for offset in (1, 2, 3) if name == "d0" else (2, 3):
                for key in (None, b"another"):
                    await pretend(tcp(host, first + offset), key, alive["p0"].encode())
        d0 = topology.parts["d0"].spec
        await asyncio.to_thread(call_the_lanes, d0.host, d0.http_port + 5, alive["d0"])
        assert len((await answering)["token_ids"]) == 60
        again = await topology.complete(PROMPT)
        assert again["token_ids"] == undisturbed["token_ids"]
        await topology.idle_within(10.0)
        assert await incarnations(topology) == alive
        for path in ("/debug/accounting", "/server_info"):
            answer = await topology.client.get(f"http://{d0.host}:{d0.http_port}{path}")
            assert answer.status_code == 401


async def test_who_joins_ranks_hears_nobody_once_they_are_joined(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """gloo ends the process when its files are used up, and takes a stranger for a peer that it waits for."""
    config = load(
        cluster_file(
            tmp_path, tiny("2.0", with_tokenizer=True), prefill={"pp_size": 2}, decode={"kvp_size": 2, "attn_tp_size": 2}
        )
    )
    async with pools(config) as topology, contextlib.AsyncExitStack() as stack:
        undisturbed = await topology.complete(PROMPT)
        alive, ranks = await incarnations(topology), ranks_of(os.getpid())
        ports = {pid: listening_ports(pid) for pid in ranks}
        assert len(ranks) == 4 and all(len(each) >= 4 for each in ports.values()), "two groups and two lanes each"
        for pid in ranks:
            stack.enter_context(few_files(pid))
        answering = asyncio.ensure_future(topology.complete(PROMPT, max_tokens=60))
        lanes = topology.parts["d0"].spec.http_port + 5  # hears who comes later
        took = await call_beside(set.union(*ports.values()) - {lanes}, random.Random(2))
        assert took == set()
        assert len((await answering)["token_ids"]) == 60
        assert (await topology.complete(PROMPT))["token_ids"] == undisturbed["token_ids"]
        await topology.idle_within(10.0)
        assert (await incarnations(topology), ranks_of(os.getpid())) == (alive, ranks)
