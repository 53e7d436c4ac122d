import asyncio
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from longcat_pd import log


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_line_is_time_level_event_and_facts() -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    log.logger().warning("peer_down", peer="d0", seconds=5.0, note="no beat", ok=False, pair=("p0", "d0"))
    line = out.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning peer_down peer=d0 seconds=5 "
        r'note="no beat" ok=false pair=p0,d0\n',
        line,
    )


def test_values_never_break_a_line() -> None:
    out = io.StringIO()
    log.set_up(stream=out)
    log.logger().info("x", detail='a\nb="c"', empty="")
    assert out.getvalue().count("\n") == 1
    assert r'detail="a\nb=\"c\"" empty=""' in out.getvalue()


def test_level_hides_what_is_below() -> None:
    out = io.StringIO()
    log.set_up(level="warning", stream=out)
    log.logger().info("ready")
    log.logger().error("rank_lost")
    assert "ready" not in out.getvalue()
    assert "error rank_lost" in out.getvalue()


async def test_the_request_id_follows_its_task_and_no_other() -> None:
    out = io.StringIO()
    log.set_up(stream=out)

    async def one(name: str) -> None:
        log.bind_request(name)
        await asyncio.sleep(0)
        log.logger().info("request_finished", who=name)

    await asyncio.gather(one("a"), one("b"))
    log.logger().info("outside")
    lines = out.getvalue().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "request_finished who=a request=a",
        "request_finished who=b request=b",
        "outside",
    ]


def test_a_file_is_appended_to_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "p0.log"
    made_before = log.logger()
    with log.set_up(path=str(path)):
        made_before.info("starting")
    with log.set_up(path=str(path)):
        made_before.info("stopped")
    assert [line.split()[2] for line in path.read_text().splitlines()] == ["starting", "stopped"]
