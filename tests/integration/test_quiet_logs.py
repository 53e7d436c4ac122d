"""What the logs of a topology say of requests, at every level: the facts of api.md, and no word or id of them."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest

from longcat_pd import log
from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import Topology, cluster_file, pools

WORD = "Zauberlehrling"
IDS = [211, 97, 143, 305, 118, 260, 77, 199]
FACTS = {
    "transfer", "pair", "attempt", "prompt", "output", "finish",
    "queue_ms", "prefill_ms", "transfer_ms", "ttft_ms", "tpot_ms", "accepted",
}  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def ask(topology: Topology) -> list[int]:
    """Requests that end well, are refused, fail, or are left; the ids of one answer."""
    client, message = topology.client, {"role": "user", "content": f"{WORD} " * 20}
    for body in (
        {"messages": [message], "max_tokens": 8, "ignore_eos": True},
        {"messages": [message], "max_tokens": 8, "stop": [WORD], "user": WORD},
        {"messages": [message], "max_tokens": 4, "response_format": {"type": "json_object"}},
    ):
        answer = await client.post(CHAT, json=body, headers={"X-Request-Id": "told"})
        assert answer.status_code == 200, answer.text
    for wrong in (
        {"messages": [{**message, "role": WORD}]},
        {"messages": [message], "max_tokens": 100_000},
        {"messages": [message], "tool_choice": WORD},
        {"prompt": [*IDS, 10**9]},
        {"prompt": WORD, "stop": [WORD] * 50},
        {WORD: WORD},
    ):
        answer = await client.post(CHAT if "messages" in wrong else COMPLETIONS, json=wrong)
        assert 400 <= answer.status_code < 500, answer.text
    assert (await client.post("/tokenize", json={"prompt": WORD})).status_code == 200
    await client.post(f"/v1/{WORD}", content=WORD)
    body = {"prompt": IDS, "stream": True, "ignore_eos": True, "max_tokens": 300}
    async with client.stream("POST", COMPLETIONS, json=body) as leaving:
        await anext(leaving.aiter_lines())
    said = await topology.complete(IDS, max_tokens=12)
    streamed = {**body, "max_tokens": 12, "temperature": 0}
    async with client.stream("POST", COMPLETIONS, json=streamed, headers={"X-Request-Id": "story"}) as answer:
        assert (await answer.aread()).rstrip().endswith(b"[DONE]")
    await topology.idle_within(30.0)
    return list(said["token_ids"])


async def test_no_line_has_a_word_or_an_id_and_the_end_of_a_request_has_all_facts(
    tmp_path: Path, tiny: MakeCheckpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    drafts = {"num_draft_tokens": 2}
    path = cluster_file(tmp_path, tiny("2.0", with_tokenizer=True), prefill_engine=drafts, decode_engine=drafts)
    lines = io.StringIO()
    log.set_up(level="debug", stream=lines)
    try:
        async with pools(resolve.load(path)) as topology:
            answer = await ask(topology)
    finally:
        log.set_up()
    written = lines.getvalue() + "".join(capfd.readouterr())
    assert written.count("request_finished") >= 3 * 5 and " debug " in written
    assert [line for line in written.splitlines() if WORD.lower() in line.lower()] == []
    for ids in (IDS, answer):
        runs = [rf"\b{a}\W{{1,3}}{b}\W{{1,3}}{c}\b" for a, b, c in zip(ids, ids[1:], ids[2:], strict=False)]
        assert [line for line, run in itertools.product(written.splitlines(), runs) if re.search(run, line)] == []
    ends = [line for line in written.splitlines() if " request_finished " in line and line.endswith("request=story")]
    facts = [set(re.findall(r" (\w+)=", line)) for line in ends]
    assert len(ends) == 3, "one each of balancer, P and D"
    assert set.union(*facts) >= FACTS
    assert [names for names in facts if names >= FACTS - {"accepted"}], "that of the balancer has them together"
    assert all(names >= {"transfer", "pair", "attempt", "prompt", "output", "finish"} for names in facts)
