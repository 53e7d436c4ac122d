"""Whoever reaches the ports of a cluster without its key: garbage, greetings and calls of strangers on each, at work."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from longcat_pd.config.resolve import load
from longcat_pd.curve import Admission, Seal
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.messages import Abort, Beat
from longcat_pd.wire import AsyncSocket, Unsendable, tcp
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, cluster_file, pools

PROMPT = list(range(3, 43))


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
            places = [first + offset for offset in ((1, 2, 3, 5) if name == "d0" else (2, 3, 4))]
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
