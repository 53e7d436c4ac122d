"""The status page of the balancer: what is served to whom, what a snapshot holds, and that nobody is asked for nobody."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import re
from typing import Any

import pytest

from longcat_pd.load_balancer import lookout
from longcat_pd.load_balancer.face import Keys
from longcat_pd.load_balancer.lookout import MAX_VIEWERS
from longcat_pd.server.intake import KeyRing
from tests.balancer_rig import BODY, COMPLETIONS, Exchange, LegCall, Rig, error, good_stream, raw, refused
from tests.manual_clock import settle

SECRET = "a-very-secret-prompt"


def rank(number: int, state: str = "ok") -> dict[str, Any]:
    blocks = {"total": 10, "free": 6, "cached": 1, "reserved": 1, "live": 2, "quarantined": 0}
    return {
        "rank": number,
        "state": state,
        "silent_s": 0.2,
        "blocks": blocks,
        "slots": {"total": 4, "used": 1},
        "lanes": {"posted": 0, "unsent": 0},
        "missed": "",
        "waits_for": "",
        "stands_in": "",
    }


class Seen:
    """A cluster whose instances show themselves; counts how often they are asked."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.asked: list[str] = []
        self.requests: dict[str, list[dict[str, Any]]] = {}
        self.states = ("ok", "ok")  # of the ranks of each
        for name, instance in rig.means.pool.instances.items():
            nodes, stages = ("10.0.0.1", "10.0.0.2"), 2 if name[0] == "p" else 1
            instance.target = dataclasses.replace(instance.target, nodes=nodes, num_ranks=2, stages=stages)
            rig.cluster.routes[name, "/debug/seen"] = self.answer

    async def answer(self, call: LegCall) -> Any:
        self.asked.append(call.worker)
        value = {
            "waiting": 3,
            "running": 2,
            "slots": 16,
            "transfers": 1,
            "accepted": 2.5 if call.worker[0] == "d" else None,
            "step_ms": {"prefill": None, "decode": 12.5},
            "ranks": [rank(0, self.states[0]), rank(1, self.states[1])],
            "requests": self.requests.get(call.worker, []),
        }
        return await raw(200, json.dumps(value).encode())(call)


async def seen(names: str = "p0 d0", **options: Any) -> Seen:
    return Seen(await Rig.make(names, **options))


async def status(rig: Rig) -> dict[str, Any]:
    await rig.clock.advance(1.0)  # else it is the one before
    answer = await rig.get("/status")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def words(snapshot: dict[str, Any]) -> str:
    return " ".join(one["words"] for one in snapshot["wrong"])


async def leave(exchange: Exchange) -> None:
    await exchange.leave()
    await asyncio.gather(exchange.task, return_exceptions=True)


async def test_the_page_runs_only_what_is_in_it_and_asks_nobody_else() -> None:
    rig = await Rig.make()
    page = await rig.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), page.body, re.DOTALL)
        assert len(texts) == page.body.count(f"<{kind}".encode()) == 1, kind
        digest = base64.b64encode(hashlib.sha256(texts[0]).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.search(rb"\son[a-z]+=|\sstyle=|<(img|iframe|object|base)\b|@import|url\(|innerHTML|eval\(", page.body)
    addresses = set(re.findall(rb"https?://[^\"'\s]+|(?:src|href)=\"[^\"]*\"", page.body))
    assert addresses == {b"http://www.w3.org/2000/svg", b'href="data:,"', b'href="#wrong-title"'}  # a name, an empty icon
    assert (await rig.get("/", method="HEAD")).status == 200


async def test_facts_are_for_who_has_a_key_and_the_page_is_for_everybody() -> None:
    s = await seen(keys=Keys(client=KeyRing([b"right"])))
    assert (await s.rig.get("/")).status == 200
    for path in ("/status", "/status/events"):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await s.rig.get(path, **headers)).status == 401, path
    assert s.asked == []
    assert (await s.rig.get("/status", authorization="Bearer right")).status == 200
    assert (await s.rig.get("/status/events", method="HEAD", authorization="Bearer right")).status == 200


async def test_a_snapshot_of_what_is_well() -> None:
    s = await seen()
    s.rig.script(d0=good_stream)
    await s.rig.post({**BODY, "stream": True}, **{"x-request-id": "one"}).end()
    transfer = s.rig.cluster.of("d0")[0].headers["x-longcat-transfer-id"]
    s.requests["d0"] = [
        {"transfer": "another", "began": 9.0, "events": []},
        {
            "transfer": transfer,
            "began": 0.5,
            "ended": None,
            "events": [["arrived", 0.5], ["granted", 0.25]],
            "steps": [0.125],
        },
    ]
    found = await status(s.rig)
    assert (found["ready"], found["wrong"], found["model"], found["open"]) == (True, [], "longcat", 0)
    p0, d0 = found["instances"]
    assert [i["name"] for i in (p0, d0)] == ["p0", "d0"] and p0["state"] == d0["state"] == "in"
    assert (d0["waiting"], d0["running"], d0["transfers"], d0["accepted"]) == (3, 2, 1, 2.5)
    assert d0["step_ms"]["decode"] == 12.5 and p0["stages"] == 2
    shown = p0["ranks"][1]
    assert (shown["name"], shown["node"]) == ("rank 1 (stage 1) on 10.0.0.2", "10.0.0.2")
    assert (shown["state"], shown["blocks"]["live"]) == ("ok", 2)
    assert d0["ranks"][1]["name"] == "rank 1 (place 1) on 10.0.0.2"
    request = found["requests"][0]
    assert (request["id"], request["pair"], request["outcome"], request["ended"]) == ("one", ["p0", "d0"], "stop", 1.0)
    assert [(side["instance"], side["transfer"]) for side in request["sides"]] == [("d0", transfer)]
    assert request["sides"][0]["events"] == [["arrived", 0.5], ["granted", 0.25]] and request["sides"][0]["steps"] == [
        0.125
    ]


async def test_a_lost_rank_is_named_before_and_after_its_instance_is_gone() -> None:
    s = await seen("p0 p1 d0")
    await status(s.rig)
    lost = {"code": "rank_lost", "detail": "rank 1 ended with status -9", "rank": 1}
    s.rig.cluster.ready["p1"] |= {"ready": False, "reasons": [lost], "ranks": {"total": 2, "ok": 1}}
    await s.rig.poll()
    await s.rig.clock.advance(3.0)
    sentence = "p1 has lost rank 1 (stage 1) on 10.0.0.2: rank 1 ended with status -9."
    for is_gone in (False, True):
        found = await status(s.rig)
        complaint = next(one for one in found["wrong"] if one["words"] == sentence)
        assert (complaint["level"], complaint["instance"], complaint["rank"]) == ("error", "p1", 1)
        assert complaint["since_s"] == pytest.approx(5.0 if is_gone else 4.0)
        p1 = found["instances"][1]
        assert [r["state"] for r in p1["ranks"]] == (["gone", "lost"] if is_gone else ["ok", "lost"])
        assert ("p1 is out: nobody answers at its address." in words(found)) is is_gone
        assert found["ready"] and p1["state"] == "out"
        s.rig.cluster.ready["p1"] = refused()
        await s.rig.poll()
    assert tuple(found["happened"][0][key] for key in ("target", "what", "reason")) == ("p1", "out", "rank_lost")
    s.rig.cluster.ready["p1"] = {**s.rig.cluster.ready["p0"], "instance": "p1", "config_digest": "digest-p1"}
    await s.rig.poll()
    found = await status(s.rig)
    assert found["wrong"] == [] and found["happened"][0]["what"] == "in"


async def test_no_rank_is_lost_before_there_are_words_for_it() -> None:
    """The figures are asked for with each snapshot, the reasons with each poll: one may know what the other does not."""
    s = await seen()
    s.states = ("lost", "lost")  # as the last one of a machine that is gone
    found = await status(s.rig)
    assert [r["state"] for i in found["instances"] for r in i["ranks"]] == ["unknown"] * 4
    assert found["wrong"] == [] and found["ready"]
    lost = {"code": "rank_lost", "detail": "rank 0 ended with status -9", "rank": 0}
    s.rig.cluster.ready["d0"] |= {"ready": False, "reasons": [lost], "ranks": {"total": 2, "ok": 0}}
    await s.rig.poll()
    found = await status(s.rig)
    assert [[r["state"] for r in i["ranks"]] for i in found["instances"]] == [["unknown"] * 2, ["lost", "unknown"]]
    assert [one["words"] for one in found["wrong"]] == [
        "No request can be served: no decode instance is ready (d0 rank_lost).",
        "d0 has lost rank 0 (place 0) on 10.0.0.1: rank 0 ended with status -9.",
    ]
    s.rig.cluster.ready["d0"] |= {"ready": True, "reasons": [], "incarnation": "d0-2"}  # and shows nothing of itself yet
    await s.rig.poll()
    found = await status(s.rig)
    assert found["wrong"] == [] and [r["state"] for r in found["instances"][1]["ranks"]] == ["unknown"] * 2
    s.rig.cluster.ready["d0"] = refused()
    await s.rig.poll()
    found = await status(s.rig)
    assert [r["state"] for r in found["instances"][1]["ranks"]] == ["gone"] * 2


async def test_what_else_is_wrong_is_said_in_words() -> None:
    s = await seen("p0 p1 d0", keys=Keys(admin=KeyRing([b"chief"])))
    s.rig.cluster.ready["p0"]["peers"] = {"d0": "down"}
    silent = {"code": "rank_silent", "detail": "no heartbeat for 6.1 s", "rank": 0}
    s.rig.cluster.ready["p1"] |= {"ready": False, "reasons": [silent]}
    await s.rig.poll()
    told = words(await status(s.rig))
    assert "No request can be served: no prefill and decode instance hear each other." in told
    assert "p0 calls the link down, d0 up" in told
    assert "p1: rank 0 (stage 0) on 10.0.0.1 is silent: no heartbeat for 6.1 s." in told
    s.rig.cluster.ready["d0"] = refused()
    await s.rig.poll()
    assert "No request can be served: no decode instance is ready (d0 refused)." in words(await status(s.rig))
    await s.rig.post({"instance": "p0"}, path="/admin/drain", authorization="Bearer chief").end()
    await s.rig.post({}, path="/admin/drain", authorization="Bearer chief").end()
    found = await status(s.rig)
    assert "p0 was taken out of use by an operator; 0 requests are open there." in words(found)
    assert "The balancer takes no new requests; 0 are open." in words(found) and found["draining"] is True


async def test_an_open_breaker_is_told_with_its_age() -> None:
    s = await seen("p0 d0 d1", retry=0, failover=False)
    s.rig.script(d0=error(500, "engine_fault", "self"))
    for _ in range(10):
        await s.rig.post().end()
    await s.rig.clock.advance(1.0)
    found = await status(s.rig)
    complaint = next(one for one in found["wrong"] if "several in a row failed" in one["words"])
    assert (complaint["instance"], complaint["since_s"], complaint["level"]) == ("d0", 2.0, "warning")
    assert [i["breaker_open"] for i in found["instances"]] == [False, True, False]


async def test_events_come_each_second_and_nobody_is_asked_when_nobody_looks() -> None:
    s = await seen()
    await s.rig.clock.advance(5.0)
    assert s.asked == []
    first = Exchange(s.rig.app, "GET", "/status/events", b"", {})
    await settle()
    second = Exchange(s.rig.app, "GET", "/status/events", b"", {})
    await settle()
    assert first.headers["content-type"].startswith("text/event-stream")
    await s.rig.clock.advance(3.0)
    assert sorted(s.asked) == ["d0"] * 4 + ["p0"] * 4  # for both of them together
    for exchange in (first, second):
        assert [json.loads(event)["ready"] for event in exchange.events] == [True] * 4
    await leave(first)
    await s.rig.clock.advance(1.0)
    assert len(second.events) == 5
    await leave(second)
    asked = len(s.asked)
    await s.rig.clock.advance(60.0)
    assert len(s.asked) == asked and s.rig.face.lookout.num_viewers == 0


async def test_viewers_are_bounded_and_none_stays_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "VIEW_S", 10.0)
    s = await seen()
    viewers = [Exchange(s.rig.app, "GET", "/status/events", b"", {}) for _ in range(MAX_VIEWERS)]
    await settle()
    refused_one = await s.rig.get("/status/events")
    assert refused_one.status == 429 and "16 status pages" in refused_one.error["message"]
    assert (await s.rig.get("/status")).status == 200  # one look is not a viewer
    await leave(viewers.pop())
    assert (another := Exchange(s.rig.app, "GET", "/status/events", b"", {}))
    await settle()
    assert another.status == 200
    await s.rig.clock.advance(12.0)
    assert another.is_complete and s.rig.face.lookout.num_viewers == 0


async def test_a_viewer_that_does_not_read_is_given_up() -> None:
    s = await seen()
    stuck = Exchange(s.rig.app, "GET", "/status/events", b"", {})
    await settle()
    stuck.reads.clear()
    await s.rig.clock.advance(15.0)
    assert s.rig.face.lookout.num_viewers == 0 and stuck.task.done()


async def test_an_instance_that_does_not_answer_holds_nobody_up() -> None:
    s = await seen("p0 d0")
    await status(s.rig)
    never = asyncio.Event()

    async def hang(_: LegCall) -> Any:
        await never.wait()

    s.rig.cluster.routes["d0", "/debug/seen"] = hang
    s.rig.cluster.routes["p0", "/debug/seen"] = raw(200, b"[nonsense")
    await s.rig.clock.advance(2.0)
    asking = asyncio.ensure_future(s.rig.get("/status"))
    await s.rig.clock.advance(1.0)
    found = json.loads((await asking).body)
    assert [i["heard_s"] for i in found["instances"]] == [3.0, 3.0]
    assert found["instances"][1]["running"] == 2  # as it was


async def test_closing_the_balancer_ends_its_pages() -> None:
    s = await seen()
    viewer = Exchange(s.rig.app, "GET", "/status/events", b"", {})
    await settle()
    await s.rig.face.lookout.close()
    await settle()
    assert viewer.is_complete


async def test_no_secret_is_in_a_snapshot() -> None:
    s = await seen(keys=Keys(client=KeyRing([b"key-of-a-client"])), key="key-of-the-cluster")
    bad = error(400, SECRET, "client", kind="invalid_request_error")
    s.rig.script(p0=[bad, bad], d0=[bad, good_stream])
    body = {"prompt": SECRET, "max_tokens": 4, "stream": True}
    for _ in range(2):
        await s.rig.post(body, path=COMPLETIONS, authorization="Bearer key-of-a-client").end()
    await s.rig.clock.advance(1.0)
    answer = await s.rig.get("/status", authorization="Bearer key-of-a-client")
    text = answer.body.decode()
    assert answer.status == 200 and len(json.loads(text)["requests"]) == 2
    for secret in ("key-of-a-client", "key-of-the-cluster", "Bearer", '"content"'):
        assert secret not in text
