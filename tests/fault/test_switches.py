"""The switches of ``faults.py`` in a running cluster: set over HTTP, seen in what requests get, cleared, and all is well.

Failures of the kinds 9, 14, 20 and 21, between real processes. Kind 26: ``test_incomplete.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.fault.command import main as fault
from longcat_pd.log import logger
from tests.fault.switched import PROMPT, Switched, now, switched, until
from tests.parity.conftest import MakeCheckpoint
from tests.topology import IDLE_S

PAIRING_S, QUEUE_S, TRANSFER_S, SILENT_S = 2.0, 1.5, 2.0, 5.0
SLOW_S = 6.0
LOST = (502, "transfer_failed")


async def test_slow_is_not_dead(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Kind 9: only its deadline ends a request, and a rank that says nothing for a while is waited for."""
    async with switched(tiny, tmp_path, decode={"kvp_size": 2, "attn_tp_size": 2}) as topology:
        right = await topology.outcome()
        for instance, name in (("p0", "slow_step"), ("d0", "slow_step"), ("d0", "spin"), ("d0", "silent_rank")):
            await topology.set_fault(instance, name, seconds=1.0, **({"rank": 1} if instance == "d0" else {}))
            began = now()
            assert await topology.outcome() == right
            assert now() - began > 0.9, f"{name} at {instance} was not seen"
            await topology.clear(instance)
        await topology.set_fault("d0", "slow_step", seconds=SLOW_S)
        began = now()
        assert await topology.outcome(limit_s=1.0) == (504, "deadline_exceeded")
        took = now() - began
        print(f"told {took - 1.0:.2f} s after the deadline")
        assert 1.0 <= took < SLOW_S, "at its deadline, and not when the step ends"
        assert await topology.outcome() == right
        await topology.idle_within()


@pytest.mark.slow
@pytest.mark.parametrize("instance", ["p0", "d0"])
async def test_a_step_of_a_minute(tiny: MakeCheckpoint, tmp_path: Path, instance: str) -> None:
    async with switched(tiny, tmp_path) as topology:
        topology.client.timeout = httpx.Timeout(120.0)
        right = await topology.outcome()
        await topology.set_fault(instance, "slow_step", seconds=62.0)
        slow = asyncio.ensure_future(topology.outcome())
        await asyncio.sleep(30.0)
        began = now()
        health = await topology.answer_of(instance, "/health")
        assert health["status"] == "ok" and now() - began < 1.0
        assert await slow == right
        await topology.idle_within()


def limits() -> dict[str, Any]:
    """Short ones, so that every half of a pair ends in seconds."""
    return {
        "transfer": {"timeout_s": TRANSFER_S, "pairing_timeout_s": PAIRING_S},
        "prefill_engine": {"queue_timeout_s": QUEUE_S},
        "decode_engine": {"queue_timeout_s": QUEUE_S},
    }


async def test_half_a_pair(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Kind 20: a lost record, or a leg that comes alone; both sides are free after the time-out, and say so."""
    async with switched(tiny, tmp_path, **limits()) as topology:
        right = await topology.outcome()
        before = await topology.incarnations()
        for record, end in (("Offer", LOST), ("Grant", LOST), ("Commit", LOST), ("Ack", right)):
            await topology.set_fault("p0" if record in ("Offer", "Commit") else "d0", "drop_record", record=record)
            began = now()
            assert await asyncio.wait_for(topology.outcome(), 15.0) == end, record
            logger().info("half_a_pair", lost=record, seconds=now() - began)
            await topology.idle_within(TRANSFER_S + IDLE_S)
            assert await topology.outcome() == right
        ends = await asyncio.wait_for(asyncio.gather(leg_alone(topology, "p0"), leg_alone(topology, "d0")), 15.0)
        assert ends == [502, 502]
        await topology.idle_within()
        await command(topology, "--instance", "d0", "late_record", "--record", "Grant", "--seconds", "1")
        assert await topology.outcome() == right, "late is not lost"
        await topology.idle_within()
        assert await command(topology, "--instance", "p0", "lane_stall") == "p0       lane_stall\n"
        assert await command(topology, "list") == "p0       lane_stall\nd0       -\n"
        assert await command(topology, "clear") == "p0       -\nd0       -\n"
        await silent_lanes(topology, right)
        assert await topology.incarnations() == before


async def command(topology: Switched, *arguments: str) -> str:
    """What ``longcat-pd fault`` prints of instances; the log of this process goes to the same place."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert await asyncio.to_thread(fault, ["--url", topology.url, *arguments]) == 0
    return "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith(("p0 ", "d0 ")))


async def leg_alone(topology: Switched, instance: str) -> int:
    """The status that ends a leg whose other one never comes."""
    peer, number = ("d0", "1") if instance == "p0" else ("p0", "2")
    headers = {"X-Longcat-Transfer-Id": number * 32, "X-Longcat-Peer": peer, "X-Longcat-Deadline-Ms": "60000"}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    spec = topology.parts[instance].spec
    url = f"http://{spec.host}:{spec.http_port}/v1/completions"
    return (await topology.client.post(url, json=body, headers=headers)).status_code


async def silent_lanes(topology: Switched, right: tuple[int, str]) -> None:
    """Kind 14: nothing comes on the lanes, or half of a message."""
    for name in ("lane_stall", "lane_half"):
        await topology.set_fault("p0", name)
        began = now()
        assert await asyncio.wait_for(topology.outcome(), 15.0) == LOST
        logger().info("silent_lane", fault=name, seconds=now() - began)
        await topology.clear("p0", name)
        await topology.idle_within()
        assert await topology.outcome() == right


@pytest.mark.parametrize("mute, deaf", [("d0", "p0"), pytest.param("p0", "d0", marks=pytest.mark.slow)])
async def test_a_driver_that_says_nothing(tiny: MakeCheckpoint, tmp_path: Path, mute: str, deaf: str) -> None:
    """Kind 14, on the control sockets."""
    async with switched(tiny, tmp_path, **limits()) as topology:
        right = await topology.outcome()
        before = await topology.incarnations()
        await topology.set_fault(mute, "mute_control")
        under_way = asyncio.ensure_future(topology.outcome())
        await until(lambda: is_down(topology, deaf, mute), SILENT_S + 5.0, f"{mute} says nothing")
        assert await under_way == LOST
        assert (await topology.account())["instances"][deaf]["driver"]["transfers"] == 0
        await topology.clear(mute)
        await until(lambda: is_served(topology, right), 10.0, f"{mute} speaks again")
        await topology.idle_within()
        assert await topology.incarnations() == before


async def is_down(topology: Switched, instance: str, peer: str) -> bool:
    return bool((await topology.answer_of(instance, "/ready"))["peers"][peer] == "down")


async def is_served(topology: Switched, right: tuple[int, str]) -> bool:
    return await topology.outcome() == right


async def test_late_bytes_of_a_request_whose_blocks_are_another_s(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Kind 21: both need every block there is; the first one's bytes come while the second, of another source, decodes."""
    engine = {"num_blocks": 9, "max_model_len": 128}
    async with switched(tiny, tmp_path, num_prefill=2, prefill_engine=engine, decode_engine=engine) as topology:
        second = {"prompt": PROMPT[::-1], "max_tokens": 40}
        right = await topology.outcome(**second)
        for source in ("p0", "p1"):
            await topology.set_fault(source, "lane_stall")
        first = asyncio.ensure_future(topology.outcome(max_tokens=40))
        await until(lambda: has_unsent(topology), 10.0, "the first one's cache is held up")
        held = next(name for name, count in (await unsent(topology)).items() if count)
        other = "p1" if held == "p0" else "p0"
        await topology.clear(other)
        waiting = asyncio.ensure_future(streamed(topology, **second))
        await until(lambda: waits_for_room(topology), 10.0, "the second waits for the first one's blocks")
        await topology.set_fault("d0", "slow_step", seconds=0.1, times=0)
        first.cancel()
        await asyncio.sleep(0.0)
        await until(lambda: decodes(topology), 10.0, "it has them at once")
        await topology.clear(held)
        await asyncio.sleep(1.0)  # the message that was held up is nobody's any more, so nobody counts it
        assert not waiting.done(), "it came while the second decodes"
        assert await waiting == right
        await topology.clear("d0")
        assert await topology.outcome(**second) == right
        await topology.idle_within()


async def streamed(topology: Switched, **fields: Any) -> tuple[int, str]:
    """As ``outcome``, of a stream."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True, **fields}
    answer = await topology.client.post("/v1/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return answer.status_code, str([i for event in events for c in event["choices"] for i in c.get("token_ids") or []])


async def unsent(topology: Switched) -> dict[str, int]:
    instances = (await topology.account())["instances"]
    return {name: sum(r["lanes"]["unsent"] for r in instances[name]["ranks"]) for name in ("p0", "p1")}


async def has_unsent(topology: Switched) -> bool:
    return any((await unsent(topology)).values())


async def waits_for_room(topology: Switched) -> bool:
    return bool((await topology.account())["instances"]["d0"]["driver"]["requests_waiting"])


async def decodes(topology: Switched) -> bool:
    return any(r["blocks"]["live"] for r in (await topology.account())["instances"]["d0"]["ranks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, code",
    [
        ("raise_in_step", "engine_fault"),
        ("endless_step", "rank_lost"),
        ("spin", "rank_lost"),
        ("silent_rank", "rank_lost"),
        ("endless_collective", "rank_lost"),
        ("skip_collective", "rank_lost"),
    ],
)
async def test_a_rank_that_does_not_answer(tiny: MakeCheckpoint, tmp_path: Path, name: str, code: str) -> None:
    limits = {"rank_lost_s": 2.0, "step_timeout_s": 3.0}
    async with switched(tiny, tmp_path, decode={"kvp_size": 2, "attn_tp_size": 2}, decode_engine=limits) as topology:
        assert (await topology.outcome())[0] == 200
        await topology.set_fault("d0", name, rank=1, **({} if name == "silent_rank" else {"after": 3}))
        assert await asyncio.wait_for(topology.outcome(max_tokens=20), 20.0) == (500, code)
