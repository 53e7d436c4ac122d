"""One of the two calls of a request fails, in every way that a network or a worker has. Failures of the kinds 1 to 8.

Real pools; between the balancer and each worker is a relay that makes the fault. Deaths by signals are in the other files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from longcat_pd.config import resolve
from longcat_pd.errors import EngineFault, InvalidRequest, Overloaded, TransferFailed, WorkerUnavailable
from tests.fault.relay import PASS, RESET, Act, Relay, answer, refusal, relays
from tests.fault.slow_steps import SLOW_S
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, another_balancer, cluster_file, pools

T = TypeVar("T")
LONG, NUM_GOOD = 40, 2  # tokens of an answer that breaks, and events of it that pass
NUM_ROUNDS = 20

PROMPT = list(range(100, 120))
SLOW = list(range(100, 100 + min(SLOW_S)))  # seven chunks of 0.3 s
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
KNOWN_S = 8.0  # an error is told so long after it is known; a second on a machine that does nothing else
CLOSED_S = 8.0  # and so long after that both calls are closed; the same second


class Site:
    """Two pools of one or two instances, and a balancer that reaches them through relays."""

    def __init__(self, topology: Topology, between: dict[str, Relay], behind: Topology) -> None:
        self.topology = topology
        self.relays = between
        self.behind = behind  # without relays

    def script(self, role: str, *acts: Act) -> list[Relay]:
        """The relays of a role do this, each on its own; all others let everything pass."""
        for name, relay in self.relays.items():
            relay.script(*(acts if name.startswith(role) else (PASS,)))
        return [relay for name, relay in self.relays.items() if name.startswith(role)]

    async def ask(self, *, is_streamed: bool, **changes: Any) -> tuple[int, str | list[int], dict[str, str]]:
        """Status, the ids of a good answer or the code of an error, headers. Through the OpenAI SDK where it streams."""
        body = {**BODY, **changes}
        if not is_streamed:
            found = await self.topology.client.post("/v1/completions", json=body)
            value = found.json()
            if found.status_code != 200:
                assert set(value["error"]) == {"message", "type", "param", "code"}
                return found.status_code, value["error"]["code"], dict(found.headers)
            return 200, value["choices"][0]["token_ids"], dict(found.headers)
        extra = {name: body.pop(name) for name in ("ignore_eos", "return_token_ids", "stop_token_ids") if name in body}
        async with openai.AsyncOpenAI(base_url=f"{self.topology.url}/v1", api_key="x", max_retries=0) as sdk:
            try:
                stream = await sdk.completions.create(model="", **body, extra_body=extra, stream=True)
                ids = [token async for chunk in stream for c in chunk.choices for token in c.token_ids]  # type: ignore[attr-defined]
            except openai.APIStatusError as error:
                return error.status_code, str(error.code), dict(error.response.headers)
            return 200, ids, {}

    async def metric(self, name: str) -> float:
        """Of the balancer with relays, summed over labels."""
        text = (await self.topology.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(f"longcat_pd_{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def steps(self, name: str, phase: str) -> float:
        """How many steps an instance has done."""
        text = self.behind.parts[name].metrics.render().decode()
        marks = ("longcat_pd_step_seconds_count", f'phase="{phase}"')
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if all(mark in line for mark in marks))

    async def check(self, right: list[int]) -> None:
        """Idle in time, and the next request is served through the same processes."""
        await self.behind.idle_within()
        for relay in self.relays.values():
            relay.script(PASS)
        await self.ready()
        assert (await self.ask(is_streamed=False))[:2] == (200, right)
        await self.behind.idle_within()

    async def ready(self) -> None:
        """All instances are in: a refused connection puts one out for up to a second."""
        until = asyncio.get_running_loop().time() + 15.0
        while True:
            said = (await self.topology.client.get("/ready")).json()
            if all(instance["ready"] for instance in said["instances"].values()):
                return
            assert asyncio.get_running_loop().time() < until, said
            await asyncio.sleep(0.05)


@asynccontextmanager
async def site(
    checkpoint: Path, folder: Path, *, num: int = 1, balancer: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[Site]:
    sections = {"num_prefill": num, "num_decode": num, **sections}
    config = resolve.load(cluster_file(folder, checkpoint, **sections), ["model.dtype=float32"])
    settings = {"failover": False, **(balancer or {})}
    assert config.prefill is not None and config.decode is not None
    ports = {i.name: i.http_port for pool in (config.prefill, config.decode) for i in pool.instances}
    entries = {role: f"tests.fault.slow_steps:{role}" for role in ("prefill", "decode")}
    async with pools(config, entries=entries) as behind, relays(ports) as between:
        urls = {name: relay.url for name, relay in between.items()}
        async with another_balancer(config, urls, **settings) as topology:
            made = Site(topology, between, behind)
            await made.ready()
            yield made


# ---------------------------------------------------------------------- 1: the client's fault, found late

WRONG = InvalidRequest("17 is too many", code="context_length_exceeded", param="max_tokens")
LATE_FAULTS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 5000},
    {"prompt": [5, 999_999]},
    {"prompt": [5] * 600},
    {"stop_token_ids": [999_999]},
)


async def test_the_clients_fault_is_found_late(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with site(tiny("2.0"), tmp_path) as s:
        _, right, _ = await s.ask(is_streamed=True)
        assert isinstance(right, list) and len(right) == 6
        decoded = s.steps("d0", "decode")
        for changes, is_streamed in product(LATE_FAULTS, (False, True)):
            s.script("none")
            status, code, headers = await timely(s.ask(is_streamed=is_streamed, **changes))
            assert (status, code) in {(400, "invalid_value"), (400, "context_length_exceeded")}, changes
            assert headers["x-request-id"] and "x-longcat-cause" not in headers
            await both_closed(s, 1)
        for is_streamed in (False, True):
            s.script("d", refusal(WRONG))  # as D would say it; its leg never comes there, and P waits for the grant
            said = await timely(s.ask(is_streamed=is_streamed))
            assert said[:2] == (400, "context_length_exceeded")
            await both_closed(s, 1)
        assert s.steps("d0", "decode") == decoded, "D never decodes"
        assert await s.metric("retries_total") == await s.metric("breaker_open") == 0
        await s.check(right)


async def timely(asked: Awaitable[T]) -> T:
    """What was known at once is told at once."""
    return await asyncio.wait_for(asked, KNOWN_S)


async def both_closed(s: Site, num_attempts: int) -> None:
    """Each of both legs was called so often, and is closed soon."""
    for role in ("p", "d"):
        calls = [call for name, relay in s.relays.items() if name.startswith(role) for call in relay.calls]
        assert len(calls) == num_attempts, (role, calls)
    until = asyncio.get_running_loop().time() + CLOSED_S
    while any(call.ended is None for relay in s.relays.values() for call in relay.calls):
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.02)


# ---------------------------------------------------------------------- 2, 4: a worker fails before the first byte

HTML = answer(500, b"<html>Internal Server Error</html>", **{"content-type": "text/html"})
EARLY: dict[str, tuple[Act, int, str, bool]] = {
    "reset": (RESET, 503, "worker_unavailable", True),
    "reset under way": (Act("reset", after_s=0.1), 503, "worker_unavailable", True),
    "500": (refusal(EngineFault("x")), 500, "engine_fault", False),
    "502": (refusal(TransferFailed("x")), 502, "transfer_failed", True),
    "503": (refusal(WorkerUnavailable("x", code="draining")), 503, "draining", True),
    "overloaded": (refusal(Overloaded("x", retry_after_s=7)), 503, "overloaded", True),
    "nonsense": (HTML, 502, "bad_worker_answer", False),
}


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_worker_fails_before_the_first_byte(tiny: MakeCheckpoint, tmp_path: Path, role: str) -> None:
    async with site(tiny("2.0"), tmp_path, num=2) as s:
        _, right, _ = await s.ask(is_streamed=False)
        assert isinstance(right, list)
        for (name, (act, status, code, retries)), is_streamed in product(EARLY.items(), (False, True)):
            failing = s.script(role, act)
            said = await timely(s.ask(is_streamed=is_streamed, prompt=SLOW if act.after_s else PROMPT))
            assert said[:2] == (status, code), name
            attempts = [call for relay in failing for call in relay.calls]
            numbers = [call.headers["x-longcat-attempt"] for call in sorted(attempts, key=lambda call: call.began)]
            assert numbers == (["1", "2"] if retries else ["1"]), name
            assert len({call.headers["x-longcat-transfer-id"] for call in attempts}) == len(attempts)
            assert len({call.headers["x-request-id"] for call in attempts}) == 1
            assert code != "overloaded" or said[2]["retry-after"] == "7"
            await both_closed(s, len(attempts))
            await s.check(right)


@pytest.mark.parametrize("role", [pytest.param("p", marks=pytest.mark.slow), "d"])
async def test_the_prefill_of_a_failed_attempt_does_not_run_to_its_end(
    tiny: MakeCheckpoint, tmp_path: Path, role: str
) -> None:
    async with site(tiny("2.0"), tmp_path) as s:
        _, right, _ = await s.ask(is_streamed=False)
        assert isinstance(right, list)
        before = s.steps("p0", "prefill")
        s.script(role, Act("reset", after_s=0.5))
        assert (await s.ask(is_streamed=False, prompt=SLOW))[:2] == (503, "worker_unavailable")
        await s.behind.idle_within()
        assert 0 < s.steps("p0", "prefill") - before < 7, "the prompt has seven chunks"
        await s.check(right)


# ---------------------------------------------------------------------- 3: cause and echo

NUM_TURNS, ENDLESS = 6, 1900  # tokens of a request that fills an instance


async def fill(s: Site, number: str) -> list[asyncio.Future[Any]]:
    """A request for p0 and d0 of which the balancer knows nothing."""
    headers = {"X-Longcat-Transfer-Id": number * 32, "X-Longcat-Deadline-Ms": "60000"}
    legs = []
    for instance, peer in (("p0", "d0"), ("d0", "p0")):
        url = f"http://127.0.0.1:{s.behind.parts[instance].spec.http_port}/v1/completions"
        sent = s.topology.client.post(
            url, json={**BODY, "max_tokens": ENDLESS}, headers={**headers, "X-Longcat-Peer": peer}
        )
        legs.append(asyncio.ensure_future(sent))
    return legs


async def holds_one(s: Site, figure: str) -> None:
    """Until it is so at d0."""
    until = asyncio.get_running_loop().time() + 10.0
    while (await s.behind.account())["instances"]["d0"]["driver"][figure] != 1:
        assert asyncio.get_running_loop().time() < until, figure
        await asyncio.sleep(0.01)


async def test_who_has_no_room_is_blamed_though_its_peer_tells_it_first(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    long = {"max_model_len": 2048}
    full = {**long, "max_num_seqs": 1, "max_queued_requests": 1}
    async with site(tiny("2.0"), tmp_path, num_decode=2, prefill_engine=long, decode_engine=full) as s:
        _, right, _ = await s.ask(is_streamed=False)
        running = await fill(s, "a")
        await holds_one(s, "requests_running")
        waiting = await fill(s, "b")
        await holds_one(s, "requests_waiting")
        s.script("none")
        s.relays["d0"].script(Act("pass", after_s=0.1))
        for number in range(NUM_TURNS):
            assert (await s.ask(is_streamed=bool(number % 2)))[:2] == (200, right)
        assert not any(leg.done() for leg in (running[1], *waiting)), "there was no room at d0 all the time"
        assert await s.metric("retries_total") == len(s.relays["d0"].calls) >= NUM_TURNS // 2
        assert await s.metric("breaker_open") == 0
        for leg in (*running, *waiting):
            leg.cancel()
        await asyncio.gather(*running, *waiting, return_exceptions=True)
        assert isinstance(right, list)
        await s.check(right)


# ---------------------------------------------------------------------- 5: a stream that breaks


async def test_a_stream_breaks_behind_good_events(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    async with site(tiny("2.0", with_tokenizer=True), tmp_path, num=2) as s:
        _, right, _ = await s.ask(is_streamed=False, max_tokens=LONG)
        assert isinstance(right, list)
        failing = s.script("d", Act("cut", num_events=NUM_GOOD))
        found = await s.topology.client.post("/v1/completions", json={**BODY, "max_tokens": LONG, "stream": True})
        assert found.status_code == 200
        *events, rest = found.text.split("\n\n")
        assert rest == "" and all(event.startswith("data: {") for event in events)
        values = [json.loads(event.removeprefix("data: ")) for event in events]
        told = [token for value in values[:-1] for token in value["choices"][0]["token_ids"]]
        assert len(values) == NUM_GOOD + 1 and told == right[: len(told)] and len(told) >= NUM_GOOD
        assert values[-1]["error"]["code"] == "worker_unavailable"
        assert sum(len(relay.calls) for relay in failing) == 1, "no second attempt"
        await both_closed(s, 1)
        async with openai.AsyncOpenAI(base_url=f"{s.topology.url}/v1", api_key="x", max_retries=0) as sdk:
            extra = {"return_token_ids": True, "ignore_eos": True}
            asked = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "extra_body": extra}
            stream = await sdk.completions.create(model="", stream=True, **asked)
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
        await s.check(right[:6])


async def test_with_failover_the_rest_of_a_broken_stream_comes_from_another_pair(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    async with site(tiny("2.0", with_tokenizer=True), tmp_path, num=2, balancer={"failover": True}) as s:
        _, right, _ = await s.ask(is_streamed=False, max_tokens=LONG)
        assert isinstance(right, list)
        for name in ("d0", "d1"):  # whichever has its turn
            s.script("none")
            s.relays[name].script(Act("cut", num_events=NUM_GOOD), PASS)
            for _ in range(2):
                assert (await s.ask(is_streamed=True, max_tokens=LONG))[:2] == (200, right)
            assert s.relays[name].calls, "it had its turn"
        await s.check(right[:6])
        assert await s.metric("failovers_total") >= 2  # counted behind the answer


# ---------------------------------------------------------------------- 7: a failure that repeats


@pytest.mark.slow
async def test_a_failure_that_repeats_costs_no_more_than_its_retries_and_heals(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    async with site(tiny("2.0"), tmp_path, num=2) as s:
        _, right, _ = await s.ask(is_streamed=False)
        failing = s.script("p", Act("reset", after_s=0.02))
        began = asyncio.get_running_loop().time()
        asked = asyncio.gather(*(s.ask(is_streamed=False) for _ in range(100)))
        undisturbed = await s.behind.complete(PROMPT)  # by the other balancer, over the same workers
        assert undisturbed["token_ids"] == right
        for status, code, _ in await asyncio.wait_for(asked, 30.0):
            assert (status, code) == (503, "worker_unavailable")
        print(f"100 failures in {asyncio.get_running_loop().time() - began:.1f} s")
        by_request: dict[str, list[Any]] = {}
        for relay in failing:
            for call in relay.calls:
                by_request.setdefault(call.headers["x-request-id"], []).append(call)
        assert sum(map(len, by_request.values())) <= 100 * 2
        for calls in by_request.values():
            first, *second = sorted(calls, key=lambda call: call.began)
            assert len(second) <= 1 and all(first.ended <= call.began for call in second)
        s.relays["p1"].script(PASS)  # one heals
        healed = asyncio.get_running_loop().time()
        while (await s.ask(is_streamed=False))[:2] != (200, right):
            assert asyncio.get_running_loop().time() - healed < 2.0 + KNOWN_S
        print(f"good answers {asyncio.get_running_loop().time() - healed:.2f} s after one has healed")
        await s.behind.idle_within()


# ---------------------------------------------------------------------- 8: errors that are not the workers'

BAD: tuple[dict[str, Any], ...] = (
    {"max_tokens": 5000},
    {"prompt": [999_999]},
    {"temperature": 9},
    {"model": "another"},
    {"prompt": []},
    {"logit_bias": {"999999": 1}},
    {"n": "2"},
    {"stop": [""]},
)


@pytest.mark.slow
async def test_errors_that_are_not_the_workers_put_nobody_out(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Each round: 40 bad ones, and 10 at once of which one is running, one waits and some are more than may be open."""
    narrow = {"max_num_seqs": 1, "max_queued_requests": 1}
    async with site(tiny("2.0"), tmp_path, balancer={"max_inflight": 8}, prefill_engine=narrow, decode_engine=narrow) as s:
        _, right, _ = await s.ask(is_streamed=False)
        assert isinstance(right, list)
        found: dict[int, int] = {}
        for number in range(NUM_ROUNDS):
            for start in range(0, 40, 5):
                asked = [s.ask(is_streamed=False, **BAD[(start + i + number) % len(BAD)]) for i in range(5)]
                for status, code, _ in await asyncio.gather(*asked):
                    assert status in (400, 404), code
                    found[status] = found.get(status, 0) + 1
            for status, code, headers in await asyncio.gather(*(s.ask(is_streamed=False) for _ in range(10))):
                assert (status, code) in [(200, right), (429, "too_many_requests"), (503, "overloaded")]
                assert status == 200 or int(headers["retry-after"]) >= 1
                found[status] = found.get(status, 0) + 1
            assert (await s.ask(is_streamed=bool(number % 2)))[:2] == (200, right), "every good one is served"
            said = (await s.topology.client.get("/ready")).json()
            assert said["ready"] and all(instance["ready"] for instance in said["instances"].values())
        print(found)
        assert set(found) == {200, 400, 404, 429, 503}
        assert await s.metric("breaker_open") == 0
        await s.check(right)
