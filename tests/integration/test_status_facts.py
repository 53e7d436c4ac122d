"""The status page's facts over real pools: both sides of a request, every rank's figures, and a killed rank by its name."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.config import resolve
from longcat_pd.config.schema import PeerAddress
from longcat_pd.top import command
from longcat_pd.top.watch import Balancer
from tests.parity.conftest import MakeCheckpoint
from tests.processes import children_of_forkservers
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + 3 * CHUNK))  # with pages of their own: three chunks
LOST_WITHIN_S = 30.0  # stated: ten


async def status(topology: Topology, **headers: str) -> dict[str, Any]:
    await asyncio.sleep(1.0)  # else it is the one before
    answer = await topology.client.get("/status", headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) < 64 * 1024
    return dict(answer.json())


async def top(topology: Topology) -> tuple[int, str]:
    """What ``longcat-pd top --once`` ends with, and its picture as one line."""
    out = io.StringIO()
    status = await command.show_once(Balancer(url=topology.url, key=b"key-of-a-client"), out)
    assert "\x1b" not in out.getvalue()
    return status, " ".join(out.getvalue().split())


def ages(side: dict[str, Any]) -> list[str]:
    """The events of a side in the order of time, which their ages have to follow."""
    found = [age for _, age in side["events"]]
    assert found == sorted(found, reverse=True) and side["ended"] is not None
    assert all(side["began"] >= age >= side["ended"] - 0.001 for age in [*found, *side["steps"]]), side
    return [name for name, _ in side["events"]]


async def test_both_sides_of_a_request_every_rank_and_one_that_is_killed(tmp_path: Path, tiny: MakeCheckpoint) -> None:
    (tmp_path / "keys").write_text("key-of-a-client\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "failover": False}
    path = cluster_file(tmp_path, tiny("2.0"), prefill={"pp_size": 2}, load_balancer_settings=settings)
    before = set(children_of_forkservers(os.getpid()))
    config = resolve.load(str(path))
    async with pools(config) as topology:
        topology.client.headers["Authorization"] = "Bearer key-of-a-client"
        answer = await topology.complete(PROMPT, max_tokens=9)
        assert answer["usage"]["completion_tokens"] == 9
        await topology.idle_within(10.0)
        assert (await topology.client.get("/status", headers={"Authorization": ""})).status_code == 401
        found = await status(topology)
        assert (found["ready"], found["wrong"], found["open"]) == (True, [], 0)
        check_ranks(found)
        check_request(found, answer["token_ids"])
        await check_bytes(topology, found["requests"][0]["sides"], resolve.instance_spec(config, "d0").peers[0])
        status_once, text = await top(topology)
        assert status_once == 0 and "Nothing is wrong." in text, text
        assert "stage 1 1 ok 128/128" in text and "length p0 -> d0" in text and "3 chunks, 192 tokens in d0: " in text, text
        ranks = sorted(set(children_of_forkservers(os.getpid())) - before)
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        until = asyncio.get_running_loop().time() + LOST_WITHIN_S
        while not (lost := [r for i in found["instances"] for r in i["ranks"] if r["state"] == "lost"]):
            assert asyncio.get_running_loop().time() < until, found
            found = await status(topology)
        assert len(lost) == 1 and lost[0]["node"] == "127.0.0.1"
        words = [one["words"] for one in found["wrong"]]
        assert re.fullmatch(rf"[pd]0 has lost {re.escape(lost[0]['name'])}: rank \d ended with status -9\.", words[1]), (
            words
        )
        assert words[0].startswith("No request can be served: no "), words
        status_once, text = await top(topology)
        assert status_once == 1 and words[1] in text and "out: rank lost" in text, text


def check_ranks(found: dict[str, Any]) -> None:
    p0, d0 = found["instances"]
    assert [r["name"] for r in p0["ranks"]] == ["rank 0 (stage 0) on 127.0.0.1", "rank 1 (stage 1) on 127.0.0.1"]
    for instance in (p0, d0):
        assert (instance["waiting"], instance["running"], instance["transfers"], instance["state"]) == (0, 0, 0, "in")
        assert instance["step_ms"][instance["role"]] > 0
        for rank in instance["ranks"]:
            assert (
                rank["state"] == "ok"
                and rank["blocks"]["free"] + rank["blocks"]["cached"] == rank["blocks"]["total"] == 128
            )
    assert p0["ranks"][0]["blocks"]["cached"] == len(PROMPT) // 16
    assert d0["accepted"] is not None


def check_request(found: dict[str, Any], said: list[int]) -> None:
    request = found["requests"][0]
    assert (request["pair"], request["outcome"], request["attempt"]) == (["p0", "d0"], "length", 1)
    p0, d0 = request["sides"]
    assert ages(p0) == ["arrived", "offered", "granted", "prefill_started", "prefill_ended", "committed", "finished"]
    assert ages(d0) == ["arrived", "granted", "committed", "first_token", "finished"]
    assert (p0["num_steps"], len(p0["steps"]), p0["prompt"]) == (3, 3, len(PROMPT))
    assert d0["num_steps"] >= 8 and d0["output"] == 9
    assert p0["moved_bytes"] >= d0["moved_bytes"] > p0["early_bytes"]
    text = json.dumps(found)
    assert str(said)[1:-1] not in text and str(PROMPT[:8])[1:-1] not in text and "key-of-a-client" not in text


async def check_bytes(topology: Topology, sides: list[dict[str, Any]], prefill: PeerAddress) -> None:
    """Of an only request, a side says what the instance has counted: how much leaves early is the machine's to decide."""
    text = (await topology.client.get(f"http://{prefill.host}:{prefill.http_port}/metrics")).text
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    told = [sides[0]["moved_bytes"], sides[0]["early_bytes"]]
    assert told == [values[f"longcat_pd_transfer_{name}_total"] for name in ("bytes", "early_bytes")]
