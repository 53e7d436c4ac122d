"""``POST /admin/fault`` at a worker and at the balancer: what is set where, who may, and that it is not there when off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, Role, TransferConfig
from longcat_pd.faults import Fault, FaultOrder
from longcat_pd.load_balancer.face import Keys
from longcat_pd.server.fault_board import FaultBoard
from longcat_pd.server.intake import KeyRing
from longcat_pd.wire import Unsendable
from tests.balancer_rig import LegCall, Reply, Rig, never, raw
from tests.unit.fake_service import FakeService, make_app, plays, write_folder

SLOW = {"name": "slow_step", "seconds": 2.0, "rank": 1}


class Ranks:
    """Two of them. ``is_gone``: they cannot be told."""

    def __init__(self) -> None:
        self.told: list[tuple[FaultOrder, int | None]] = []
        self.is_gone = False

    def order(self, order: FaultOrder, rank: int | None) -> None:
        if self.is_gone:
            raise Unsendable("no such rank")
        self.told.append((order, rank))


def board(role: Role = "decode") -> tuple[FaultBoard, Ranks]:
    ranks = Ranks()
    spec = InstanceSpec(
        name="d0",
        role=role,
        host="127.0.0.1",
        http_port=1,
        device="cpu",
        model=ModelSection(path="m"),
        parallel=ParallelConfig(kvp_size=2),
        engine=EngineConfig(),
        transfer=TransferConfig(),
        faults=True,
    )
    return FaultBoard(spec, ranks.order), ranks


async def post(app: Any, told: Any, **headers: str) -> tuple[int, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w") as client:
        answer = await client.post("/admin/fault", content=json.dumps(told), headers=headers)
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


async def test_a_switch_is_set_listed_and_cleared(folder: str) -> None:
    made, ranks = board()
    app = make_app(FakeService(folder, plays([]), role="decode"), faults=made.routes())
    assert await post(app, {}) == (200, {"instance": "d0", "faults": []})
    assert await post(app, {"instance": "d0", **SLOW}) == (200, {"instance": "d0", "faults": [SLOW]})
    fault = Fault(name="slow_step", seconds=2.0, rank=1)
    assert ranks.told == [(FaultOrder(fault=fault), 1)], "the ranks have it, and not the driver"
    assert made.switches.listed() == ()
    mute = {"name": "mute_control"}
    assert (await post(app, mute))[1]["faults"] == [mute, SLOW]
    assert made.switches.is_on("mute_control") and len(ranks.told) == 1, "the driver has it, and not the ranks"
    assert (await post(app, {"clear": "slow_step"}))[1]["faults"] == [mute]
    assert (await post(app, {"clear": "all"}))[1]["faults"] == []
    assert ranks.told[1:] == [(FaultOrder(clear="slow_step"), None), (FaultOrder(), None)]
    assert not made.switches.is_on("mute_control")


@pytest.mark.parametrize(
    "told, said",
    [
        ({"instance": "d1", **SLOW}, "instance = 'd1' is not d0"),
        ({**SLOW, "rank": 2}, "rank = 2: the ranks of d0 are 0 ... 1"),
        ({"name": "slow"}, "name = 'slow' is no switch"),
        ({"name": "lane_cut"}, "lane_cut: lanes have their faults where they begin, at a prefill instance"),
        ({"clear": "slow"}, "clear = 'slow' is no switch"),
        ({"clear": "all", "name": "spin"}, "clear: the name of a switch, or all; alone"),
        ({"clear": True}, "clear: the name of a switch, or all; alone"),
        ([], "the body is not a JSON object"),
    ],
)
async def test_what_cannot_be_set_is_refused(folder: str, told: Any, said: str) -> None:
    made, ranks = board()
    app = make_app(FakeService(folder, plays([]), role="decode"), faults=made.routes())
    status, answer = await post(app, told)
    assert status == 400 and answer["error"]["message"].startswith(said), answer
    assert ranks.told == [] and made.switches.listed() == ()


async def test_a_standalone_engine_has_no_peers_and_gone_ranks_cannot_be_told(folder: str) -> None:
    made, ranks = board("standalone")
    app = make_app(FakeService(folder, plays([])), faults=made.routes())
    status, answer = await post(app, {"name": "mute_control"})
    assert status == 400 and "has no peers" in answer["error"]["message"]
    ranks.is_gone = True
    status, answer = await post(app, SLOW)
    assert (status, answer["error"]["code"]) == (503, "worker_unavailable")
    assert made.listed()["faults"] == []


async def test_there_is_no_route_where_faults_are_off_and_a_key_where_there_are_keys(folder: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("chief\n")
    service = FakeService(folder, plays([]), role="decode")
    for front in ({}, {"admin_key_file": str(keys)}):
        status, answer = await post(make_app(service, **front), {}, authorization="Bearer chief")
        assert (status, answer["error"]["code"]) == (404, "unknown_route")
    app = make_app(service, faults=board()[0].routes(), admin_key_file=str(keys))
    assert (await post(app, SLOW))[0] == 401
    assert (await post(app, SLOW, authorization="Bearer thief"))[0] == 401
    assert (await post(app, SLOW, authorization="Bearer chief"))[0] == 200


async def test_the_balancer_passes_it_on() -> None:
    rig, heard = await Rig.make("p0 d0", has_faults=True, key="cluster"), []

    async def fault(call: LegCall) -> Reply:
        heard.append((call.worker, json.loads(call.body)))
        return await raw(200, json.dumps({"instance": call.worker, "faults": []}).encode())(call)

    for name in ("p0", "d0"):
        rig.cluster.routes[name, "/admin/fault"] = fault
    exchange = await rig.post({"instance": "d0", **SLOW}, "/admin/fault").end()
    assert exchange.status == 200 and json.loads(exchange.body) == {"instance": "d0", "faults": []}
    assert heard == [("d0", {"instance": "d0", **SLOW})]
    exchange = await rig.post({"clear": "all"}, "/admin/fault").end()
    assert sorted(json.loads(exchange.body)["instances"]) == ["d0", "p0"]
    assert heard[1:] == [("p0", {"clear": "all"}), ("d0", {"clear": "all"})]
    for told in ({"instance": "d7", **SLOW}, SLOW, {"instance": 1}):
        assert (await rig.post(told, "/admin/fault").end()).status == 400
    assert len(heard) == 3


async def test_an_instance_that_does_not_answer_is_not_waited_for() -> None:
    rig = await Rig.make("p0 d0", has_faults=True)
    rig.cluster.routes["d0", "/admin/fault"] = never
    exchange = rig.post({"instance": "d0"}, "/admin/fault")
    await rig.clock.advance(6.0)
    assert (await exchange.end()).status == 503


async def test_one_that_is_gone_keeps_nothing_from_the_others() -> None:
    rig = await Rig.make("p0 p1 d0", has_faults=True)
    rig.cluster.routes["p0", "/admin/fault"] = never
    rig.cluster.routes["p1", "/admin/fault"] = raw(503, b'{"error": {"message": "m", "code": "worker_unavailable"}}')
    rig.cluster.routes["d0", "/admin/fault"] = raw(200, b'{"instance": "d0", "faults": []}')
    exchange = rig.post({"clear": "all"}, "/admin/fault")
    await rig.clock.advance(6.0)
    done = await exchange.end()
    answers = json.loads(done.body)["instances"]
    assert (done.status, answers["d0"]) == (200, {"instance": "d0", "faults": []})
    assert [answers[name]["error"]["code"] for name in ("p0", "p1")] == ["worker_unavailable"] * 2


async def test_at_the_balancer_the_operator_s_key_counts_or_the_client_s() -> None:
    off = await Rig.make("p0 d0", keys=Keys(admin=KeyRing([b"chief"])))
    assert (await off.post({}, "/admin/fault", authorization="Bearer chief").end()).status == 404
    for keys, right, wrong in (
        (Keys(client=KeyRing([b"guest"]), admin=KeyRing([b"chief"])), "chief", "guest"),
        (Keys(client=KeyRing([b"guest"])), "guest", "chief"),
    ):
        rig = await Rig.make("p0 d0", has_faults=True, keys=keys)
        rig.cluster.routes["d0", "/admin/fault"] = raw(200, b'{"instance": "d0", "faults": []}')
        told = {"instance": "d0"}
        assert (await rig.post(told, "/admin/fault").end()).status == 401
        assert (await rig.post(told, "/admin/fault", authorization=f"Bearer {wrong}").end()).status == 401
        assert (await rig.post(told, "/admin/fault", authorization=f"Bearer {right}").end()).status == 200
