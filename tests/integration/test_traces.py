"""Traces of real pools at a collector in this process: one a request, of all three services; and a collector that fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longcat_pd.config import resolve
from tests.collector import Collector, Seen, collecting
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + 3 * CHUNK))
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPANS_WITHIN_S = 60.0
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
TOLD = {  # all that a span may say
    *("http.request.method", "http.route", "error.type"),
    *(
        f"longcat.{name}"
        for name in ["request_id", "outcome", "attempts", "attempt", "prefill", "decode", "transfer_id", "peer", "choices"]
    ),
    *(f"longcat.{name}_tokens" for name in ("prompt", "cached", "output", "accepted")),
    *(f"longcat.{name}" for name in ["steps", "moved_bytes", "early_bytes", "unfinished", "failed_at", "code", "failover"]),
}
PARTS = {  # service -> name of a span -> name of its parent
    "longcat_pd.load_balancer": {"POST /v1/completions": None, "attempt": "POST /v1/completions"},
    "longcat_pd.prefill": {
        "prefill": "attempt",
        **dict.fromkeys(("queue", "prefill chunks", "transfer of layers"), "prefill"),
    },
    "longcat_pd.decode": {"decode": "attempt", **dict.fromkeys(("queue", "transfer of layers", "decode steps"), "decode")},
}


def traced(number: int, **headers: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE[:-1]}{number}-{CLIENT}-01", "X-Request-Id": f"story-{number}", **headers}


async def arrived(collector: Collector, number: int, is_all: Callable[[list[Seen]], bool]) -> list[Seen]:
    """The spans of a request, once they are all there."""
    until = asyncio.get_running_loop().time() + SPANS_WITHIN_S
    while not is_all(found := collector.of(f"{TRACE[:-1]}{number}")):
        assert asyncio.get_running_loop().time() < until, found
        await asyncio.sleep(0.05)
    return found


def services(spans: list[Seen]) -> set[str]:
    return {span.service.removeprefix("longcat_pd.") for span in spans}


async def test_one_trace_a_request_of_all_three_services(tmp_path: Path, tiny: MakeCheckpoint) -> None:
    with collecting() as collector:
        path = cluster_file(tmp_path, tiny("2.0"), tracing={"endpoint": collector.url})
        async with pools(resolve.load(str(path))) as topology:
            await good_end(topology, collector)
            await left(topology, collector)
            await failed(topology, collector)
            await not_sampled(topology, collector)
            check_nothing_else_is_told(collector)
            await collector_fails(topology, collector)


async def good_end(topology: Topology, collector: Collector) -> None:
    answer = await topology.client.post(COMPLETIONS, json={**BODY, "stream": True}, headers=traced(1))
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    spans = await arrived(collector, 1, lambda found: len(found) >= 10)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) == 10
    root, attempt = (next(s for s in spans if s.name == name) for name in ("POST /v1/completions", "attempt"))
    assert root.parent_id == CLIENT and {s.attributes.get("longcat.request_id") for s in spans} == {"story-1", None}
    seen: dict[str, dict[str, str | None]] = {}
    for span in spans:
        parent = by_id.get(span.parent_id)
        assert not span.is_error and span.began <= span.ended
        assert parent is None or parent.began <= span.began <= span.ended <= parent.ended, (span, parent)
        assert all(span.began <= at <= span.ended for _, at in span.events), span
        seen.setdefault(span.service, {})[span.name] = None if parent is None else parent.name
    assert seen == PARTS
    assert [name for name, _ in root.events] == ["queued", "paired", "first_token"]
    assert (attempt.attributes["longcat.prefill"], attempt.attributes["longcat.decode"]) == ("p0", "d0")
    p, d = (next(s for s in spans if s.parent_id == attempt.span_id and s.name == name) for name in ("prefill", "decode"))
    assert (p.instance, d.instance, p.attributes["longcat.prompt_tokens"]) == ("p0", "d0", len(PROMPT))
    assert p.attributes["longcat.transfer_id"] == d.attributes["longcat.transfer_id"]
    assert [e for e, _ in p.events] == [
        "arrived",
        "offered",
        "granted",
        "prefill_started",
        "prefill_ended",
        "committed",
        "finished",
    ]
    assert [e for e, _ in d.events] == ["arrived", "granted", "committed", "first_token", "finished"]
    chunks = next(s for s in spans if s.name == "prefill chunks")
    assert [name for name, _ in chunks.events] == ["chunk"] * 3
    moved = [s.attributes["longcat.moved_bytes"] for s in spans if s.name == "transfer of layers"]
    assert len(moved) == 2 and all(moved)
    assert (root.attributes["longcat.outcome"], root.attributes["longcat.output_tokens"]) == ("length", 6)
    assert collector.paths == {"/v1/traces"}


async def left(topology: Topology, collector: Collector) -> None:
    """By a client, in the middle of its answer."""
    body = {**BODY, "stream": True, "max_tokens": 300}
    async with topology.client.stream("POST", COMPLETIONS, json=body, headers=traced(2)) as answer:
        await anext(answer.aiter_lines())
    spans = await arrived(collector, 2, lambda found: len(services(found)) == 3)
    root = next(s for s in spans if s.name == "POST /v1/completions")
    assert root.attributes["longcat.outcome"] == "cancelled" and root.events[-1][0] == "cut by client"
    decode, steps = (next(s for s in spans if s.name == name) for name in ("decode", "decode steps"))
    assert decode.attributes["longcat.outcome"] == "cancelled" and steps.attributes["longcat.unfinished"] is True
    assert not any(s.is_error for s in spans)
    await topology.idle_within(10.0)


async def failed(topology: Topology, collector: Collector) -> None:
    """A client's fault, found by P; the message of the error quotes the client and is not told."""
    body = {**BODY, "prompt": [*PROMPT, 987654]}
    assert (await topology.client.post(COMPLETIONS, json=body, headers=traced(3))).status_code == 400
    spans = await arrived(collector, 3, lambda found: {"load_balancer", "prefill"} <= services(found))
    wrong = {(s.service.removeprefix("longcat_pd."), s.name): s for s in spans if s.is_error}
    assert {("load_balancer", "POST /v1/completions"), ("load_balancer", "attempt"), ("prefill", "prefill")} == set(wrong)
    assert {(s.said, s.attributes["error.type"]) for s in wrong.values()} == {("InvalidRequest", "InvalidRequest")}
    assert wrong["load_balancer", "attempt"].attributes["longcat.failed_at"] == "p0"
    await topology.idle_within(10.0)


async def not_sampled(topology: Topology, collector: Collector) -> None:
    """The client says so; who says nothing has a trace of our own."""
    quiet = {"traceparent": f"00-{TRACE[:-1]}4-{CLIENT}-00"}
    assert (await topology.client.post(COMPLETIONS, json=BODY, headers=quiet)).status_code == 200
    bad = {"traceparent": f"00-{'0' * 32}-{CLIENT}-01", "X-Request-Id": "story-5"}
    assert (await topology.client.post(COMPLETIONS, json=BODY, headers=bad)).status_code == 200
    until = asyncio.get_running_loop().time() + SPANS_WITHIN_S
    while not (
        roots := [s for s in collector.spans if s.attributes.get("longcat.request_id") == "story-5" and not s.parent_id]
    ):
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.05)
    await arrived(collector, 4, lambda found: found == [])
    (root,) = roots
    assert set(root.trace_id) != {"0"} and root.service == "longcat_pd.load_balancer"


def check_nothing_else_is_told(collector: Collector) -> None:
    assert {name for span in collector.spans for name in span.attributes} <= TOLD
    for body in collector.bodies:
        assert b"987654" not in body and str(PROMPT[:4])[1:-1].encode() not in body


async def collector_fails(topology: Topology, collector: Collector) -> None:
    """It refuses, then it does not answer any more: requests are as before, and what is lost is counted."""
    collector.mode = "refuse"
    right = await topology.complete(PROMPT)
    until = asyncio.get_running_loop().time() + SPANS_WITHIN_S
    while not all([await dropped(topology, name) for name in ("load_balancer", "p0", "d0")]):
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.1)
    collector.mode = "hang"
    for _ in range(3):
        assert (await topology.complete(PROMPT))["token_ids"] == right["token_ids"]


async def dropped(topology: Topology, name: str) -> float:
    if name == "load_balancer":
        text = (await topology.client.get("/metrics")).text
    else:
        text = topology.parts[name].metrics.render().decode()
    (value,) = re.findall(r'longcat_pd_trace_spans_total\{.*outcome="dropped".*\} (\S+)', text)
    return float(value)
