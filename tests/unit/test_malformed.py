"""Thousands of bodies that are almost right, or not at all, at both faces: refused as they should be, and by whom.

Behind the balancer are workers that count their calls, behind the other face is an instance that generates by a script.
"""

import asyncio
import time

import httpx
import pytest

from tests.balancer_rig import DONE as LAST
from tests.balancer_rig import Rig, chunk, prefilled, raw, stream, whole
from tests.contract import Contract
from tests.fuzzing import Shot, check_refusal, shots
from tests.unit.fake_service import EOS, FakeService, make_app, plays, write_folder

FEW_AND_MANY = [1500, pytest.param(20_000, marks=pytest.mark.slow)]
LIMIT_S = 2.0  # of this process's own time for one answer
GOOD_CHAT = Shot("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2}')


@pytest.fixture(scope="module")
def contract():
    return Contract()


async def answers(call):
    """A worker that answers streams with streams."""
    is_stream = b'"stream": true' in call.body or b'"stream":true' in call.body
    return await (stream(chunk("a"), chunk("", "stop"), LAST) if is_stream else whole)(call)


async def rig_of_counting_workers():
    rig = await Rig.make(max_body_bytes=1 << 20)
    rig.script(p0=prefilled, d0=answers)
    calls: list[str] = []

    async def counted(call):
        calls.append(call.path)
        return await raw(200, b'{"tokens":[]}')(call)

    for path in ("/tokenize", "/detokenize"):
        rig.cluster.routes["p0", path] = counted
    return rig, calls


@pytest.mark.parametrize("count", FEW_AND_MANY)
async def test_the_balancer_refuses_what_it_can_without_calling_a_worker(contract, count):
    rig, texts = await rig_of_counting_workers()
    num_refused, spent = 0, 0.0
    for number, shot in enumerate(shots(contract, count, seed=5, name="longcat")):
        before = len(rig.cluster.calls) + len(texts)
        began = time.process_time()
        answer = await rig.post(shot.body, path=shot.path, **shot.headers).end()
        took = time.process_time() - began
        spent += took
        num_calls = len(rig.cluster.calls) + len(texts) - before
        assert took < LIMIT_S, shot
        if shot.error is not None or answer.status != 200:
            check_refusal(shot, answer.status, answer.headers, answer.body)
            assert num_calls == 0, shot
            num_refused += 1
        else:
            assert num_calls == (1 if "token" in shot.path else 2), shot
        if number % 500 == 0:
            good = await rig.post(GOOD_CHAT.body, path=GOOD_CHAT.path).end()
            assert good.status == 200 and rig.is_idle()
            rig.cluster.calls.clear()
    assert count // 2 < num_refused < count and spent / count < 0.1
    assert rig.is_idle()


@pytest.mark.parametrize("count", FEW_AND_MANY)
async def test_one_engine_refuses_the_same_with_the_same_words(contract, tmp_path, count):
    """And what only the tokenizer or the vocabulary can judge is refused as the client's fault, too."""
    folder = write_folder(tmp_path / "model")
    service = FakeService(folder, plays([60, 61, EOS]))
    rig, _ = await rig_of_counting_workers()
    app = make_app(service, max_body_bytes=1 << 20)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face") as client:
        for shot in shots(contract, count // 2, seed=6, name="tiny"):
            headers = {"content-type": "application/json", "x-request-id": "r", **shot.headers}
            before = len(service.requests)
            content = {name: value.encode() for name, value in headers.items()}
            began = time.process_time()
            answer = await asyncio.wait_for(client.post(shot.path, content=shot.body, headers=content), 60.0)
            assert time.process_time() - began < LIMIT_S, shot
            contract.check("POST", shot.path, status=answer.status_code, headers=answer.headers, content=answer.content)
            if answer.status_code == 200:
                assert shot.error is None
                continue
            check_refusal(shot, answer.status_code, answer.headers, answer.content)
            assert len(service.requests) == before
            if shot.error is not None and shot.error.code != "model_not_found":
                other = await rig.post(shot.body, path=shot.path, **headers).end()
                assert (other.status, other.body) == (answer.status_code, answer.content), shot
    assert service.num_running == 0 and rig.is_idle()
