"""The events that operators build on: name, level and facts of each, as the source writes them and as real paths emit them."""

# ruff: noqa: E501 - tables

import ast
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longcat_pd import log
from longcat_pd.clock import BREAKER_FAILURES, LINK_SILENT_S
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, TransferConfig
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.roster import RANK_SILENT_S, Roster
from longcat_pd.kv_transfer.control import Link
from tests.balancer_rig import BODY, Rig, raises, reset, whole
from tests.manual_clock import ManualClock
from tests.syntax import parsed
from tests.unit.control_rig import hello

PACKAGE = Path(__file__).parents[2] / "longcat_pd"

# event -> levels it may have, facts that stand on every line of it. An event with two writers (balancer and workers) has the
# facts that both give; the line of a defect, which has its trace instead, is left out.
EVENTS: dict[str, tuple[set[str], set[str]]] = {
    "starting": ({"info"}, {"role"}),
    "config_resolved": ({"info"}, {"seconds"}),
    "plan": ({"info"}, set()),
    "listening": ({"info"}, {"port"}),
    "weights_loaded": ({"info"}, {"seconds", "bytes"}),
    "warmed_up": ({"info"}, {"seconds"}),
    "ready": ({"info"}, {"seconds"}),
    "stopped": ({"info"}, {"exit_status"}),
    "request_finished": ({"info"}, {"finish"}),
    "request_failed": ({"warning", "error"}, {"status", "code", "cause"}),
    "request_cancelled": ({"info"}, {"by", "hop"}),
    "leg_failed": ({"warning"}, {"leg", "target", "cause", "code", "attempt", "transfer"}),
    "retry": ({"warning"}, {"attempt", "old_transfer", "transfer"}),
    "transfer_aborted": ({"warning"}, {"transfer", "peer", "reason"}),
    "blocks_quarantined": ({"warning"}, {"transfer", "blocks"}),
    "instance_out": ({"warning"}, {"target", "reason"}),
    "instance_in": ({"info"}, {"target"}),
    "breaker_opened": ({"warning"}, {"target", "reason"}),
    "breaker_closed": ({"info"}, {"target"}),
    "peer_up": ({"info"}, {"peer", "incarnation"}),
    "peer_down": ({"warning"}, {"peer", "incarnation"}),
    "peer_mismatch": ({"error"}, {"peer", "field", "ours", "theirs"}),
    "rank_silent": ({"warning"}, {"rank", "node", "seconds"}),
    "step_overdue": ({"warning"}, {"rank", "seconds", "step_id"}),
    "rank_lost": ({"error"}, {"rank", "node", "step_id", "reason"}),
    "rank_stack": ({"error"}, {"rank"}),
    "drain_started": ({"info"}, {"open"}),
    "undrained": ({"info"}, {"open"}),
    "drain_finished": ({"info"}, {"open", "cut", "seconds"}),
}  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")


def written() -> Iterator[tuple[str, str, set[str] | None, str]]:
    """Event, level, facts (None: not all can be read off) and place of every line that the source writes."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.args[0].value
            if name not in EVENTS:
                continue
            facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            is_whole = len(facts) == len(node.keywords)
            place = f"{file.relative_to(PACKAGE)}:{node.lineno}"
            if isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                yield name, node.func.attr, None if "exc_info" in facts or not is_whole else facts, place
            elif isinstance(node.func, ast.Name) and node.func.id in ("tell", "write"):  # by what has happened
                yield name, "", None if not is_whole else facts, place


def test_every_event_is_written_with_its_level_and_facts_wherever_it_is():
    found = list(written())
    assert {name for name, *_ in found} == set(EVENTS)
    for name, level, facts, place in found:
        levels, needed = EVENTS[name]
        assert not level or level in levels, place
        assert facts is None or facts >= needed, f"{place}: {name} lacks {needed - facts}"


@pytest.fixture
def lines() -> Iterator[Callable[[str], str]]:
    """Gives the one line of an event, after level and facts have been looked at."""
    out = io.StringIO()
    log.set_up(stream=out)

    def only(name: str) -> str:
        (line,) = [line for line in out.getvalue().splitlines() if line.split(" ")[2] == name]
        levels, needed = EVENTS[name]
        facts = {word.partition("=")[0] for word in line.split(" ")[3:]}
        assert line.split(" ")[1] in levels and facts >= needed, line
        return line

    yield only
    log.set_up()


async def test_a_link_tells_of_its_peer(lines):
    clock = ManualClock()
    link = Link("p0", hello("d0", "decode"), clock)
    link.greeted(hello("p0", "prefill", incarnation="one"))
    assert "incarnation=one" in lines("peer_up")
    await clock.advance(LINK_SILENT_S + 1.0)
    assert link.is_silent()
    lines("peer_down")
    link.greeted(hello("p0", "prefill", incarnation="two", block_size=7))
    assert "field=block_size" in lines("peer_mismatch") and lines("peer_mismatch").endswith("theirs=7")


def test_a_rank_that_is_silent_is_told_with_its_node(lines):
    here = InstanceSpec(
        name="d0", role="decode", host="10.0.0.1", http_port=31000, device="cpu", model=ModelSection(path="nowhere"),
        parallel=ParallelConfig(dp_size=4), engine=EngineConfig(), transfer=TransferConfig(), nodes=("10.0.0.1", "10.0.0.2"),
    )  # fmt: skip
    roster = Roster(rank_specs(here, "life"), now=0.0)
    for rank in roster.ranks[:3]:
        rank.heard_at = 100.0
    roster.silence(RANK_SILENT_S + 1.0, 100.0)
    assert "rank=3 node=1" in lines("rank_silent")


async def test_a_balancer_tells_of_its_workers_and_of_each_request_once(lines):
    rig = await Rig.make("p0 d0 d1")
    rig.script(d0=raises(reset), d1=whole)
    await rig.post({**BODY, "prompt": "geheim"}, **{"X-Request-Id": "story"}).end()
    for name in ("leg_failed", "retry", "request_finished"):
        assert lines(name).endswith("request=story")
    pool = rig.means.pool
    for _ in range(BREAKER_FAILURES):
        pool.failed(pool.instances["d1"])
    assert "target=d1" in lines("breaker_opened")
    pool.succeeded(pool.instances["d1"])
    lines("breaker_closed")
    rig.cluster.ready["p0"]["ready"] = False
    await rig.poll()
    assert "target=p0" in lines("instance_out")
