"""What is recorded of requests, whatever their end; and that a disk never costs a request."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.schema import InstanceSpec, RecordConfig
from longcat_pd.engine.request import Delta, Request, TokenOutput
from longcat_pd.errors import RankLost
from longcat_pd.server import record
from longcat_pd.server.bundle import Bundle, read_bundle
from longcat_pd.server.record import MOST_WAITING, Recorder
from longcat_pd.server.take import Take
from longcat_pd.server.text import TextProcessor
from tests.unit.control_rig import hello
from tests.unit.engine_rig import request
from tests.unit.fake_service import EOS, LEG, FakeService, Script, make_app, plays, write_folder

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


class Rig:
    def __init__(self, model: str, folder: Path, script: Script, *, role: str = "standalone", **config: Any) -> None:
        self.folder = folder
        self.service = FakeService(model, script, role=role)
        self.config = RecordConfig(dir=str(folder), **config)
        self.spec: InstanceSpec = replace(
            resolve.standalone(model, [], host="127.0.0.1", port=8081), name=self.service.name
        )
        peers = (hello("p0", "prefill", cp_size=2), hello("d0", "decode", kvp_size=2))
        self.recorder = Recorder(
            self.spec,
            self.config,
            computed_by=lambda peer: (hello(self.service.name, "standalone"),) if peer is None else peers,
            torch=lambda: "2.1",
            text=TextProcessor.load(model),
            clock=MonotonicClock(),
        )
        self.lines = io.StringIO()

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        app = make_app(self.service, recorder=self.recorder)
        log.set_up(stream=self.lines)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face") as client:
            body = {"prompt": [5, 6, 7], "return_token_ids": True, **fields}
            return await client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "r:1", **(headers or {})})

    async def bundles(self) -> list[Bundle]:
        await self.recorder.close()
        files = sorted(self.folder.iterdir()) if self.folder.exists() else []
        assert all(file.suffix == ".json" for file in files)
        return [read_bundle(str(file)) for file in files]


async def test_an_answer_is_recorded_as_it_was_asked_and_told(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "r", plays([300, 301, EOS]))
    answer = await rig.ask(temperature=0.5, top_k=7, presence_penalty=0.5, logit_bias={"9": 2}, logprobs=1)
    (found,) = await rig.bundles()
    assert answer.json()["choices"][0]["token_ids"] == list(found.answer_token_ids) == [300, 301, EOS]
    assert found.request_id == "r:1"
    assert found.prompt_token_ids == (5, 6, 7)
    assert found.sampling == rig.service.requests[0].sampling
    assert (found.sampling.top_k, found.sampling.logit_bias) == (7, ((9, 2.0),))
    assert found.sampling.seed != 0, "the one that the server drew"
    assert found.logprobs == (-0.5, -0.5, -0.5)
    assert (found.ending.outcome, found.ending.finish, found.ending.engine_finish) == ("finished", "stop", "stop")
    assert (found.model.path, found.model.digest, found.versions.torch) == (model, "m", "2.1")
    assert found.texts is None
    assert found.is_as_recorded


@pytest.mark.parametrize("stream", [False, True])
async def test_what_lies_behind_a_stop_string_does_not_count(model: str, tmp_path: Path, stream: bool) -> None:
    text = TextProcessor.load(model)
    stop = text.raw([301])
    rig = Rig(model, tmp_path / "r", plays([300, 301, 302, 303, EOS], group=3))
    await rig.ask(stop=[stop], stream=stream)
    (found,) = await rig.bundles()
    assert found.answer_token_ids == (300, 301)
    assert (found.ending.finish, found.ending.engine_finish) == ("stop", None)


async def test_texts_are_kept_only_where_that_is_said(model: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "prompt": "a secret question",
        "stop": ["quiet"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["hidden"]}}},
    }
    for has_texts in (False, True):
        rig = Rig(model, tmp_path / str(has_texts), plays([300, EOS]), texts=has_texts)
        assert (await rig.ask(**fields)).status_code == 200
        (found,) = await rig.bundles()
        (file,) = rig.folder.iterdir()
        written = file.read_text()
        assert ("secret" in written, "hidden" in written) == (has_texts, has_texts)
        assert "quiet" not in written
        assert found.has_grammar and not found.sampling.grammar
        assert "secret" not in rig.lines.getvalue()
        if has_texts:
            assert found.texts is not None
            assert found.texts.prompt.endswith("a secret question")
            assert found.texts.grammar == rig.service.requests[0].sampling.grammar


async def fails(_request: Request) -> AsyncGenerator[Delta, None]:
    yield Delta((TokenOutput(300),))
    raise RankLost("rank 1 is gone")


async def waits(_request: Request) -> AsyncGenerator[Delta, None]:
    yield Delta((TokenOutput(300),))
    await asyncio.sleep(60)


async def test_a_failure_is_recorded_with_its_code(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "r", fails)
    assert (await rig.ask()).status_code == 500
    (found,) = await rig.bundles()
    assert (found.ending.outcome, found.ending.code, found.answer_token_ids) == ("failed", "rank_lost", (300,))
    assert found.is_as_recorded


async def test_a_time_limit_is_a_failure_and_a_client_that_goes_is_none(model: str, tmp_path: Path) -> None:
    late = Rig(model, tmp_path / "late", waits)
    assert (await late.ask(headers={"X-Request-Timeout": "1"})).status_code == 504
    (found,) = await late.bundles()
    assert (found.ending.outcome, found.ending.code) == ("failed", "deadline_exceeded")
    has_begun = asyncio.Event()

    async def waits_seen(request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta((TokenOutput(300),))
        has_begun.set()  # the face has read the token and asks for more
        async for delta in waits(request):
            yield delta

    gone = Rig(model, tmp_path / "gone", waits_seen)
    asking = asyncio.ensure_future(gone.ask())
    await asyncio.wait_for(has_begun.wait(), 30)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    (found,) = await gone.bundles()
    assert (found.ending.outcome, found.ending.code, found.answer_token_ids[:1]) == ("cancelled", None, (300,))


async def test_each_choice_has_its_bundle_and_a_refused_body_has_none(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "r", plays([300, EOS]))
    assert (await rig.ask(n=3, seed=4)).status_code == 200
    assert (await rig.ask(temperature=3)).status_code == 400
    found = await rig.bundles()
    assert [one.sampling.choice for one in found] == [0, 1, 2]
    assert {one.sampling.seed for one in found} == {4}


async def test_a_leg_tells_both_sides(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "r", plays([300, EOS]), role="decode")
    assert (await rig.ask(headers=LEG, max_tokens=4)).status_code == 200
    (found,) = await rig.bundles()
    assert (found.sampling.seed, found.sampling.max_tokens) == (77, 16), "those of the offer"
    assert [one.name for one in found.instances] == ["p0", "d0"]
    assert found.instances[0].parallel == {"cp_size": 2}
    assert found.transfer_id == LEG["X-Longcat-Transfer-Id"]


async def test_a_folder_that_cannot_be_written_costs_no_request_and_few_lines(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "file" / "r", plays([300, EOS]))
    (tmp_path / "file").write_text("in the way")
    for _ in range(5):
        assert (await rig.ask()).status_code == 200
        await rig.recorder.close()
    told = [line for line in rig.lines.getvalue().splitlines() if "bundle_not_written" in line]
    assert [line.rpartition("count=")[2] for line in told] == ["1", "2", "4"]
    assert 'reason="Not a directory"' in told[0]
    assert "request=r:1" in told[0]


async def test_a_bundle_that_is_too_long_is_told_of(model: str, tmp_path: Path) -> None:
    rig = Rig(model, tmp_path / "r", plays([300, EOS]), max_bytes=300)
    assert (await rig.ask()).status_code == 200
    assert await rig.bundles() == []
    assert "300 are allowed" in rig.lines.getvalue()


async def test_a_slow_disk_holds_up_nobody_and_bounds_what_waits(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LAST_S", 60.0)
    rig = Rig(model, tmp_path / "r", plays([300, EOS]))
    log.set_up(stream=rig.lines)
    take = Take(request([5, 6, 7]), 1)
    for _ in range(MOST_WAITING + 10):  # all in one turn of the loop: nothing is written meanwhile
        rig.recorder.keep(take, "cancelled")
    assert len(await rig.bundles()) == MOST_WAITING
    told = [line for line in rig.lines.getvalue().splitlines() if "bundle_not_written" in line]
    assert [line.rpartition("count=")[2] for line in told] == ["1", "2", "4", "8"]


def test_the_form_is_plain_json(model: str, tmp_path: Path) -> None:
    """Whoever reads a bundle by eye or by script finds lists of numbers."""

    async def run() -> dict[str, Any]:
        rig = Rig(model, tmp_path / "r", plays([300, EOS]))
        await rig.ask()
        await rig.recorder.close()
        (file,) = rig.folder.iterdir()
        tree: dict[str, Any] = json.loads(file.read_bytes())
        return tree

    tree = asyncio.run(run())
    assert (tree["schema"], tree["prompt_token_ids"], tree["answer_token_ids"]) == (1, [5, 6, 7], [300, EOS])
